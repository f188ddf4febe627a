"""Checkpoints are whole or not there, folders are locked, weights that do not fit are named."""

import errno
import multiprocessing
import os
import re
import resource
import shutil
import signal
from collections import OrderedDict

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

import fairseq_plugins  # noqa: F401 (changes how fairseq writes)
from fairseq_plugins.fairseq_integration import checkpoint_files

STATE = {"model": {"weight": torch.arange(4096.0)}}
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    checkpoint_utils.torch_persistent_save(STATE, str(path))
    return path


def exit_status_of(work, *arguments):
    """What a process that does ``work`` ends with; a negative number is a signal."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def copy_until_killed(source, target):
    def half(source, target):
        with open(target, "wb") as file:
            file.write(source.read_bytes()[:1000])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    shutil.copyfile = half
    PathManager.copy(source, str(target), overwrite=True)


def test_a_killed_copy_leaves_what_was_there(saved):
    best = saved.with_name("checkpoint_best.pt")
    best.write_bytes(b"the one before")
    assert exit_status_of(copy_until_killed, saved, best) == -signal.SIGKILL
    assert best.read_bytes() == b"the one before"


def test_a_copy_has_the_same_bytes_and_nothing_is_left_beside_it(saved):
    best = saved.with_name("checkpoint_best.pt")
    assert PathManager.copy(str(saved), str(best), overwrite=True)
    assert best.read_bytes() == saved.read_bytes()
    assert sorted(os.listdir(saved.parent)) == ["checkpoint_best.pt", "checkpoint_last.pt"]


def save_on_a_full_disk(path):
    # as a disk that has room for 4 KiB more
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoint_files.time.sleep = lambda seconds: None
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(OSError, match=f"^cannot write the checkpoint {path}: .* room on the disk"):
        checkpoint_utils.torch_persistent_save(STATE, str(path))


def test_a_full_disk_leaves_what_was_there(saved):
    before = saved.read_bytes()
    assert exit_status_of(save_on_a_full_disk, saved) == 0
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("failures", [2, 3])
def test_a_checkpoint_is_written_in_three_tries(saved, monkeypatch, failures):
    """As fairseq does, because a disk may be away for a moment."""
    save, left = torch.save, [None] * failures

    def fail_at_first(content, file):
        if left:
            file.write(b"a part of it")
            left.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        save(content, file)

    monkeypatch.setattr(torch, "save", fail_at_first)
    monkeypatch.setattr(checkpoint_files.time, "sleep", lambda seconds: None)
    before = saved.read_bytes()
    if failures == 3:
        with pytest.raises(OSError, match=f"^cannot write the checkpoint {saved}: .*Input/output"):
            checkpoint_utils.torch_persistent_save({**STATE, "model": {}}, str(saved))
        assert saved.read_bytes() == before
    else:
        checkpoint_utils.torch_persistent_save({**STATE, "model": {}}, str(saved))
        assert saved.read_bytes() != before
    assert os.listdir(saved.parent) == [saved.name]


def test_a_lack_of_memory_is_no_full_disk(saved, monkeypatch):
    def fail(content, file):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        checkpoint_utils.torch_persistent_save(STATE, str(saved))
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize(
    ("number", "kept"), [(errno.ENOSPC, True), (errno.EIO, True), (errno.EINVAL, False)]
)
def test_what_a_disk_reports_at_the_end_counts(saved, monkeypatch, number, kept):
    """But not that it cannot tell."""

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    best = saved.with_name("checkpoint_best.pt")
    best.write_bytes(b"the one before")
    if kept:
        with pytest.raises(OSError, match=os.strerror(number)):
            PathManager.copy(str(saved), str(best), overwrite=True)
        assert best.read_bytes() == b"the one before"
    else:
        PathManager.copy(str(saved), str(best), overwrite=True)
        assert best.read_bytes() == saved.read_bytes()
    assert sorted(os.listdir(saved.parent)) == ["checkpoint_best.pt", "checkpoint_last.pt"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    message = f"^--save-dir is {folder}, where nothing can be written .*Not a directory.*: make"
    with pytest.raises(ValueError, match=message):
        checkpoint_utils.verify_checkpoint_directory(str(folder))
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "run"))
    assert os.listdir(tmp_path / "run") == []


def refuse_to_train_into(folder):
    checkpoint_files._locked.clear()
    checkpoint_files.LOCK_TRIES = 0
    with pytest.raises(ValueError, match=f"^--save-dir is {folder}, where another training is"):
        checkpoint_files.lock_folder(folder)


def test_two_trainings_do_not_write_into_one_folder(tmp_path):
    folder = tmp_path / "run"
    # this one may go on there
    for _ in range(2):
        checkpoint_files.lock_folder(folder)
    assert exit_status_of(refuse_to_train_into, folder) == 0
    assert os.listdir(folder) == []
    os.close(checkpoint_files._locked.pop(folder.resolve()))
    assert exit_status_of(checkpoint_files.lock_folder, folder) == 0


@pytest.mark.parametrize(
    ("weights", "kind", "reason"),
    [
        ({"weight": torch.ones(2, 3)}, ValueError, 'Missing key(s) in state_dict: "bias"'),
        ({"extra": torch.ones(1)}, ValueError, 'Unexpected key(s) in state_dict: "extra"'),
        ({"weight": torch.ones(3, 2)}, ValueError, "size mismatch for weight"),
        ({"bias": 1.0}, ValueError, 'While copying the parameter named "bias"'),
        ({"bias": torch.tensor([1, torch.nan])}, FloatingPointError, "bias has a number that is"),
        ({"bias": torch.tensor([1, torch.inf])}, FloatingPointError, "bias has a number that is"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_a_sentence(weights, kind, reason):
    model = torch.nn.Linear(3, 2)
    if "Missing" not in reason:
        weights = {**model.state_dict(), **weights}
    weights = OrderedDict(weights)
    weights.read_from = "runs/last.pt"
    start = remedy = ""
    if kind is ValueError:
        start = "the weights of the checkpoint runs/last.pt do not fit the model"
        remedy = (
            "give the options that it was trained with, or name another checkpoint; a new training "
            "needs a --save-dir of its own$"
        )
    match = f"^{start}.*{re.escape(reason)}.*: {remedy}"
    loading = checkpoint_files.weights_loaded_into(model, weights)
    with pytest.raises(kind, match=match) as raised, loading:
        model.load_state_dict(weights)
    assert "runs/last.pt" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_statistics_that_are_not_finite_are_refused(number):
    model = torch.nn.BatchNorm1d(2)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights["running_mean"][1] = number
    loading = checkpoint_files.weights_loaded_into(model, weights)
    with pytest.raises(FloatingPointError, match=r"^running_mean has a number that is"), loading:
        model.load_state_dict(weights)


def test_buffers_that_hold_no_weights_may_be_anything():
    """Those that no checkpoint has, and those that fairseq leaves as the memory was."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor(-torch.inf), persistent=False)
    model.register_buffer("_float_tensor", torch.tensor(torch.nan))
    with checkpoint_files.weights_loaded_into(model, model.state_dict()):
        model.load_state_dict(model.state_dict())
