"""Reads checkpoints without executing anything in them, and checks their checksums first."""

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


def allow_option_containers() -> None:
    """Register :data:`OPTION_CONTAINERS` with ``torch.load(weights_only=True)``."""
    torch.serialization.add_safe_globals(OPTION_CONTAINERS)


def is_whole(path: str | Path) -> bool:
    """Return whether a file is a complete archive with the right checksums, if it has any."""
    try:
        with zipfile.ZipFile(path) as archive:
            if all(part.CRC == 0 for part in archive.infolist() if part.file_size):
                return True
            return archive.testzip() is None
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return False


class DamagedError(ValueError):
    """A file is cut short or damaged."""


def load_safely(
    path: str | Path, name: str, remedy: str = "name one that fairseq-train wrote"
) -> Any:
    """Return the contents of one of torch's files; an archive's tensors stay on the disk.

    Errors call the file ``name``. A file that is cut short or damaged raises :class:`DamagedError`;
    if it is not a checkpoint, the error ends with ``remedy``.
    """
    if not os.path.isfile(path):
        # reading a pipe could wait forever
        raise ValueError(f"{name} is not a file: {remedy}")
    archive = zipfile.is_zipfile(path)
    if archive:
        # torch ignores flipped bits
        problem = "" if is_whole(path) else "a checksum in it is wrong"
    else:
        problem = _find_damage(path)
    if problem:
        raise DamagedError(f"{name} is cut short or damaged ({problem})")
    try:
        # files from before PyTorch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        # the rest of torch's message advises how to execute the file
        words = str(error).partition("WeightsUnpickler error: ")[2].strip()
        reason = "".join(words.splitlines()[:1]).partition(". ")[0]
        raise ValueError(
            f"{name} holds more than weights and options,{'' if archive else ' or is cut short,'} "
            f"and is not loaded ({reason[:200]}): {remedy}"
        ) from error
    except (OSError, MemoryError):
        raise
    # files from before PyTorch 1.6 have no checksums: damage in them may raise anything
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


def _find_damage(path: str | Path) -> str:
    """Return what is wrong with a file that is not an archive; "" if it predates PyTorch 1.6."""
    with open(path, "rb") as file:
        start = file.read(4)
    if not start:
        return "it is empty"
    if start.startswith(b"PK"):
        return "its end is missing"
    # a pickle
    return "" if start.startswith(b"\x80") else "torch did not write it"


def read_checkpoint(path: Path, name: str) -> dict[str, Any]:
    """Return the dictionary in a file, from :func:`load_safely`; {} if the file has none."""
    try:
        state = load_safely(path, name)
    except DamagedError as error:
        raise ValueError(f"{error}: name another checkpoint") from error
    return state if isinstance(state, dict) else {}


def options_of(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a checkpoint's options of a ``part``, such as "model", by their names."""
    options = (state.get("cfg") or {}).get(part) or {}
    # parsed arguments, or a configuration
    return options if isinstance(options, dict) else vars(options)


def read_checkpoints_safely() -> None:
    """Let fairseq's commands read checkpoints with :func:`load_safely` first."""
    theirs = checkpoint_utils.load_checkpoint_to_cpu
    checkpoint_utils.load_checkpoint_to_cpu = functools.wraps(theirs)(
        functools.partial(_read, theirs)
    )


def _read(read: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Check a checkpoint, then read it with fairseq's function."""
    if PathManager.path_requires_pathmanager(path):
        state = read(path, *args, **kwargs)
        note_read(path, state)
        return state
    try:
        # fairseq would not say what is wrong
        found = load_safely(path, f"the checkpoint {path}")
    except DamagedError as error:
        other = _find_newest_whole(path)
        remedy = f"take {other} (--restore-file, --path)" if other else "no other is whole here"
        raise ValueError(
            f"{error}, as a killed copy, a full disk or a transfer leaves it: {remedy}"
        ) from error
    lacking = _find_missing_part(found)
    if lacking:
        raise ValueError(
            f"the checkpoint {path} is not fairseq's (it has no {lacking}): name one that "
            "fairseq-train wrote"
        )
    # frees the tensors of an old file, which are in memory
    del found
    state = read(path, *args, **kwargs)
    note_read(path, state)
    weights = state.get("model")
    if isinstance(weights, OrderedDict):
        # for checkpoint_of, which only gets the weights
        weights.read_from = path  # type: ignore[attr-defined]
    return state


def _find_missing_part(content: Any) -> str:
    """Return the part of a fairseq checkpoint that is missing; "" if it has all parts."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return "model"
    # the second names are those of fairseq's first versions
    parts = (("cfg", "args"), ("optimizer_history", "best_loss"), ("extra_state", "epoch"))
    return next((one for one, other in parts if not {one, other} & content.keys()), "")


def _find_newest_whole(path: str) -> Path | None:
    """Return the newest complete checkpoint in the same folder, if there is one."""
    siblings = Path(path).parent.glob("checkpoint*.pt")
    # skip broken links
    others = [other for other in siblings if other != Path(path) and other.is_file()]
    newest_first = sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)
    return next(filter(is_whole, newest_first), None)
