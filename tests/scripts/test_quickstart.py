"""Quickstarts: training progress read from logs, and the language model's figures."""

import json
import math
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.quickstart import _steps as steps
from scripts.quickstart import language_model as quickstart

OPTIONS = ["--arch", "transformer", "--max-update", "90"]
TRAINED = '2026 | INFO | train_inner | {"epoch": 1, "loss": "%s", "num_updates": "%s"}\n'
VALIDATED = (
    '2026 | INFO | valid | {"epoch": 1, "valid_loss": "9", "valid_nll_loss": "%s", '
    '"valid_num_updates": "%s"}\n'
)


def test_a_log_is_followed_while_it_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").mkdir()
    training = steps.Training(tmp_path, OPTIONS, "bits", (0.25, 0.5))
    # half a line, and the rest of it later: the reader waits until a line is complete
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
        assert words[1:3] == [f"{tmp_path}/data/bin", *OPTIONS[:1]]
        with run([sys.executable, "-c", code], log, append) as child:
            yield child

    monkeypatch.setattr(steps, "child_process", write)
    # the log of a training that was stopped before its first checkpoint is dropped
    (tmp_path / "train.log").write_text(VALIDATED % (9.0, 9))
    training.run("[3] training")
    printed = capsys.readouterr().out
    assert re.search(r"^ 50 %, +\d s: training 1\.000, validation 1\.000 bits$", printed, re.M)
    assert (tmp_path / "train.log").read_text() == text
    # the log of a training that is resumed is kept
    monkeypatch.setattr(steps.Training, "progress", lambda self: (45, 1.0))
    training.run("[3] training")
    assert (tmp_path / "train.log").read_text() == 2 * text
    capsys.readouterr()
    monkeypatch.setattr(steps.Training, "progress", lambda self: (90, 1.0))
    training.run("[3] training")
    assert capsys.readouterr().out == "\n[3] training: 90 of 90 updates done, nothing left to do\n"


def test_an_interrupted_quickstart_says_how_it_goes_on(tmp_path, capsys):
    def interrupt(output):
        assert (output / "checkpoints").is_dir()
        raise KeyboardInterrupt

    words = ["--output", str(tmp_path / "a" / "b")]
    assert (
        steps.run_quickstart(interrupt, "python -m scripts.some", Path("x"), "some", words) == 130
    )
    assert "`make some` goes on from the last checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("test", "probabilities"),
    [
        # counts in training, with a newline before the text: 2 each of newline-a, a-b and b-newline
        ("ab\n", [3 / 5, 3 / 5, 3 / 5]),
        ("aa", [3 / 5, 1 / 5]),
        ("\nb", [1 / 5, 1 / 5]),
    ],
)
def test_bigram_bits_by_hand(test, probabilities):
    bits = -sum(map(math.log2, probabilities)) / len(test)
    assert quickstart.bigram_bits_per_character("ab\nab\n", test) == pytest.approx(bits, abs=1e-12)


def test_evaluation_with_each_recurrence(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    sizes = {split: {"characters": 12, "tokens": 3} for split in ("train", "valid", "test")}
    (tmp_path / "data" / "preparation.json").write_text(json.dumps({"splits": sizes}))
    ran = []

    def run_logged(words, log):
        ran.append(steps.option(words, "--model-overrides"))
        bits = (8.0, 6.0, 2.0)[len(ran) - 1]
        return (
            "INFO | fairseq_cli.eval_lm | num. model params: 1,234\n"
            "INFO | fairseq_cli.eval_lm | Evaluated 3 tokens in 4.1s (7.9 tokens/s)\n"
            f"INFO | fairseq_cli.eval_lm | Loss (base 2): {bits}, Perplexity: 5.08\n"
        )

    monkeypatch.setattr(quickstart, "run_logged", run_logged)
    # 3 tokens for 12 characters
    expected = dict(zip(quickstart.RECURRENCES, (2.0, 1.5, 0.5), strict=True))
    assert quickstart.evaluate(tmp_path) == expected
    assert ran == [f"{{'mem_len': {tokens}}}" for tokens in quickstart.RECURRENCES.values()]


def test_a_sample_is_decoded():
    log = (
        "INFO | fairseq_cli.interactive | NOTE\n"
        "S-0\tdef\n"
        "H-0\t-1.5\tdef \u2581f (): </s> \u2581\u2581 p </s>\n"
        "D-0\t-1.5\tnot this one\n"
    )
    assert quickstart.decode_sample(log) == "def f():\n  p\n"
