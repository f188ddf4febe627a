"""Checkpoints that try to run code when they are loaded, given to all users of checkpoints.

Each tries to make a folder, the mark.
"""

import builtins
import functools
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

from scripts._shared.checkpoints import read_checkpoint
from tests.end_to_end.commands import Command, evaluation_command, run
from tests.end_to_end.trainings import assert_refused, training_command, translation_command


class Reduced:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call[0], self._call[1:]


def write_archive(path, content):
    """Write a pickle's opcodes into an archive in torch's format."""
    parts = {"data.pkl": content, "version": b"3\n", "byteorder": b"little"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(f"archive/{name}", data)


def stacked(mark):
    """Return opcodes that find a function by names on the stack and call it."""
    found = b"\x8c\x02os\x8c\x05mkdir\x93"
    return b"\x80\x04" + found + b"\x8c" + bytes([len(mark)]) + mark + b"\x85R."


def chain(mark):
    """Return an object that reaches a function through attributes of attributes."""
    found = Reduced(getattr, Reduced(getattr, builtins.__import__, "__self__"), "exec")
    return Reduced(functools.partial, found, f"import os; os.mkdir({mark!r})")


def archive_in_archive(mark):
    """Return an archive within an archive; torch itself would load the inner one."""
    inner = io.BytesIO()
    torch.save(Reduced(os.mkdir, mark), inner)
    trusting = functools.partial(torch.load, weights_only=False)
    return Reduced(trusting, Reduced(io.BytesIO, inner.getvalue()))


OBJECTS = {
    "a function that is called": lambda mark: Reduced(os.mkdir, mark),
    "a chain of attributes": chain,
    "a pickle in a pickle": lambda mark: Reduced(
        pickle.loads, pickle.dumps(Reduced(os.mkdir, mark))
    ),
    "an array of objects": lambda mark: np.array([Reduced(os.mkdir, mark)], dtype=object),
    "an archive in an archive": archive_in_archive,
}
OPCODES = {
    # a pickle alone, as old versions of torch wrote it
    "stacked opcodes alone": stacked,
    "stacked opcodes": stacked,
    "an instance of old classes": lambda mark: b"(S'" + mark + b"'\nios\nmkdir\n.",
    "a module that does it when imported": lambda mark: b"\x80\x02cside_effects\nx\n.",
}
# commands that open checkpoints, and the paper of their checkpoint
OPENERS = {
    "fairseq-eval-lm": "transformer_xl",
    "fairseq-generate": "weighted_transformer",
    "fairseq-train --restore-file": "transformer_xl",
    "fairseq-train --finetune-from-model": "transformer_xl",
    "scripts.convert.average": "transformer_xl",
    "scripts.inspect": "all_attention",
    "scripts.evaluate.memory_usage": "product_key_memory",
}


def words_of(opener, path, corpora):
    folder, (name, *option) = path.parent, opener.split()
    if name == "fairseq-eval-lm":
        return evaluation_command(corpora["text"], path)
    if name == "fairseq-generate":
        return translation_command(corpora["pairs"], path)
    if option:
        new, updates = (folder, 21) if option == ["--restore-file"] else (folder / "new", 1)
        words = (new, *option, path, "--max-update", updates)
        return training_command(corpora, OPENERS[opener], *words)
    if name.endswith("average"):
        return (name, path, path.with_name("checkpoint_1_4.pt"), "--output", folder / "average.pt")
    if name.endswith("inspect"):
        return (name, path, "--data", corpora["text"], "--output", folder / "page.html")
    if name.endswith("memory_usage"):
        path = f"one={path}"
        name, *option = (name, "--data", corpora["text"], "--cpu")
    return (name, *option, "--checkpoint", path, "--output", folder / "out")


@pytest.mark.parametrize("construction", [*OBJECTS, *OPCODES])
def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch, construction):
    path, mark, modules = (tmp_path / name for name in ("checkpoint.pt", "mark", "modules"))
    modules.mkdir()
    (modules / "side_effects.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nx = 1\n")
    monkeypatch.syspath_prepend(modules)
    if construction in OBJECTS:
        torch.save({"model": {}, "more": OBJECTS[construction](str(mark))}, path)
    else:
        write = Path.write_bytes if construction.endswith("alone") else write_archive
        write(path, OPCODES[construction](str(mark).encode()))
    # fairseq's commands and load
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    with pytest.raises(ValueError, match=r"^--checkpoint .* holds more than weights"):
        read_checkpoint(path)
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("opener", OPENERS)
def test_whatever_opens_a_checkpoint_executes_nothing_in_it(corpora, trained, tmp_path, opener):
    mark, model = tmp_path / "mark", shutil.copytree(trained(OPENERS[opener]), tmp_path / "model")
    path = model / "checkpoint.pt"
    state = torch.load(model / "checkpoint_last.pt", weights_only=True)
    state["extra_state"]["more"] = Reduced(os.mkdir, str(mark))
    torch.save(state, path)
    words = words_of(opener, path, corpora)
    ours = opener.startswith("scripts.")
    assert_refused(*Command(*words).wait(), "checkpoint.pt" if ours else "Weights only load failed")
    assert not mark.exists()
    # the original checkpoint is accepted
    shutil.copy(model / "checkpoint_last.pt", path)
    run(*words)
