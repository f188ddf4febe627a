"""Changes to fairseq: safe containers, order of batches, whole copies."""

import argparse
import os
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import FairseqDataset
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

import fairseq_plugins  # noqa: F401 (changes fairseq)
from fairseq_plugins.fairseq_integration import changes


@pytest.mark.parametrize(
    "thing",
    [
        argparse.Namespace(arch="transformer", optimizer=argparse.Namespace(lr=[0.1])),
        OmegaConf.create({"lr": [0.1, 0.2], "name": None, "model": {"dropout": "${lr}"}}),
        {"task": OmegaConf.create([1, {"a": 2}]), "model": argparse.Namespace(dropout=0.1)},
        defaultdict(dict),
        _TensorPlaceholder(3),
        # --eval-bleu leaves these in a meter
        np.int64(4),
        np.float64(0.5),
        np.arange(4),
        np.arange(4.0),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_safe_containers_are_loaded_as_they_were(thing, tmp_path):
    torch.save({"cfg": thing}, tmp_path / "last.pt")
    loaded = torch.load(tmp_path / "last.pt")["cfg"]
    assert type(loaded) is type(thing)
    if isinstance(thing, np.ndarray):
        assert loaded.dtype == thing.dtype
        loaded, thing = loaded.tolist(), thing.tolist()
    assert loaded == thing


class Sentences(FairseqDataset):
    """Twenty sentences of one token, in random order as in fairseq's data sets."""

    def __len__(self):
        return 20

    def num_tokens(self, index):
        return 1

    def ordered_indices(self):
        return np.random.permutation(len(self))


class TaskWithItsBatches(FairseqTask):
    def get_batch_iterator(self, *args, **options):
        return super().get_batch_iterator(*args, **options)


def make_trainer(task_class=FairseqTask, seed_grows=False):
    dataset = SimpleNamespace(update_ordered_indices_seed=seed_grows)
    return SimpleNamespace(cfg=SimpleNamespace(dataset=dataset), task=task_class(SimpleNamespace()))


def first_batch(epoch, trainer=None, **options):
    task = (trainer or make_trainer()).task
    made = task.get_batch_iterator(Sentences(), max_sentences=3, epoch=epoch, **options)
    return made.frozen_batches[0].tolist()


def resumed_batch(epoch, trainer, **options):
    """Return the first batch that is made while a training is restored."""
    load = changes._resume(lambda cfg, trainer: first_batch(epoch, trainer, **options))
    return load(None, trainer)


def test_a_resumed_epoch_has_the_same_batches():
    one, four, trainer = first_batch(1), first_batch(4), make_trainer()
    assert one != four
    assert resumed_batch(4, trainer) == one
    # afterwards, the task is as it was
    assert first_batch(4, trainer) == four
    # with --update-ordered-indices-seed, fairseq adds the epoch to the seed
    assert resumed_batch(4, make_trainer(seed_grows=True), seed=1 + 4) == first_batch(1, seed=1 + 1)


@pytest.mark.parametrize("task", [FairseqTask, TaskWithItsBatches])
def test_a_training_forgets_the_best_loss_of_an_earlier_one(task):
    """Hydra's sweeps train one model after another in a process."""
    checkpoint_utils.save_checkpoint.best = 0.5
    load = changes._resume(lambda cfg, trainer: vars(checkpoint_utils.save_checkpoint).get("best"))
    assert load(None, make_trainer(task)) is None


def test_a_resumed_epoch_has_new_batches_if_each_epoch_has():
    four = first_batch(4)
    for option in ("disable_iterator_cache", "update_epoch_batch_itr"):
        assert resumed_batch(4, make_trainer(), **{option: True}) == four
    # a task may make batches in its own way
    assert resumed_batch(4, make_trainer(TaskWithItsBatches)) == four


def test_a_copy_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")

    def fail(source, part):
        Path(part).write_bytes(b"a part of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(OSError, match="no space"):
            PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"old"
    seen, replace = [], os.replace

    def watch(part, path):
        seen.append((os.path.getsize(part), target.read_bytes()))
        replace(part, path)

    monkeypatch.setattr(os, "replace", watch)
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert seen == [(3000, b"old")]
    assert target.read_bytes() == source.read_bytes()
    assert sorted(os.listdir(tmp_path)) == [source.name, target.name]
