"""Checkpoint files under fairseq's commands: whole or not there, one training a folder.

fairseq copies a checkpoint to ``checkpoint_last.pt`` and ``checkpoint_best.pt`` in place, so that a
training killed meanwhile leaves a part of one. It starts anew, with a line in the log, where the
file of ``--restore-file`` is missing. Here a copy takes its place when it is complete, and a
file that cannot be restored from is an error that names it.

A training that is resumed after its first epoch gets other batches from fairseq than it had, and
one that is complete a further update. Here it goes on as if it had not stopped, or ends.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.safe_loading import DamagedError, is_whole, load_safely

logger = logging.getLogger(__name__)
# fairseq's own value: the last checkpoint of --save-dir, if there is one
LAST = "checkpoint_last.pt"
# For so many seconds a folder may be held by helpers of a training that was killed.
PATIENCE = 8
# Seconds between two tries to write a checkpoint, as long as fairseq waits.
PAUSE = 2.5
# folders that this process trains into, with the descriptors that hold their locks
_locked: dict[Path, int] = {}


def keep_checkpoints_whole() -> None:
    """Let fairseq's commands write, copy and read checkpoints as this module has it."""
    checkpoint_utils.torch_persistent_save = functools.partial(
        _save, checkpoint_utils.torch_persistent_save
    )
    checkpoint_utils.load_checkpoint_to_cpu = functools.wraps(
        checkpoint_utils.load_checkpoint_to_cpu
    )(functools.partial(_read, checkpoint_utils.load_checkpoint_to_cpu))
    checkpoint_utils.load_checkpoint = functools.partial(_resume, checkpoint_utils.load_checkpoint)
    checkpoint_utils.verify_checkpoint_directory = functools.partial(
        _verify_folder, checkpoint_utils.verify_checkpoint_directory
    )
    PathManager.copy = staticmethod(functools.partial(_copy, PathManager.copy))


@contextmanager
def _complete(path: str) -> Iterator[str]:
    """Yield where to write what then takes the place of ``path``; a failure leaves nothing."""
    part = f"{path}.tmp"
    try:
        yield part
        # what a crash of the machine could otherwise cut short after the file has its name
        with open(part, "rb+") as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                # not all file systems have it; others tell only here that the disk is full
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _verify_folder(verify: Callable[[str], None], save_dir: str) -> None:
    """Try whether checkpoints can be written to a folder.

    Raises:
        ValueError: they cannot.
    """
    try:
        verify(save_dir)
    except OSError as error:
        raise ValueError(
            f"--save-dir is {save_dir}, where nothing can be written ({error.strerror}): make "
            "room, or give a folder where you may write"
        ) from error


def _save(save: Callable[..., Any], content: Any, filename: str, async_write: bool = False) -> None:
    """Write a checkpoint.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    if async_write or not PathManager.supports_rename(filename):
        save(content, filename, async_write=async_write)
        return
    # as often as fairseq tries
    for last_try in (False, False, True):
        try:
            with _complete(filename) as part, open(part, "wb") as file:
                torch.save(content, file)
            return
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:
            # torch tells of a full disk as of an unexpected place in the file
            if last_try:
                raise OSError(
                    f"cannot write the checkpoint {filename}: {error}; is there room on the disk?"
                ) from error
        time.sleep(PAUSE)


def _copy(copy: Callable[..., Any], src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Copy a file as fairseq's PathManager does, and let the copy appear when it is complete."""
    if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
        return copy(src_path, dst_path, overwrite=overwrite)
    with _complete(dst_path) as part:
        shutil.copyfile(src_path, part)
    # fairseq asserts that it is true
    return True


def _read(read: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Read a checkpoint, after the checksums in it.

    Raises:
        ValueError: it is no file, is cut short or damaged, none of fairseq's, or holds what would
            be executed.
    """
    if PathManager.path_requires_pathmanager(path):
        return read(path, *args, **kwargs)
    try:
        # before fairseq, which brings it up to date and does not say what is wrong
        found = load_safely(path, f"the checkpoint {path}")
    except DamagedError as error:
        other = _newest_whole_beside(path)
        remedy = f"take {other} (--restore-file, --path)" if other else "no other is whole here"
        raise ValueError(
            f"{error}, as a killed copy, a full disk or a transfer leaves it: {remedy}"
        ) from error
    lacking = _what_is_lacking(found)
    if lacking:
        raise ValueError(
            f"the checkpoint {path} is none of fairseq's (it has no {lacking}): name one that "
            "fairseq-train wrote"
        )
    # an old file is in memory by now
    del found
    state = read(path, *args, **kwargs)
    weights = state.get("model")
    if isinstance(weights, OrderedDict):
        # for checkpoint_of, where no more is known than the weights
        weights.read_from = path
    return state


def _what_is_lacking(content: Any) -> str:
    """Return which part of a checkpoint of fairseq's is not in what a file holds; "" for none."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return "model"
    # the second is what the first versions of fairseq wrote
    parts = (("cfg", "args"), ("optimizer_history", "best_loss"), ("extra_state", "epoch"))
    return next((one for one, other in parts if not {one, other} & content.keys()), "")


def _newest_whole_beside(path: str) -> Path | None:
    """Return the newest complete checkpoint of the same folder; None if there is none."""
    beside = Path(path).parent.glob("checkpoint*.pt")
    # no links that lead nowhere
    others = [other for other in beside if other != Path(path) and other.is_file()]
    newest_first = sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)
    return next(filter(is_whole, newest_first), None)


def _resume(load: Callable[..., Any], cfg: Any, trainer: Any, **options: Any) -> Any:
    """Restore a training from the checkpoint that its options name, or begin it.

    Raises:
        ValueError: there is no such checkpoint, another training writes into ``--save-dir``, or
            ``--restore-file`` has ``--max-update`` updates already.
    """
    # fairseq's name of it with --checkpoint-suffix
    wanted = cfg.restore_file.replace(".pt", (trainer.checkpoint_suffix or "") + ".pt")
    if cfg.restore_file != LAST and not PathManager.isfile(wanted):
        raise ValueError(
            f"--restore-file is {wanted}, which is no file: give the path of a checkpoint, or "
            "leave it out to go on with the last one of --save-dir"
        )
    if trainer.data_parallel_rank == 0 and not cfg.no_save:
        lock_folder(cfg.save_dir)
    with _batches_of_the_beginning(trainer.task, trainer.cfg.dataset.update_ordered_indices_seed):
        restored = load(cfg, trainer, **options)
    updates, most = trainer.get_num_updates(), trainer.cfg.optimization.max_update
    if updates >= most > 0:
        if cfg.restore_file != LAST:
            raise ValueError(
                f"--restore-file is {wanted}, which has {updates} updates, and --max-update is "
                f"{most}: give a larger one, or --reset-optimizer to count anew"
            )
        logger.info("the training is complete: %d updates, --max-update is %d", updates, most)
        # so that fairseq's loop over epochs ends before the first
        trainer.cfg.optimization.max_epoch = -1
    return restored


@contextmanager
def _batches_of_the_beginning(task: FairseqTask, seed_of_epoch: bool) -> Iterator[None]:
    """Let fairseq sort sentences into batches as it did when the training began.

    It does so once, with a seed and the number of the epoch, which on resuming is another one: the
    rest of that epoch would have some sentences twice, and others not at all.

    Args:
        task: makes the batches.
        seed_of_epoch: the seed has the number of the epoch in it.
    """
    make = task.get_batch_iterator

    def make_as_before(dataset: Any, *args: Any, **options: Any) -> Any:
        anew = options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr")
        if task.can_reuse_epoch_itr(dataset) and not anew:
            if seed_of_epoch:
                options["seed"] += 1 - options["epoch"]
            options["epoch"] = 1
        return make(dataset, *args, **options)

    own = type(task).get_batch_iterator is not FairseqTask.get_batch_iterator
    if own or getattr(task.cfg, "rebuild_batches", False):
        # it sees to that itself
        yield
        return
    task.get_batch_iterator = make_as_before
    try:
        yield
    finally:
        del task.get_batch_iterator


def lock_folder(folder: str) -> None:
    """Keep a folder of checkpoints for this process, as long as it lives.

    Raises:
        ValueError: another process has it.
    """
    try:
        import fcntl
    except ImportError:
        # Windows has no such locks
        return
    path = Path(folder).resolve()
    if path in _locked:
        return
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    for last_try in [False] * PATIENCE + [True]:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                # some network file systems have no locks
                break
            if last_try:
                os.close(descriptor)
                raise ValueError(
                    f"--save-dir is {folder}, where another training is writing its checkpoints: "
                    "wait for it, or give another folder"
                ) from None
            time.sleep(1)
        else:
            break
    _locked[path] = descriptor


class MisfitError(ValueError, RuntimeError):
    """Weights that do not fit a model; a RuntimeError as well, which torch raises for them."""


def checkpoint_of(weights: Mapping[str, Tensor]) -> str:
    """Return what errors call the checkpoint of weights: with its file, where fairseq read it."""
    return f"the checkpoint {getattr(weights, 'read_from', '')}".rstrip()


@contextmanager
def weights_loaded_into(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Say in a sentence why the weights of a checkpoint, loaded within, cannot be used.

    Args:
        model: gets them.
        weights: as the checkpoint has them.

    Raises:
        FloatingPointError: a number is not finite, which fused attention may pass over.
        MisfitError: weights are missing, more than the model has, or of other shapes.
    """
    checkpoint = checkpoint_of(weights)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        told = " ".join(str(error).split())
        reason = told.partition(": ")[2] or told
        raise MisfitError(
            f"the weights of {checkpoint} do not fit the model ({reason[:300]}): give the options "
            "that it was trained with, or name another checkpoint; a new training "
            "needs a --save-dir of its own"
        ) from error
    # not those that no checkpoint has, such as masks
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in weights]
    for name, tensor in itertools.chain(model.named_parameters(), buffers):
        # fairseq leaves that buffer as the memory was
        if not (tensor.isfinite().all() or name.endswith("_float_tensor")):
            raise FloatingPointError(
                f"{name} has a number that is not finite: {checkpoint} is of a training that "
                "diverged; use an earlier one"
            )
