"""Checkpoints that try to run code when they are loaded; each tries to make a folder, the mark."""

import pickle
import shutil

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

import fairseq_plugins
from scripts._shared.checkpoints import read_checkpoint
from tests.end_to_end.commands import call, evaluation_command, run
from tests.end_to_end.trainings import assert_refused, training_command
from tests.scripts.evaluate.saved_models import UnsafePickle


def bare_pickle(mark):
    """Return a file as old versions of torch wrote it, with a function's name on the stack."""
    name, function = mark.encode(), b"\x8c\x02os\x8c\x05mkdir\x93"
    return b"\x80\x04" + function + b"\x8c" + bytes([len(name)]) + name + b"\x85R."


CONTENTS = {
    "a function that is called": UnsafePickle,
    # the list of what torch may load has the functions that make arrays
    "an array of objects": lambda mark: np.array([UnsafePickle(mark)], dtype=object),
    "a bare pickle": bare_pickle,
}


@pytest.mark.parametrize("content", CONTENTS)
def test_loaders_execute_nothing_in_a_checkpoint(tmp_path, content):
    path, mark = tmp_path / "checkpoint.pt", tmp_path / "mark"
    made = CONTENTS[content](str(mark))
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        torch.save({"model": {}, "more": made}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    with pytest.raises(ValueError, match=r"^--checkpoint .* holds more than weights"):
        read_checkpoint(path)
    with pytest.raises(ValueError, match="Weights only load failed"):
        fairseq_plugins.load(path)
    assert not mark.exists()


@pytest.mark.parametrize("command", ["evaluate", "--restore-file", "--finetune-from-model"])
def test_a_command_executes_nothing_in_a_checkpoint(corpora, trained, tmp_path, command):
    path, mark = tmp_path / "checkpoint.pt", tmp_path / "mark"
    original = trained("transformer_xl") / "checkpoint_last.pt"
    state = torch.load(original, weights_only=True)
    state["extra_state"]["more"] = UnsafePickle(mark)
    torch.save(state, path)
    words = evaluation_command(corpora["text"], path)
    if command != "evaluate":
        start = (command, path, "--max-update", 21)
        words = training_command(corpora, "transformer_xl", tmp_path / "model", *start)
    assert_refused(*call(*words), "Weights only load failed")
    assert not mark.exists()
    shutil.copy(original, path)
    run(*words)
