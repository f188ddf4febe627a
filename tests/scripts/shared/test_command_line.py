import logging
import math
import re
import signal
import warnings
from pathlib import Path

import pytest

from scripts._shared.command_line import (
    NamedFile,
    check_at_least,
    exit_status,
    parse_named_files,
    parse_numbers,
)


def test_checkpoints_have_labels_or_are_called_by_their_path(tmp_path):
    odd = tmp_path / "a=b.pt"
    odd.touch()
    assert parse_named_files("--checkpoint", ["XL=x.pt", str(tmp_path / "y.pt"), str(odd)]) == [
        NamedFile("XL", (tmp_path.cwd() / "x.pt")),
        NamedFile(str(tmp_path / "y.pt"), tmp_path / "y.pt"),
        NamedFile(str(odd), odd),
    ]


def test_a_label_that_occurs_twice_is_refused():
    message = "--checkpoint has 'XL' more than once: give each a label of its own, LABEL=PATH"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_named_files("--checkpoint", ["XL=x.pt", "XL=y.pt"])


def test_numbers_rise_and_differ():
    assert parse_numbers("--step", "30,4,30", int, 0, math.inf) == [4, 30]
    assert parse_numbers("--ratios", "1,0.5", float, 0, 1) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "kind", "most", "bounds"),
    [
        ("3,,4", int, math.inf, "at least 1"),
        ("0,3", int, math.inf, "at least 1"),
        ("3,9", int, 8, "from 1 to 8"),
        ("nan", float, 8, "from 1 to 8"),
    ],
)
def test_no_numbers_are_refused(text, kind, most, bounds):
    message = f"--step is {text!r}: give numbers {bounds} with commas between them, no spaces"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_numbers("--step", text, kind, 1, most)


def test_small_numbers_are_refused():
    check_at_least(1, stride=1, max_tokens=None)
    with pytest.raises(ValueError, match="--batch-size is 0: it must be at least 1"):
        check_at_least(1, stride=1, batch_size=0)


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ValueError("--step is 0"), 1, ["error: --step is 0"]),
        (FloatingPointError("not finite"), 1, ["error: not finite"]),
        (OSError(28, "No space", "plot.png"), 1, ["--output out: ", "plot.png", "make room"]),
        (KeyboardInterrupt(), 130, ["interrupted; what is done is kept"]),
    ],
)
def test_errors_and_ctrl_c_are_one_line(capsys, error, status, named):
    def work():
        raise error

    assert exit_status(work, "what is done is kept", Path("out")) == status
    (line,) = capsys.readouterr().err.split("\n")[-2:-1]
    assert all(words in line for words in named)


def test_libraries_keep_silent_during_the_work():
    before = logging.getLogger().level
    levels = []

    def work():
        levels.append(logging.getLogger().level)
        warnings.warn("'pin_memory' argument is set as true but there is none", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exit_status(work, "") == 0
    assert levels == [logging.WARNING]
    assert logging.getLogger().level == before


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def ends(request):
    """A signal that ends processes."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_kill_ends_a_command_as_ctrl_c_does(ends, capsys):
    assert exit_status(lambda: signal.raise_signal(ends), "what is done is kept") == 130
    assert capsys.readouterr().err == "\ninterrupted; what is done is kept\n"
    assert signal.getsignal(ends) == signal.SIG_DFL


def test_signals_that_nohup_set_aside_stay_so(ends):
    signal.signal(ends, signal.SIG_IGN)
    assert exit_status(lambda: signal.raise_signal(ends)) == 0
