"""A quickstart's training: followed in its log, passed over if done."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.quickstart import _steps as steps

OPTIONS = ["--arch", "transformer", "--max-update", "90"]
TRAINED = '2026 | INFO | train_inner | {"epoch": 1, "loss": "%s", "num_updates": "%s"}\n'
VALIDATED = (
    '2026 | INFO | valid | {"epoch": 1, "valid_loss": "9", "valid_nll_loss": "%s", '
    '"valid_num_updates": "%s"}\n'
)


def training(folder, options=OPTIONS):
    return steps.Training(folder, options, "bits", (0.25, 0.5))


@pytest.fixture
def place(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def test_a_log_is_followed_while_it_is_written(place, monkeypatch, capsys):
    # half a line, and the rest of it later; one that another process reads too early is waited for
    text = TRAINED % (4.0, 45) + VALIDATED % (2.0, 45)
    code = (
        "import sys, time\n"
        f"for part in ({text!r}[:140], {text!r}[140:]):\n"
        "    print(part, end='', flush=True)\n"
        "    time.sleep(0.5)\n"
    )
    monkeypatch.setattr(steps, "program", lambda name: sys.executable)
    run = steps.child_process

    @contextmanager
    def write(words, log, append):
        assert words[1:3] == [f"{place}/data/bin", *OPTIONS[:1]]
        with run([sys.executable, "-c", code], log, append) as child:
            yield child

    monkeypatch.setattr(steps, "child_process", write)
    # of a training that was stopped before its first checkpoint: not of this one
    (place / "train.log").write_text(VALIDATED % (9.0, 9))
    training(place).run("[3] training")
    printed = capsys.readouterr().out
    assert re.search(r"^ 50 %, +\d s: training 1\.000, validation 1\.000 bits$", printed, re.M)
    assert (place / "train.log").read_text() == text
    # of one that goes on the log is kept
    monkeypatch.setattr(steps.Training, "progress", lambda self: (45, 1.0))
    training(place).run("[3] training")
    assert (place / "train.log").read_text() == 2 * text
    capsys.readouterr()
    monkeypatch.setattr(steps.Training, "progress", lambda self: (90, 1.0))
    training(place).run("[3] training")
    assert capsys.readouterr().out == "\n[3] training: 90 of 90 updates done, nothing left to do\n"


def test_an_interrupted_quickstart_says_how_it_goes_on(tmp_path, capsys):
    def interrupt(output):
        assert (output / "checkpoints").is_dir()
        raise KeyboardInterrupt

    words = ["--output", str(tmp_path / "a" / "b")]
    description = "python -m scripts.some"
    assert steps.run_quickstart(interrupt, description, Path("x"), "some", words) == 130
    said = "\ninterrupted; `make some` goes on from the last checkpoint\n"
    assert capsys.readouterr().err == said
