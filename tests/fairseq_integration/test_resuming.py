"""Batches of a resumed training, and checkpoints that cannot be restored."""

from types import SimpleNamespace

import numpy as np
import pytest
from fairseq import checkpoint_utils
from fairseq.data import FairseqDataset
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.tasks import FairseqTask

import fairseq_plugins  # noqa: F401 (changes how fairseq resumes)


class Sentences(FairseqDataset):
    """Twenty sentences of one token, in random order as in fairseq's data sets."""

    def __len__(self):
        return 20

    def num_tokens(self, index):
        return 1

    def ordered_indices(self):
        return np.random.permutation(len(self))


class OwnBatches(FairseqTask):
    def get_batch_iterator(self, *args, **options):
        return super().get_batch_iterator(*args, **options)


def make_trainer(updates=0, max_update=0, task_class=FairseqTask, seed_of_epoch=False, **more):
    options = {"max_update": max_update, "max_epoch": 0, "stop_time_hours": 0}
    dataset = SimpleNamespace(update_ordered_indices_seed=seed_of_epoch)
    return SimpleNamespace(
        data_parallel_rank=0,
        checkpoint_suffix="",
        get_num_updates=lambda: updates,
        cfg=SimpleNamespace(optimization=SimpleNamespace(**options), dataset=dataset),
        task=task_class(SimpleNamespace()),
        **{"lr_scheduler": None, **more},
    )


def resume(restore_file, load=lambda trainer: {}, reset=None, **options):
    """Return the result of ``load``, called while a checkpoint is loaded."""
    resets = ("reset_optimizer", "reset_meters", "reset_lr_scheduler", "reset_dataloader")
    places = {"save_dir": "none", "restore_file": str(restore_file), "no_save": True}
    cfg = SimpleNamespace(**{name: name == reset for name in resets}, **places, patience=-1)

    def load_epoch(cfg, trainer):
        return load(trainer), SimpleNamespace(next_epoch_idx=1)

    # load_epoch stands in for fairseq's function
    return checkpoint_utils.load_checkpoint.func(load_epoch, cfg, make_trainer(**options))[0]


def batches(trainer, epoch, **options):
    made = trainer.task.get_batch_iterator(Sentences(), max_sentences=3, epoch=epoch, **options)
    return made.frozen_batches


def test_a_resumed_epoch_has_the_batches_that_it_had():
    drawn = []

    def load(trainer):
        each_epoch = {"disable_iterator_cache": True}, {"update_epoch_batch_itr": True}
        drawn[:] = [batches(trainer, 4, **options)[0] for options in ({}, *each_epoch)]
        return {}

    one, four = (batches(make_trainer(), epoch)[0] for epoch in (1, 4))
    assert not np.array_equal(one, four)
    resume("checkpoint_last.pt", load)
    assert np.array_equal(drawn[0], one)
    # with these options, fairseq draws new batches for each epoch
    assert all(np.array_equal(other, four) for other in drawn[1:])
    # the batches of a task with its own iterator are not changed
    resume("checkpoint_last.pt", load, task_class=OwnBatches)
    assert np.array_equal(drawn[0], four)

    # if each epoch has its seed, that of the first epoch is used
    def of_seed(trainer):
        return batches(trainer, 4, seed=1 + 4)[0]

    found = resume("checkpoint_last.pt", of_seed, seed_of_epoch=True)
    assert np.array_equal(found, batches(make_trainer(), 1, seed=1 + 1)[0])


def test_only_a_file_of_an_incomplete_training_is_restored(tmp_path):
    saved = tmp_path / "checkpoint.pt"
    saved.touch()
    for path in (tmp_path / "checkpoint_9.pt", tmp_path):
        with pytest.raises(ValueError, match=f"^--restore-file is {path}, which is not a file"):
            resume(path)
    # without the option, the checkpoint may be missing
    assert resume("checkpoint_last.pt") == resume(saved) == {}
    complete = f"^--restore-file is {saved}, which has 30 updates, and --max-update is 20"
    with pytest.raises(ValueError, match=complete):
        resume(saved, updates=30, max_update=20)


@pytest.mark.parametrize("reset", [None, "reset_lr_scheduler", "reset_dataloader"])
def test_a_plateau_scheduler_steps_after_the_epoch_that_was_saved_before_its_step(reset):
    steps = []
    saved = {"train_iterator": {"epoch": 5, "iterations_in_epoch": 0}, "val_loss": 2.5}
    scheduler = object.__new__(ReduceLROnPlateauLRSchedule)
    options = {"lr_scheduler": scheduler, "lr_step": lambda *step: steps.append(step)}
    resume("checkpoint_last.pt", lambda trainer: saved, reset, updates=30, **options)
    assert steps == ([] if reset else [(4, 2.5)])
