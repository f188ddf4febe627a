"""fairseq's commands end with a sentence where this package refuses something."""

import sys

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugins.fairseq_integration import safe_loading, sentences
from fairseq_plugins.segment_language_model.attention_blocks import rel_shift
from fairseq_plugins.segment_language_model.positions import sinusoids


def refused(path):
    path.write_bytes(b"")
    checkpoint_utils.load_checkpoint_to_cpu(str(path))


def refused_to_fairseq(path):
    try:
        refused(path)
    except Exception:
        raise Exception("Cannot load model parameters")  # noqa: B904 (as fairseq does it)


def raised_elsewhere(path):
    int("none")


def failed_here(path):
    sinusoids(None, 2)


def failed_here_with_a_value(path):
    # too few dimensions
    rel_shift(torch.zeros(3), 2)


def opened_here(path):
    safe_loading._what_is_cut(str(path))


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (refused, "error: the checkpoint {path} is cut short or damaged (it is empty)"),
        (refused_to_fairseq, "error: the checkpoint {path} is cut short or damaged (it is empty)"),
        (raised_elsewhere, "Traceback (most recent call last)"),
        (failed_here, "Traceback (most recent call last)"),
        (failed_here_with_a_value, "Traceback (most recent call last)"),
        (opened_here, "Traceback (most recent call last)"),
    ],
)
def test_what_is_refused_here_is_told_in_a_sentence(work, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fairseq-train", "data"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    sentences.tell_errors_in_a_sentence()
    with pytest.raises(Exception) as raised:  # noqa: PT011 (each has its own)
        work(tmp_path / "checkpoint.pt")
    sys.excepthook(raised.type, raised.value, raised.tb)
    printed = capsys.readouterr().err
    assert printed.startswith(told.format(path=tmp_path / "checkpoint.pt"))
    assert ("Traceback" in printed) == ("Traceback" in told)


@pytest.mark.parametrize(
    ("program", "own"),
    [
        ("/usr/bin/fairseq-eval-lm", True),
        ("/lib/fairseq_cli/train.py", True),
        ("train.py", False),
        ("", False),
    ],
)
def test_other_programs_keep_their_tracebacks(program, own, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    sentences.tell_errors_in_a_sentence()
    assert (sys.excepthook is not sys.__excepthook__) == own
