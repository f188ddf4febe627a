"""Checkpoints that try to run code when they are loaded; each tries to make a folder, the mark."""

import builtins
import functools
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

import fairseq_plugins
from scripts._shared.checkpoints import read_checkpoint
from tests.end_to_end.commands import call, evaluation_command, run
from tests.end_to_end.trainings import assert_refused, training_command


class Reduced:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call[0], self._call[1:]


def chain(mark):
    """Return an object that reaches a function through attributes of attributes."""
    run_code = Reduced(getattr, Reduced(getattr, builtins.__import__, "__self__"), "exec")
    return Reduced(functools.partial, run_code, f"import os; os.mkdir({mark!r})")


OBJECTS = {
    "a function that is called": lambda mark: Reduced(os.mkdir, mark),
    "a chain of attributes": chain,
    "a pickle in a pickle": lambda mark: Reduced(
        pickle.loads, pickle.dumps(Reduced(os.mkdir, mark))
    ),
    "an array of objects": lambda mark: np.array([Reduced(os.mkdir, mark)], dtype=object),
}


def assert_loaders_refuse(path, mark):
    """Check fairseq's loader, that of scripts, and load."""
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    with pytest.raises(ValueError, match=r"^--checkpoint .* holds more than weights"):
        read_checkpoint(path)
    with pytest.raises(ValueError, match="Weights only load failed"):
        fairseq_plugins.load(path)
    assert not mark.exists()


@pytest.mark.parametrize("construction", OBJECTS)
def test_nothing_in_a_checkpoint_is_executed(tmp_path, construction):
    path, mark = tmp_path / "checkpoint.pt", tmp_path / "mark"
    torch.save({"model": {}, "more": OBJECTS[construction](str(mark))}, path)
    assert_loaders_refuse(path, mark)


def test_nothing_in_a_bare_pickle_is_executed(tmp_path):
    """As old versions of torch wrote it, here with a function's name on the pickle's stack."""
    path, mark = tmp_path / "checkpoint.pt", tmp_path / "mark"
    name, function = str(mark).encode(), b"\x8c\x02os\x8c\x05mkdir\x93"
    Path(path).write_bytes(b"\x80\x04" + function + b"\x8c" + bytes([len(name)]) + name + b"\x85R.")
    assert_loaders_refuse(path, mark)


@pytest.mark.parametrize("command", ["fairseq-eval-lm", "restore", "finetune"])
def test_a_command_executes_nothing_in_a_checkpoint(corpora, trained, tmp_path, command):
    model = shutil.copytree(trained("transformer_xl"), tmp_path / "model")
    path, mark = model / "checkpoint.pt", tmp_path / "mark"
    state = torch.load(model / "checkpoint_last.pt", weights_only=True)
    state["extra_state"]["more"] = Reduced(os.mkdir, str(mark))
    torch.save(state, path)
    words = {
        "fairseq-eval-lm": evaluation_command(corpora["text"], path),
        "restore": training_command(
            *(corpora, "transformer_xl", model, "--restore-file", path, "--max-update", 21)
        ),
        "finetune": training_command(
            *(corpora, "transformer_xl", tmp_path, "--finetune-from-model", path),
            *("--max-update", 1),
        ),
    }[command]
    assert_refused(*call(*words), "Weights only load failed")
    assert not mark.exists()
    # the original checkpoint is accepted
    shutil.copy(model / "checkpoint_last.pt", path)
    run(*words)
