"""Checkpoints are whole or not there, what cannot be restored from is named, folders are locked."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import FairseqDataset
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask

from fairseq_plugins.fairseq_integration import checkpoint_files

STATE = {
    "args": None,
    "model": {"weight": torch.arange(4096.0)},
    "optimizer_history": [{"num_updates": 7, "criterion_name": "", "lr_scheduler_state": {}}],
    "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": 1.0},
    "last_optimizer_state": {},
}
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
def test_what_a_disk_tells_at_the_end_counts(saved, monkeypatch, number, kept):
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


def test_a_checkpoint_is_read_as_it_was_written(saved):
    state = checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    # and that of old versions of torch
    torch.save(STATE, saved, _use_new_zipfile_serialization=False)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    # and one without checksums
    torch.serialization.set_crc32_options(False)
    torch.save(STATE, saved)
    torch.serialization.set_crc32_options(True)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    message = f"^--save-dir is {folder}, where nothing can be written .*Not a directory.*: make"
    with pytest.raises(ValueError, match=message):
        checkpoint_utils.verify_checkpoint_directory(str(folder))
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "run"))
    assert os.listdir(tmp_path / "run") == []


def flipped(content):
    place = content.index(torch.arange(4096.0)[100:110].numpy().tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "head": lambda content: content[:100],
    "half": lambda content: content[: len(content) // 2],
    "end": lambda content: content[:-1],
    "bit": flipped,
    "text": lambda content: b"not a checkpoint",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_what_to_take(saved, damage):
    saved.write_bytes(DAMAGES[damage](saved.read_bytes()))
    damaged = f"^the checkpoint {saved} is cut short or damaged .*: "
    with pytest.raises(ValueError, match=damaged + "no other is whole here$"):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    older, newer = (saved.with_name(name) for name in ("checkpoint1.pt", "checkpoint2.pt"))
    for number, other in enumerate((older, newer)):
        torch.save(STATE, other)
        os.utime(other, (number, number))
    saved.with_name("checkpoint3.pt").write_bytes(saved.read_bytes())
    # the newest entry leads nowhere
    saved.with_name("checkpoint4.pt").symlink_to("none.pt")
    with pytest.raises(ValueError, match=f"{damaged}take {newer} \\(--restore-file"):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "checkpoint_last.pt")
    for path in (tmp_path, tmp_path / "checkpoint_last.pt"):
        with pytest.raises(ValueError, match=f"^the checkpoint {path} is no file: name one that"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))


def without(part):
    return {name: value for name, value in STATE.items() if name != part}


@pytest.mark.parametrize(
    ("content", "lacking"),
    [
        ({"a": torch.ones(2)}, "model"),
        ([1, 2], "model"),
        (torch.ones(2), "model"),
        ({**STATE, "model": torch.ones(2)}, "model"),
        (without("args"), "cfg"),
        (without("optimizer_history"), "optimizer_history"),
        (without("extra_state"), "extra_state"),
    ],
)
def test_what_fairseq_did_not_write_is_named(saved, content, lacking):
    torch.save(content, saved)
    message = f"^the checkpoint {saved} is none of fairseq's \\(it has no {lacking}\\): name one"
    with pytest.raises(ValueError, match=message):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))


def test_what_the_first_versions_of_fairseq_wrote_is_read(saved):
    first = {"best_loss": 1.0, "optimizer": {}, "epoch": 3, "batch_offset": 0, "val_loss": 1.0}
    torch.save({"args": None, "model": STATE["model"], **first}, saved)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    assert state["extra_state"]["train_iterator"]["epoch"] == 3


def test_what_would_be_executed_is_refused(saved):
    torch.save({"model": print}, saved)
    refused = f"^the checkpoint {saved} holds more than weights and options, and is not loaded "
    with pytest.raises(ValueError, match=refused + r"\(Unsupported .*print.*\): name one that"):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))


class Sentences(FairseqDataset):
    """Sentences of a token, of which batches are drawn as fairseq's data sets draw them."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index

    def num_tokens_vec(self, indices):
        return np.ones(len(indices), dtype=np.int64)

    def num_tokens(self, index):
        return 1

    def ordered_indices(self):
        return np.random.permutation(len(self))

    def collater(self, samples):
        return samples


class OwnBatches(FairseqTask):
    def get_batch_iterator(self, *args, **options):
        return super().get_batch_iterator(*args, **options)


def make_trainer(rank=0, updates=0, max_update=0, task_class=FairseqTask, seed_of_epoch=False):
    task = task_class(SimpleNamespace())
    return SimpleNamespace(
        data_parallel_rank=rank,
        checkpoint_suffix="",
        get_num_updates=lambda: updates,
        cfg=SimpleNamespace(
            optimization=SimpleNamespace(max_update=max_update, max_epoch=0),
            dataset=SimpleNamespace(update_ordered_indices_seed=seed_of_epoch),
        ),
        task=task,
    )


def resume(folder, restore_file, no_save=False, load=lambda cfg, trainer: "restored", **options):
    cfg = SimpleNamespace(save_dir=str(folder), restore_file=str(restore_file), no_save=no_save)
    trainer = options.get("trainer") or make_trainer(**options)
    return checkpoint_files._resume(load, cfg, trainer)


def batches(trainer, epoch, **options):
    return trainer.task.get_batch_iterator(
        Sentences(), max_sentences=3, epoch=epoch, **options
    ).frozen_batches


def test_a_resumed_epoch_has_the_batches_that_it_had(tmp_path):
    def load(cfg, trainer):
        each_epoch = {"disable_iterator_cache": True}, {"update_epoch_batch_itr": True}
        return batches(trainer, 4), *(batches(trainer, 4, **options) for options in each_epoch)

    one, four = (batches(make_trainer(), epoch) for epoch in (1, 4))
    assert sorted(map(tuple, one)) != sorted(map(tuple, four))
    resumed, *each_epoch = resume(tmp_path, "checkpoint_last.pt", load=load)
    assert np.array_equal(resumed[0], one[0])
    # what fairseq draws anew each epoch
    for drawn in each_epoch:
        assert np.array_equal(drawn[0], four[0])
    # what a task draws is its own affair, and so are later epochs
    resumed, *_ = resume(tmp_path, "checkpoint_last.pt", load=load, task_class=OwnBatches)
    assert np.array_equal(resumed[0], four[0])
    trainer = make_trainer()
    checkpoint_files._resume(
        lambda cfg, trainer: None,
        SimpleNamespace(save_dir=str(tmp_path), restore_file="checkpoint_last.pt", no_save=True),
        trainer,
    )
    assert np.array_equal(batches(trainer, 4)[0], four[0])


def test_a_complete_training_gets_no_further_update(tmp_path, caplog):
    for updates in (30, 31):
        trainer = make_trainer(updates=updates, max_update=30)
        with caplog.at_level("INFO"):
            resume(tmp_path, "checkpoint_last.pt", trainer=trainer)
        assert f"complete: {updates} updates, --max-update is 30" in caplog.text
        # fairseq's loop goes on while the next epoch is not beyond it, or it is 0
        assert trainer.cfg.optimization.max_epoch == -1
    for most in (31, 0):
        trainer = make_trainer(updates=30, max_update=most)
        resume(tmp_path, "checkpoint_last.pt", trainer=trainer)
        assert trainer.cfg.optimization.max_epoch == 0


def test_a_new_training_from_a_complete_one_is_refused(saved, tmp_path):
    text = (
        f"^--restore-file is {saved}, which has 30 updates, and --max-update is 20: give a larger"
    )
    with pytest.raises(ValueError, match=text):
        resume(tmp_path, saved, updates=30, max_update=20)


def test_the_seed_of_an_epoch_is_that_of_the_first(tmp_path):
    def load(cfg, trainer):
        return batches(trainer, 4, seed=1 + 4)

    (one, *_) = batches(make_trainer(), 1, seed=1 + 1)
    assert np.array_equal(
        resume(tmp_path, "checkpoint_last.pt", load=load, seed_of_epoch=True)[0], one
    )


def test_a_missing_file_to_restore_from_is_no_new_training(saved):
    missing = saved.with_name("checkpoint_9.pt")
    for path in (missing, saved.parent):
        text = f"^--restore-file is {path}, which is no file: give the path of a checkpoint"
        with pytest.raises(ValueError, match=text):
            resume(saved.parent, path)
    # without the option there may be none
    assert resume(saved.parent / "new", "checkpoint_last.pt") == "restored"
    assert resume(saved.parent, saved) == "restored"


def refuse_to_train_into(folder):
    checkpoint_files._locked.clear()
    checkpoint_files.PATIENCE = 0
    # other workers of a training, and one that writes nothing, may
    assert resume(folder, "checkpoint_last.pt", rank=1) == "restored"
    assert resume(folder, "checkpoint_last.pt", no_save=True) == "restored"
    with pytest.raises(ValueError, match=f"^--save-dir is {folder}, where another training is"):
        resume(folder, "checkpoint_last.pt")


def test_two_trainings_do_not_write_into_one_folder(tmp_path):
    folder = tmp_path / "run"
    assert resume(folder, "checkpoint_last.pt") == "restored"
    assert exit_status_of(refuse_to_train_into, folder) == 0
    # this one may go on there
    assert resume(folder, "checkpoint_last.pt") == "restored"
    assert os.listdir(folder) == []
    os.close(checkpoint_files._locked.pop(folder.resolve()))
    assert exit_status_of(checkpoint_files.lock_folder, str(folder)) == 0
