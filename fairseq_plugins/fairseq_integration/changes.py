"""The four changes to fairseq that act on all models; docs/fairseq.md says why there are four."""

import argparse
import importlib
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data import EpochBatchIterator, FairseqDataset
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

# All of these hold values, and do not run anything.
OPTION_CONTAINERS = [
    # options that fairseq parsed, as for its translation transformer and sgd
    argparse.Namespace,
    # options in fairseq's configuration, and its parts
    DictConfig,
    ListConfig,
    ContainerMetadata,
    Metadata,
    AnyNode,
    defaultdict,
    dict,
    list,
    int,
    Any,
    # stands for a tensor in a checkpoint that worker 0 broadcasts to the others
    _TensorPlaceholder,
    # counts of n-grams, which --eval-bleu leaves in the meters of validation: arrays, numbers and
    # the functions by which their pickles create them
    np.ndarray,
    np.dtype,
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    np.empty(0).__reduce__()[0],
    np.int64(0).__reduce__()[0],
]


def change_fairseq() -> None:
    """Make the four changes, unless they are made already."""
    torch.serialization.add_safe_globals(OPTION_CONTAINERS)
    # --sample-break-mode eos and fairseq-interactive read numpy.compat.long; numpy 2 lacks it
    numpy: Any = importlib.import_module("numpy")
    if not hasattr(numpy, "compat"):
        numpy.compat = SimpleNamespace(long=int)
    if checkpoint_utils.load_checkpoint.__module__ != __name__:
        checkpoint_utils.load_checkpoint = _resume(checkpoint_utils.load_checkpoint)
    if PathManager.copy.__module__ != __name__:
        PathManager.copy = staticmethod(_copy_whole(PathManager.copy))


def _resume(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return fairseq's ``load``, which restores a training, with the batches that it had before.

    A checkpoint of another model is refused with the reason. fairseq sorts sentences into batches
    by the epoch's number, which differs after resuming: some would come twice, others never.
    """

    def load_or_refuse(cfg: CheckpointConfig, trainer: Trainer, **options: Any) -> tuple:
        # an earlier training in this process, as in Hydra's sweeps, left its best loss there
        vars(checkpoint_utils.save_checkpoint).pop("best", None)
        try:
            return load(cfg, trainer, **options)
        except Exception as error:
            # fairseq hides why weights do not fit behind a guess
            if not str(error).startswith("Cannot load model parameters"):
                raise
            title, *reasons = map(str.strip, str(error.__context__).splitlines() or [""])
            if "loading state_dict" in title and reasons:
                more = f" (and {len(reasons) - 1} more)" if reasons[1:] else ""
                raise ValueError(
                    f"{str(error).partition(';')[0]}: {reasons[0]}{more}; give the options of its "
                    "training, or another --save-dir"
                ) from error
            if isinstance(error.__context__, ValueError):
                raise error.__context__ from None
            raise

    def load_checkpoint(cfg: CheckpointConfig, trainer: Trainer, **options: Any) -> tuple:
        """Restore a training from its checkpoint, or begin one."""
        task = trainer.task
        if type(task).get_batch_iterator is not FairseqTask.get_batch_iterator or getattr(
            task.cfg, "rebuild_batches", False
        ):
            # the task sorts in its own way, or anew in each epoch
            return load_or_refuse(cfg, trainer, **options)
        make = task.get_batch_iterator
        seed_grows = trainer.cfg.dataset.update_ordered_indices_seed

        def make_as_in_first_epoch(
            dataset: FairseqDataset, *args: Any, **batching: Any
        ) -> EpochBatchIterator:
            anew = batching.get("disable_iterator_cache") or batching.get("update_epoch_batch_itr")
            if task.can_reuse_epoch_itr(dataset) and not anew:
                if seed_grows:
                    batching["seed"] += 1 - batching["epoch"]
                batching["epoch"] = 1
            return make(dataset, *args, **batching)

        task.get_batch_iterator = make_as_in_first_epoch
        try:
            return load_or_refuse(cfg, trainer, **options)
        finally:
            del task.get_batch_iterator

    return load_checkpoint


def _copy_whole(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return fairseq's ``copy`` of a file, whose result appears only when it is complete."""

    def copy_whole(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        """Copy a file; a failure leaves the file that was there before."""
        if not PathManager.supports_rename(dst_path):
            return copy(src_path, dst_path, overwrite=overwrite)
        part = f"{dst_path}.tmp"
        try:
            copied = copy(src_path, part, overwrite=True)
            os.replace(part, dst_path)
        finally:
            Path(part).unlink(missing_ok=True)
        return copied

    return copy_whole
