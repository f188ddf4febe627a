"""Checkpoints are written completely or not at all; folders are locked; misfits are named."""

import errno
import fcntl
import os
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

import fairseq_plugins  # noqa: F401 (changes how fairseq writes)
from fairseq_plugins.fairseq_integration import checkpoint_files
from fairseq_plugins.fairseq_integration.checkpoint_files import MisfitError

STATE = {"model": {"weight": torch.arange(4096.0)}}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    checkpoint_utils.torch_persistent_save(STATE, str(path))
    return path


@pytest.mark.parametrize("failures", [2, 3])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "away"), RuntimeError("unexpected pos 64")])
def test_a_checkpoint_is_written_in_three_tries(saved, monkeypatch, failures, error):
    """fairseq does so, too: a disk may be away for a moment. RuntimeError is torch's full disk."""
    save, left = torch.save, [error] * failures

    def fail_at_first(content, file):
        if left:
            file.write(b"a part of it")
            raise left.pop()
        save(content, file)

    monkeypatch.setattr(torch, "save", fail_at_first)
    monkeypatch.setattr(checkpoint_files.time, "sleep", lambda seconds: None)
    before = saved.read_bytes()
    message = f"^cannot write the checkpoint {saved}: .*{error.args[-1]}"
    with pytest.raises(OSError, match=message) if failures == 3 else nullcontext():
        checkpoint_utils.torch_persistent_save({}, str(saved))
    assert (saved.read_bytes() == before) == (failures == 3)
    assert os.listdir(saved.parent) == [saved.name]
    left[:] = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(torch.OutOfMemoryError):
        checkpoint_utils.torch_persistent_save(STATE, str(saved))


@pytest.mark.parametrize(
    ("number", "kept"), [(errno.ENOSPC, True), (errno.EIO, True), (errno.EINVAL, False)]
)
def test_what_a_disk_reports_at_the_end_counts(saved, monkeypatch, number, kept):
    """EINVAL does not count: the disk cannot tell."""

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    best = saved.with_name("checkpoint_best.pt")
    best.write_bytes(b"the one before")
    with pytest.raises(OSError, match=os.strerror(number)) if kept else nullcontext():
        assert PathManager.copy(str(saved), str(best), overwrite=True)
    assert best.read_bytes() == (b"the one before" if kept else saved.read_bytes())
    assert sorted(os.listdir(saved.parent)) == ["checkpoint_best.pt", "checkpoint_last.pt"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    message = f"^--save-dir is {folder}, where nothing can be written .*Not a directory.*: make"
    with pytest.raises(ValueError, match=message):
        checkpoint_utils.verify_checkpoint_directory(str(folder))
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "run"))
    assert os.listdir(tmp_path / "run") == []


def test_two_trainings_do_not_write_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "LOCK_TRIES", 0)
    mine, others = tmp_path / "mine", tmp_path / "others"
    others.mkdir()
    # the same training may lock it again
    for _ in range(2):
        checkpoint_files.lock_folder(mine)
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(mine, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(os.open(others, os.O_RDONLY), fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=f"^--save-dir is {others}, where another training is"):
        checkpoint_files.lock_folder(others)
    assert os.listdir(mine) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bias": None}, 'Missing key(s) in state_dict: "bias"'),
        ({"weight": torch.ones(3)}, "size mismatch for weight"),
        ({"bias": 1.0}, 'While copying the parameter named "bias"'),
        ({"bias": torch.tensor([1, torch.inf])}, "bias has a number that is not finite"),
        ({"running_mean": torch.tensor([1, torch.nan])}, "running_mean has a number"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_a_sentence(changed, reason):
    model = torch.nn.BatchNorm1d(2)
    weights = {**model.state_dict(), **changed}
    weights = OrderedDict((name, weight) for name, weight in weights.items() if weight is not None)
    weights.read_from = "runs/last.pt"
    misfit = "has a number" not in reason
    loading = checkpoint_files.weights_loaded_into(model, weights)
    with pytest.raises(MisfitError if misfit else FloatingPointError) as raised, loading:
        model.load_state_dict(weights)
    message = str(raised.value)
    assert "the checkpoint runs/last.pt" in message
    assert reason in message
    assert "\n" not in message
    assert ("--save-dir" in message) == misfit


def test_buffers_that_hold_no_weights_may_be_anything():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor(-torch.inf), persistent=False)
    model.register_buffer("_float_tensor", torch.tensor(torch.nan))
    with checkpoint_files.weights_loaded_into(model, model.state_dict()):
        model.load_state_dict(model.state_dict())
