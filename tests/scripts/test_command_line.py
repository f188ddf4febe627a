"""Options of commands, and how commands end."""

import logging
import signal
from pathlib import Path
from unittest.mock import Mock

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
    with pytest.raises(ValueError, match="--checkpoint has 'XL' more than once: "):
        parse_named_files("--checkpoint", ["XL=x.pt", "XL=y.pt"])


def test_numbers_rise_and_differ():
    assert parse_numbers("--step", "30,4,30", 0) == [4, 30]
    for text in ("3,,4", "0,3", "nan"):
        with pytest.raises(ValueError, match=f"--step is '{text}': give numbers of at least 1"):
            parse_numbers("--step", text, 1)
    check_at_least(1, stride=1, max_tokens=None)
    with pytest.raises(ValueError, match="--batch-size is 0: it must be at least 1"):
        check_at_least(1, stride=1, batch_size=0)


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ValueError("--step is 0"), 1, ["error: --step is 0"]),
        (OSError(28, "No space", "plot.png"), 1, ["--output out: ", "plot.png", "make room"]),
        (KeyboardInterrupt(), 130, ["interrupted; what is done is kept"]),
    ],
)
def test_errors_and_ctrl_c_are_one_line(capsys, error, status, named):
    assert exit_status(Mock(side_effect=error), "what is done is kept", Path("out")) == status
    (line,) = capsys.readouterr().err.split("\n")[-2:-1]
    assert all(words in line for words in named)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_kill_ends_a_command_as_ctrl_c_does_unless_nohup_set_it_aside(number, capsys):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert exit_status(lambda: signal.raise_signal(number), "what is done is kept") == 130
        assert capsys.readouterr().err == "\ninterrupted; what is done is kept\n"
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert exit_status(lambda: signal.raise_signal(number)) == 0
    finally:
        signal.signal(number, before)


def test_a_command_hides_the_debugging_messages_that_importing_fairseq_lets_through(caplog):
    def work():
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger("matplotlib.font_manager").debug("a font")
        logging.getLogger("matplotlib.font_manager").warning("no font")

    level = logging.getLogger().level
    try:
        assert exit_status(work) == 0
    finally:
        logging.getLogger().setLevel(level)
    assert [record.message for record in caplog.records] == ["no font"]
