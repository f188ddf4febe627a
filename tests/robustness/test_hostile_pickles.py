"""Checkpoints that would run something when they are loaded, given to all that opens checkpoints.

Each would make a folder, the mark.
"""

import builtins
import functools
import io
import os
import pickle
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch

from tests.end_to_end.commands import Command
from tests.robustness.trainings import assert_refused, evaluation, training, translation


class Reduced:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call[0], self._call[1:]


def in_checkpoint(payload):
    """Put what makes the mark into the state of a checkpoint that is whole otherwise."""

    def write(path, mark):
        state = torch.load(path, weights_only=True)
        state["extra_state"]["more"] = payload(str(mark))
        torch.save(state, path)

    return write


def opcodes(make, in_archive=True):
    """Write a pickle's opcodes in the archive that torch reads, or alone as old versions did."""

    def write(path, mark):
        content = make(str(mark).encode())
        if not in_archive:
            path.write_bytes(content)
            return
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (
                ("data.pkl", content),
                ("version", b"3\n"),
                ("byteorder", b"little"),
            ):
                archive.writestr(f"archive/{name}", data)

    return write


def stacked(mark):
    """Opcodes that find a function by names on the stack and call it."""
    found = b"\x8c\x02os\x8c\x05mkdir\x93"
    return b"\x80\x04" + found + b"\x8c" + bytes([len(mark)]) + mark + b"\x85R."


def chain(mark):
    """Attributes of attributes, which end at a function."""
    found = Reduced(getattr, Reduced(getattr, builtins.__import__, "__self__"), "exec")
    return Reduced(functools.partial, found, f"import os; os.mkdir({mark!r})")


def archive_in_archive(mark):
    """An archive of torch's within another, which torch itself would load."""
    inner = io.BytesIO()
    torch.save(Reduced(os.mkdir, mark), inner)
    trusting = functools.partial(torch.load, weights_only=False)
    return Reduced(trusting, Reduced(io.BytesIO, inner.getvalue()))


CONSTRUCTIONS = {
    "a function that is called": in_checkpoint(lambda mark: Reduced(os.mkdir, mark)),
    "a chain of attributes": in_checkpoint(chain),
    "stacked opcodes": opcodes(stacked, in_archive=False),
    "stacked opcodes in an archive": opcodes(stacked),
    "an instance of old classes": opcodes(lambda m: b"(S'" + m + b"'\nios\nmkdir\n."),
    "a module that does it when imported": opcodes(lambda m: b"\x80\x02cside_effects\nx\n."),
    "a pickle in a pickle": in_checkpoint(
        lambda mark: Reduced(pickle.loads, pickle.dumps(Reduced(os.mkdir, mark)))
    ),
    "an array of objects": in_checkpoint(
        lambda mark: np.array([Reduced(os.mkdir, mark)], dtype=object)
    ),
    "an archive in an archive": in_checkpoint(archive_in_archive),
}
# what opens checkpoints: the paper of the checkpoint, and the words given a path and the corpora
OPENERS = {
    "fairseq-eval-lm": ("transformer_xl", lambda path, c: evaluation(c["text"], path)),
    "fairseq-generate": ("weighted_transformer", lambda path, c: translation(c["pairs"], path)),
    "fairseq-train --restore-file": (
        "transformer_xl",
        lambda path, c: training(
            *(c, "transformer_xl", path.parent, "--restore-file", path, "--max-update", 9)
        ),
    ),
    "fairseq-train --finetune-from-model": (
        "transformer_xl",
        lambda path, c: training(
            *(c, "transformer_xl", path.parent / "new", "--finetune-from-model", path),
            *("--max-update", 1),
        ),
    ),
    "convert.average": (
        "transformer_xl",
        lambda path, c: (
            *("scripts.convert.average", path, path.with_name("checkpoint_1_4.pt")),
            *("--output", path.parent / "average.pt"),
        ),
    ),
    "plot.attention_spans": (
        "all_attention",
        lambda path, c: (
            *("scripts.plot.attention_spans", "--checkpoint", path),
            *("--output", path.parent / "out"),
        ),
    ),
    "plot.branch_weights": (
        "weighted_transformer",
        lambda path, c: (
            *("scripts.plot.branch_weights", "--checkpoint", path),
            *("--output", path.parent / "out"),
        ),
    ),
    "evaluate.memory_usage": (
        "product_key_memory",
        lambda path, c: (
            *("scripts.evaluate.memory_usage", "--data", c["text"], "--cpu"),
            *("--checkpoint", f"one={path}", "--output", path.parent / "out"),
        ),
    ),
}


def import_from_here():
    """Let a pickle find the module side_effects."""
    sys.path.insert(0, os.environ["SIDE_EFFECTS"])


def open_checkpoint(opener, corpora, trained, folder, change):
    """Give a command the checkpoint of its paper, changed."""
    paper, words = OPENERS[opener]
    model = shutil.copytree(trained / paper, folder / "model")
    path = model / "checkpoint.pt"
    shutil.copy(model / "checkpoint_last.pt", path)
    change(path)
    return Command(*words(path, corpora), before=import_from_here).wait()


@pytest.fixture(autouse=True)
def side_effects(tmp_path, monkeypatch):
    """A module that makes the mark when it is imported."""
    folder, mark = tmp_path / "modules", tmp_path / "mark"
    folder.mkdir()
    (folder / "side_effects.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nx = 1\n")
    monkeypatch.setenv("SIDE_EFFECTS", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("opener", OPENERS)
def test_the_checkpoint_as_it_is_is_opened(corpora, trained, tmp_path, opener):
    status, printed = open_checkpoint(opener, corpora, trained, tmp_path, lambda path: None)
    assert status == 0, printed[-2000:]


@pytest.mark.parametrize(
    ("opener", "construction"),
    [
        *(("fairseq-eval-lm", construction) for construction in CONSTRUCTIONS),
        # all of them have one loader
        *(
            pytest.param(opener, construction, marks=pytest.mark.slow)
            for opener in OPENERS
            for construction in ("a function that is called", "stacked opcodes")
            if opener != "fairseq-eval-lm"
        ),
    ],
)
def test_nothing_in_a_checkpoint_is_executed(corpora, trained, tmp_path, opener, construction):
    mark = tmp_path / "mark"
    status, printed = open_checkpoint(
        opener, corpora, trained, tmp_path, lambda path: CONSTRUCTIONS[construction](path, mark)
    )
    assert not mark.exists()
    assert_refused(status, printed, "checkpoint.pt")
