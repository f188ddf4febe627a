"""Writes complete checkpoint files, reserves folders for one training, and checks loaded weights.

fairseq copies a checkpoint to ``checkpoint_last.pt`` in place: a training that is killed at that
moment leaves a part of the file.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from torch import Tensor, nn

# seconds to wait: the data loaders of a killed training hold its folder for some time
LOCK_TRIES = 8
# seconds between two attempts to write a checkpoint, as in fairseq
PAUSE = 2.5
# the folders that this process trains into, and the descriptors that hold their locks
_locked: dict[Path, int] = {}


def write_checkpoints_whole() -> None:
    """Let fairseq's commands write and copy checkpoints with the functions below."""
    checkpoint_utils.torch_persistent_save = functools.partial(
        _save, checkpoint_utils.torch_persistent_save
    )
    checkpoint_utils.verify_checkpoint_directory = functools.partial(
        _verify_folder, checkpoint_utils.verify_checkpoint_directory
    )
    PathManager.copy = staticmethod(functools.partial(_copy, PathManager.copy))


@contextmanager
def complete_file(path: str | Path) -> Iterator[str]:
    """Yield a temporary path; afterwards move its file to ``path``. A failure leaves nothing."""
    part = f"{path}.tmp"
    try:
        yield part
        # otherwise a crash of the machine could cut the file short after it got its name
        with open(part, "rb+") as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                # some file systems lack fsync; others report a full disk only here
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _verify_folder(verify: Callable[[str], None], save_dir: str) -> None:
    """Check that checkpoints can be written to a folder."""
    try:
        verify(save_dir)
    except OSError as error:
        raise ValueError(
            f"--save-dir is {save_dir}, where nothing can be written ({error.strerror}): make "
            "room, or give a folder that you may write to"
        ) from error


def _save(save: Callable[..., Any], content: Any, filename: str, async_write: bool = False) -> None:
    """Write a checkpoint; a failure leaves the file that was there before."""
    if async_write or not PathManager.supports_rename(filename):
        save(content, filename, async_write=async_write)
        return
    # fairseq tries as often
    for last_try in (False, False, True):
        try:
            with complete_file(filename) as part, open(part, "wb") as file:
                torch.save(content, file)
            return
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as an unexpected place in the file
            if last_try:
                raise OSError(
                    f"cannot write the checkpoint {filename}: {error}; is there room on the disk?"
                ) from error
        time.sleep(PAUSE)


def _copy(copy: Callable[..., Any], src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Copy a file as fairseq's PathManager does, but let the copy appear only when complete."""
    if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
        return copy(src_path, dst_path, overwrite=overwrite)
    with complete_file(dst_path) as part:
        shutil.copyfile(src_path, part)
    # fairseq asserts this
    return True


def lock_folder(folder: str) -> None:
    """Reserve a folder of checkpoints for this process, as long as it lives."""
    path = Path(folder).resolve()
    if path in _locked:
        return
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    for last_try in [False] * LOCK_TRIES + [True]:
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
    """Weights do not fit a model; also a RuntimeError, as torch raises."""


def checkpoint_of(weights: Mapping[str, Tensor]) -> str:
    """Return the name, in errors, of the checkpoint that weights were read from."""
    return f"the checkpoint {getattr(weights, 'read_from', '')}".rstrip()


@contextmanager
def weights_loaded_into(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse the weights that the block loads into a model if they do not fit or are not finite."""
    checkpoint = checkpoint_of(weights)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        message = " ".join(str(error).split())
        reason = message.partition(": ")[2] or message
        raise MisfitError(
            f"the weights of {checkpoint} do not fit the model ({reason[:300]}): give the options "
            "that it was trained with, or name another checkpoint; a new training "
            "needs its own --save-dir"
        ) from error
    # skip buffers that are not in checkpoints, such as masks
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in weights]
    for name, tensor in itertools.chain(model.named_parameters(), buffers):
        # fairseq leaves the buffer _float_tensor uninitialised
        if not (tensor.isfinite().all() or name.endswith("_float_tensor")):
            raise FloatingPointError(
                f"{name} has a number that is not finite: {checkpoint} was written after the "
                "training diverged; use an earlier one"
            )
