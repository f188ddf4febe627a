"""Checkpoints read without executing anything in them, and what fairseq's hold besides weights."""

import argparse
import pickle
import typing
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

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
    typing.Any,
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
    """Return whether a file is a complete archive, each part of which has its checksum.

    A part may have been written without one (``torch.serialization.set_crc32_options``).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if all(part.CRC == 0 for part in archive.infolist() if part.file_size):
                return True
            return archive.testzip() is None
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return False


def read_checkpoint(path: Path, name: str) -> dict[str, typing.Any]:
    """Return what a file holds, tensors left on the disk if it is an archive; {} for no dictionary.

    Args:
        path: the file.
        name: what errors call it.

    Raises:
        ValueError: it is missing, damaged, or holds more than weights and options.
    """
    if not path.is_file():
        raise ValueError(f"{name} is no file: name one that fairseq-train wrote")
    archive = zipfile.is_zipfile(path)
    if archive and not is_whole(path):
        # torch itself reads over flipped bits
        raise ValueError(f"{name} is damaged: a checksum in it is wrong; name another checkpoint")
    try:
        # other files, of before PyTorch 1.6 or cut short, cannot be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{name} holds more than weights and options, or is cut short, and is not loaded "
            f"({str(error).splitlines()[0]}): name a checkpoint that fairseq-train wrote with "
            "this plugin"
        ) from error
    return state if isinstance(state, dict) else {}


def options_of(state: dict[str, typing.Any], part: str) -> dict[str, typing.Any]:
    """Return the options of a ``part`` of a checkpoint, such as "model", by name; {} for none."""
    options = (state.get("cfg") or {}).get(part) or {}
    # parsed arguments, or a configuration
    return options if isinstance(options, dict) else vars(options)
