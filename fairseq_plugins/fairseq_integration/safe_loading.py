"""Checkpoints are read without executing anything in them, after the checksums in them."""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.file_io import PathManager
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

from fairseq_plugins.fairseq_integration.dictionaries import note_read

# All of them hold values, and none runs anything.
OPTION_CONTAINERS = [
    # options that fairseq parsed from words, as for its translation transformer and sgd
    argparse.Namespace,
    # options as fairseq holds them otherwise, and what those are made of
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
    # a tensor's place, while worker 0 broadcasts the checkpoint that several workers resume from
    _TensorPlaceholder,
    # counts of n-grams, which --eval-bleu leaves in the meters of validation: arrays, numbers and
    # the functions that their pickles call to make empty ones
    np.ndarray,
    np.dtype,
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    np.empty(0).__reduce__()[0],
    np.int64(0).__reduce__()[0],
]


def allow_option_containers() -> None:
    """Register :data:`OPTION_CONTAINERS` with ``torch.load(weights_only=True)``."""
    torch.serialization.add_safe_globals(OPTION_CONTAINERS)


def is_whole(path: str | Path) -> bool:
    """Return whether a file is a complete archive whose checksums, if it has any, are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            if all(part.CRC == 0 for part in archive.infolist() if part.file_size):
                return True
            return archive.testzip() is None
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return False


class DamagedError(ValueError):
    """A file that is not whole."""


def load_safely(
    path: str | Path, name: str, remedy: str = "name one that fairseq-train wrote"
) -> Any:
    """Return what a file of torch's holds; the tensors of an archive stay on the disk.

    Errors call the file ``name``, and give ``remedy`` where it is no checkpoint. What is cut short
    or damaged raises :class:`DamagedError`.
    """
    if not os.path.isfile(path):
        # a pipe would be waited for without end
        raise ValueError(f"{name} is no file: {remedy}")
    archive = zipfile.is_zipfile(path)
    if archive:
        # torch itself reads over flipped bits
        problem = "" if is_whole(path) else "a checksum in it is wrong"
    else:
        problem = _what_is_cut(path)
    if problem:
        raise DamagedError(f"{name} is cut short or damaged ({problem})")
    try:
        # files of before PyTorch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        # torch would go on to advise how to execute it
        words = str(error).partition("WeightsUnpickler error: ")[2].strip()
        reason = "".join(words.splitlines()[:1]).partition(". ")[0]
        raise ValueError(
            f"{name} holds more than weights and options,{'' if archive else ' or is cut short,'} "
            f"and is not loaded ({reason[:200]}): {remedy}"
        ) from error
    except (OSError, MemoryError):
        raise
    # files of before PyTorch 1.6 have no checksums: what is damaged in them may raise anything
    except Exception as error:
        if any(words in str(error) for words in ("allocate", "unable to mmap")):
            raise
        if archive:
            raise ValueError(
                f"{name} is an archive without a checkpoint in it: {remedy}"
            ) from error
        raise DamagedError(
            f"{name} is cut short or damaged (torch cannot read it to its end)"
        ) from error


def _what_is_cut(path: str | Path) -> str:
    """Return what is wrong with a file that is no archive; "" for a file of torch before 1.6."""
    with open(path, "rb") as file:
        start = file.read(4)
    if not start:
        return "it is empty"
    if start.startswith(b"PK"):
        return "its end is missing"
    # a pickle
    return "" if start.startswith(b"\x80") else "it is no file of torch's"


def read_checkpoint(path: Path, name: str) -> dict[str, Any]:
    """Return the dictionary that a file holds, read by :func:`load_safely`; {} if it has none."""
    try:
        state = load_safely(path, name)
    except DamagedError as error:
        raise ValueError(f"{error}: name another checkpoint") from error
    return state if isinstance(state, dict) else {}


def options_of(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the options of a ``part`` of a checkpoint, such as "model", by their names."""
    options = (state.get("cfg") or {}).get(part) or {}
    # parsed arguments, or a configuration
    return options if isinstance(options, dict) else vars(options)


def read_checkpoints_safely() -> None:
    """Let fairseq's commands check checkpoints with :func:`load_safely` first."""
    theirs = checkpoint_utils.load_checkpoint_to_cpu
    checkpoint_utils.load_checkpoint_to_cpu = functools.wraps(theirs)(
        functools.partial(_read, theirs)
    )


def _read(read: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Read a checkpoint with fairseq's function, after it was checked."""
    if PathManager.path_requires_pathmanager(path):
        state = read(path, *args, **kwargs)
        note_read(path, state)
        return state
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
            f"the checkpoint {path} is not fairseq's (it has no {lacking}): name one that "
            "fairseq-train wrote"
        )
    # an old file is in memory by now
    del found
    state = read(path, *args, **kwargs)
    note_read(path, state)
    weights = state.get("model")
    if isinstance(weights, OrderedDict):
        # for checkpoint_of, where no more is known than the weights
        weights.read_from = path  # type: ignore[attr-defined]
    return state


def _what_is_lacking(content: Any) -> str:
    """Return the part of a fairseq checkpoint that is missing; "" where nothing is."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return "model"
    # the second is what the first versions of fairseq wrote
    parts = (("cfg", "args"), ("optimizer_history", "best_loss"), ("extra_state", "epoch"))
    return next((one for one, other in parts if not {one, other} & content.keys()), "")


def _newest_whole_beside(path: str) -> Path | None:
    """Return the newest complete checkpoint of the same folder, if there is a complete one."""
    beside = Path(path).parent.glob("checkpoint*.pt")
    # no links that lead nowhere
    others = [other for other in beside if other != Path(path) and other.is_file()]
    newest_first = sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)
    return next(filter(is_whole, newest_first), None)
