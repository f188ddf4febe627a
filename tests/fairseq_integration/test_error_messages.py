"""Errors name options where a model translates them, and end fairseq's commands in a sentence."""

import re
import sys

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugins.fairseq_integration import error_messages
from fairseq_plugins.fairseq_integration.error_messages import errors_name_options
from fairseq_plugins.fairseq_integration.registration import register
from fairseq_plugins.segment_language_model.attention_blocks import rel_shift

# not by itself where another test has imported the layers alone
register()


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


def failed_here_with_a_value(path):
    # too few dimensions
    rel_shift(torch.zeros(3), 2)


@pytest.mark.parametrize(
    ("work", "printed_first"),
    [
        (refused, "error: the checkpoint {path} is cut short or damaged (it is empty)"),
        (refused_to_fairseq, "error: the checkpoint {path} is cut short or damaged (it is empty)"),
        (raised_elsewhere, "Traceback (most recent call last)"),
        (failed_here_with_a_value, "Traceback (most recent call last)"),
    ],
)
def test_what_is_refused_here_is_a_sentence(work, printed_first, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fairseq-train", "data"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error_messages.print_errors_as_sentences()
    with pytest.raises(Exception) as raised:  # noqa: PT011 (each has its own)
        work(tmp_path / "checkpoint.pt")
    sys.excepthook(raised.type, raised.value, raised.tb)
    printed = capsys.readouterr().err
    assert printed.startswith(printed_first.format(path=tmp_path / "checkpoint.pt"))
    assert ("Traceback" in printed) == ("Traceback" in printed_first)


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
    error_messages.print_errors_as_sentences()
    assert (sys.excepthook is not sys.__excepthook__) == own


OPTIONS = {"slots": "--memory-slots", "knn": "--memory-knn"}


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ("`knn` is 9, and `slots` is 4", "--memory-knn is 9, and --memory-slots is 4"),
        # what is not known stays, as do words without backquotes
        ("`heads` is 0, and `slots` is 4", "`heads` is 0, and --memory-slots is 4"),
        ("slots is 5", "slots is 5"),
        ("`a slots` is 5", "`a slots` is 5"),
    ],
)
def test_arguments_in_backquotes_become_options(raised, text):
    caught = pytest.raises(ValueError, match=f"^{re.escape(text)}$")
    with caught, errors_name_options(OPTIONS.get):
        raise ValueError(raised)


def test_other_errors_are_left_alone():
    for error in (KeyError("`slots`"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")):
        with pytest.raises(type(error)) as caught, errors_name_options(OPTIONS.get):
            raise error
        assert caught.value is error
