"""Errors name command-line options, and fairseq's commands end with a sentence."""

import re
import sys

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugins.fairseq_integration import error_messages
from fairseq_plugins.fairseq_integration.error_messages import errors_name_options
from fairseq_plugins.fairseq_integration.registration import register
from fairseq_plugins.segment_language_model.attention_blocks import rel_shift

# this does not happen by itself if another test has imported only the layers
register()


def refused(path):
    path.write_bytes(b"")
    checkpoint_utils.load_checkpoint_to_cpu(str(path))


def refused_to_fairseq(path):
    try:
        refused(path)
    except Exception:
        raise Exception("Cannot load model parameters")  # noqa: B904 (as fairseq does it)


@pytest.mark.parametrize(
    ("work", "refuses"),
    [
        (refused, True),
        (refused_to_fairseq, True),
        (lambda path: int("none"), False),
        # raised in this package, but not on purpose: too few dimensions
        (lambda path: rel_shift(torch.zeros(3), 2), False),
    ],
)
def test_what_is_refused_here_is_a_sentence(work, refuses, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fairseq-train", "data"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error_messages.print_errors_as_sentences()
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(Exception) as raised:  # noqa: PT011 (each has its own)
        work(path)
    sys.excepthook(raised.type, raised.value, raised.tb)
    printed = capsys.readouterr().err
    sentence = f"error: the checkpoint {path} is cut short or damaged (it is empty)"
    assert printed.startswith(sentence if refuses else "Traceback (most recent call last)")
    assert ("Traceback" in printed) != refuses


def test_other_programs_keep_their_tracebacks(monkeypatch):
    programs = {"/bin/fairseq-eval-lm": True, "/lib/fairseq_cli/train.py": True, "train.py": False}
    for program, own in (programs | {"": False}).items():
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
    # other errors are left alone
    for error in (KeyError("`slots`"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")):
        with pytest.raises(type(error)) as caught, errors_name_options(OPTIONS.get):
            raise error
        assert caught.value is error
