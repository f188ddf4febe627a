"""Refuses dictionaries that a checkpoint was not trained with, and counts ``<unk>``.

Another dictionary of the same size would fit the model and give wrong figures.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

logger = logging.getLogger(__name__)

# Figures of a text with more <unk> than this share say little: <unk> is easy to predict.
_MOST_UNKNOWN = 0.01
# tokens that are compared at once
_COUNTED = 2**24
# in a checkpoint's "task_state"
KEY = "dictionaries"
# the checkpoint that fairseq read last, and the task of a training that is reading one
_read_last = ""
_resuming: list[FairseqTask] = []


def digests(dictionaries: Mapping[str, Dictionary]) -> dict[str, str]:
    """Return a hash of the symbols of each dictionary, in their order."""
    return {side: _digest(dictionary) for side, dictionary in dictionaries.items()}


def _digest(dictionary: Dictionary) -> str:
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


def dictionaries_of(task: FairseqTask) -> dict[str, Dictionary]:
    """Return a task's "source" and "target" dictionaries, as far as it has them."""
    found = {}
    for side in ("source", "target"):
        try:
            dictionary = getattr(task, f"{side}_dictionary")
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(dictionary, Dictionary):
            found[side] = dictionary
    return found


def check_dictionaries(
    state: Mapping[str, Any], dictionaries: Mapping[str, Dictionary], name: str
) -> None:
    """Refuse "source" and "target" dictionaries that a checkpoint was not trained with.

    A checkpoint without digests accepts any dictionary.
    """
    trained = (state.get("task_state") or {}).get(KEY) or {}
    for side, found in digests(dictionaries).items():
        if trained.get(side, found) != found:
            raise ValueError(
                f"{name} was trained with another dictionary than the {side} dictionary of DATA: "
                "binarize the text with the dict.txt of its training (fairseq-preprocess "
                "--srcdict, --tgtdict), or train anew in another --save-dir"
            )


def log_unknown(unknown: int, tokens: int, text: str) -> None:
    """Log how many tokens of a text are ``<unk>``; warn above 1 %."""
    share = f"{text}: {100 * unknown / max(tokens, 1):.1f} % of {tokens:,} tokens are <unk>"
    if unknown > _MOST_UNKNOWN * tokens:
        easy = "<unk> is easy to predict, so do not compare this loss with others on this text"
        logger.warning("%s: %s", share, easy)
    else:
        logger.info(share)


def keep_dictionaries() -> None:
    """Let fairseq's commands save and check hashes of dictionaries, and count <unk>."""
    data_utils.load_indexed_dataset = functools.wraps(data_utils.load_indexed_dataset)(
        functools.partial(_load_and_count, data_utils.load_indexed_dataset)
    )
    FairseqTask.state_dict = functools.partialmethod(_add_digests, FairseqTask.state_dict)
    # evaluation and generation give a checkpoint's state to the task before they build the model
    FairseqTask.load_state_dict = functools.partialmethod(_check_task, FairseqTask.load_state_dict)
    Trainer.load_checkpoint = functools.partialmethod(_check_resumed, Trainer.load_checkpoint)


def _load_and_count(
    theirs: Callable[..., Any],
    path: str,
    dictionary: Dictionary | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    found = theirs(path, dictionary, *args, **options)
    for part in getattr(found, "datasets", [found]):
        # the task of streams counts <unk> in other formats itself
        if dictionary is not None and isinstance(part, MMapIndexedDataset):
            file, dtype = data_file_path(part._path), part._index.dtype
            # a file that was cut short may end within a number
            whole = os.path.getsize(file) // dtype().itemsize
            tokens = np.memmap(file, dtype, mode="r", shape=(whole,))
            log_unknown(count_symbol(tokens, dictionary.unk()), whole, part._path)
    return found


def count_symbol(tokens: np.ndarray, symbol: int) -> int:
    """Return how often a symbol occurs in tokens (N,), which may be more than memory holds."""
    pieces = (tokens[i : i + _COUNTED] for i in range(0, len(tokens), _COUNTED))
    return sum(int(np.count_nonzero(piece == symbol)) for piece in pieces)


def _add_digests(self: FairseqTask, theirs: Callable[..., Any]) -> dict[str, Any]:
    return {**theirs(self), KEY: digests(dictionaries_of(self))}


def _check_task(self: FairseqTask, theirs: Callable[..., Any], state: dict[str, Any]) -> None:
    check_dictionaries({"task_state": state}, dictionaries_of(self), f"the checkpoint {_read_last}")
    theirs(self, state)


def note_read(path: str, state: Mapping[str, Any]) -> None:
    """Remember which checkpoint was read, and check it for the training that resumes from it."""
    global _read_last
    _read_last = path
    for task in _resuming:
        check_dictionaries(state, dictionaries_of(task), f"the checkpoint {path}")


def _check_resumed(self: Trainer, theirs: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _check_folders(self.task)
    _resuming.append(self.task)
    try:
        return theirs(self, *args, **options)
    finally:
        _resuming.clear()


def _check_folders(task: FairseqTask) -> None:
    """Refuse several folders of data (one for each epoch) with different dictionaries."""
    folders = utils.split_paths(getattr(task.cfg, "data", None) or "")
    for folder in folders[1:]:
        for path in Path(folder).glob("dict*.txt"):
            first = Path(folders[0]) / path.name
            if first.is_file() and not _have_same_symbols(first, path):
                raise ValueError(
                    f"DATA has {first} and {path}, which differ: binarize all folders with the "
                    "same dictionary (fairseq-preprocess --srcdict, --tgtdict)"
                )


def _have_same_symbols(one: Path, other: Path) -> bool:
    return _digest(Dictionary.load(str(one))) == _digest(Dictionary.load(str(other)))
