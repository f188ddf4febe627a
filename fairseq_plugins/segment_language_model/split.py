"""The tokens of a binarized split, in the order of the text or with shuffled sentences.

Shapes: N tokens of the split.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct

import numpy as np
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import (
    MMapIndexedDataset,
    data_file_path,
    index_file_path,
)

logger = logging.getLogger(__name__)

# tokens to compare at once: comparing a billion would take gigabytes
SCANNED = 2**24
# the share of <unk> that a loss can ignore
NEGLIGIBLE = 0.01


def load_tokens(
    split_path: str, dictionary: Dictionary, dataset_impl: str | None = None, combine: bool = False
) -> np.ndarray:
    """Return the tokens (N,) of a split, such as ``data-bin/train``, memory-mapped if possible.

    ``combine`` appends ``train1``, ``train2``, ….
    """
    parts = []
    for number in itertools.count():
        path = split_path + (str(number) if number else "")
        if (part := _load_part(path, dictionary, dataset_impl)) is None:
            break
        parts.append(part)
        share, in_training = _share(part, dictionary.unk()), None
        if share > NEGLIGIBLE:
            training_part = os.path.join(os.path.dirname(path), "train")
            with contextlib.suppress(ValueError):  # a damaged part is refused where it is read
                trained_on = _load_part(training_part, dictionary, dataset_impl)
                in_training = None if trained_on is None else _share(trained_on, dictionary.unk())
        log_unknown(share, len(part), path, in_training)
        if not combine:
            break
    if not parts:
        raise FileNotFoundError(
            f"no data at {split_path}.bin: name the folder that fairseq-preprocess wrote, and a "
            "split that it has"
        )
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if tokens.size == 0:
        raise ValueError(f"the split {split_path} is empty: binarize a text with at least one line")
    pieces = _pieces(tokens)
    largest = max(int(piece.max()) for piece in pieces)
    if largest >= len(dictionary):
        raise ValueError(
            f"the split {split_path} holds symbol number {largest}, but dict.txt has only "
            f"{len(dictionary)} symbols: use the dict.txt that the split was binarized with"
        )
    if any((piece == dictionary.pad()).any() for piece in pieces):
        raise ValueError(
            f"the split {split_path} holds {dictionary[dictionary.pad()]}, which fairseq takes for "
            "padding and would not score: replace that word in the text and binarize it again"
        )
    return tokens


def log_unknown(share: float, tokens: int, text: str, in_training: float | None = None) -> None:
    """Log the share of ``<unk>`` in a text; if it is large, compare it with that in training."""
    described = f"{text}: {100 * share:.1f} % of {tokens:,} tokens are <unk>"
    if share <= NEGLIGIBLE:
        logger.info(described)
    elif in_training is not None and in_training < share / 10:
        logger.warning(
            "%s, and %.2f %% in training: the model cannot predict what it did not see, so <unk> "
            "accounts for most of this loss; prepare the data with a threshold or in subwords",
            described,
            100 * in_training,
        )
    else:
        easy = "" if in_training is None else "<unk> is easy to predict, so "
        logger.warning("%s: %sdo not compare this loss with others on this text", described, easy)


def _share(tokens: np.ndarray, symbol: int) -> float:
    count = sum(int(np.count_nonzero(piece == symbol)) for piece in _pieces(tokens))
    return count / max(1, len(tokens))


def _load_part(path: str, dictionary: Dictionary, dataset_impl: str | None) -> np.ndarray | None:
    if os.path.exists(data_file_path(path)) and os.path.getsize(data_file_path(path)) == 0:
        return np.empty(0, dtype=np.int64)
    try:
        dataset = data_utils.load_indexed_dataset(path, dictionary, dataset_impl)
        if dataset is None:
            return None
        mapped = isinstance(dataset, MMapIndexedDataset)
        index = MMapIndexedDataset.Index(index_file_path(path)) if mapped else None
    except (AssertionError, AttributeError, KeyError, ValueError, struct.error) as error:
        raise ValueError(
            f"the split {path} has an index, {path}.idx, that is cut short or damaged ({error}); "
            "binarize the text again"
        ) from error
    if index is not None:
        # fairseq copies a sentence, perhaps the whole split, at each access
        if os.path.getsize(data_file_path(path)) != index.sizes.sum() * index.dtype().itemsize:
            raise ValueError(
                f"the split {path} is incomplete: {path}.bin and {path}.idx differ in length; "
                "binarize the text again"
            )
        tokens: np.ndarray = np.memmap(data_file_path(path), dtype=index.dtype, mode="r")
    else:
        if dataset.supports_prefetch:
            dataset.prefetch(range(len(dataset)))
        tokens = np.concatenate([dataset[i].numpy() for i in range(len(dataset))])
    return tokens


def _pieces(tokens: np.ndarray) -> list[np.ndarray]:
    return [tokens[i : i + SCANNED] for i in range(0, len(tokens), SCANNED)]


class ShuffledSentences:
    """The tokens (N,) of a split with its sentences, each up to ``eos``, in random order."""

    def __init__(self, tokens: np.ndarray, eos: int, seed: list[int]) -> None:
        self._tokens = tokens
        inner = [
            np.flatnonzero(piece == eos) + number * SCANNED + 1
            for number, piece in enumerate(_pieces(tokens[:-1]))
        ]
        starts = np.concatenate([[0], *inner])
        if len(starts) == 1:
            raise ValueError(
                "--shuffle-sentences: the training part is one sentence, without </s> inside; "
                "leave the option out"
            )
        lengths = np.diff(starts, append=len(tokens))
        order = np.random.default_rng(seed).permutation(len(starts))
        # each sentence's end in the new order, and the shift from there to the old order
        self._ends = lengths[order].cumsum()
        self._shifts = starts[order] + lengths[order] - self._ends

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: slice) -> np.ndarray:
        begin, end, _ = index.indices(len(self))
        parts = [self._tokens[:0]]
        number = int(self._ends.searchsorted(begin, side="right"))
        while begin < end:
            stop, shift = min(end, int(self._ends[number])), int(self._shifts[number])
            parts.append(self._tokens[begin + shift : stop + shift])
            begin, number = stop, number + 1
        return np.concatenate(parts)
