"""A split of binarized text as parallel streams, cut into segments.

The split is cut into S consecutive streams, whose lengths differ by at most one token, and each
stream into segments of T tokens, the last one shorter. So every token is predicted exactly once:
the first one from ``</s>``, every other one from the token before it. With an extended context, for
models without recurrence, each segment also reads the C tokens before it without predicting them.

Letters: N tokens of the split, S streams of all workers, B streams of one worker, T tokens of a
segment, K segments of a stream, C tokens of extended context.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.data.indexed_dataset import (
    MMapIndexedDataset,
    _code_to_dtype,
    data_file_path,
    index_file_path,
)
from torch import Tensor

from fairseq_plugins.fairseq_integration.dictionaries import count_symbol, log_unknown

# tokens to compare at once: comparing a billion would take gigabytes
SCANNED = 2**24
# Jittered segments: the probability of half the length, the fewest tokens, and the most deviations
# by which a segment may exceed --tokens-per-sample.
_HALF_AS_LONG, _SHORTEST, _DEVIATIONS = 0.05, 5, 3

logger = logging.getLogger(__name__)


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


def _check_index(path: str) -> None:
    """Refuse a damaged index; fairseq would fail on it and leave files open."""
    if not os.path.isfile(path):
        raise ValueError("it is not a file")
    start = struct.Struct("<9sQBQ")
    with open(path, "rb") as file:
        read = file.read(start.size)
    if read.startswith(MMapIndexedDataset.Index._HDR_MAGIC):
        _, version, kind, sentences = start.unpack(read)
        # each sentence has a length in 4 bytes and a place in 8
        right, found = start.size + 12 * sentences, os.path.getsize(path)
        if version != 1 or kind not in _code_to_dtype or found != right:
            raise ValueError(f"version {version}, number type {kind}, {found} of {right} bytes")


def _load_part(path: str, dictionary: Dictionary, dataset_impl: str | None) -> np.ndarray | None:
    if os.path.exists(data_file_path(path)) and os.path.getsize(data_file_path(path)) == 0:
        return np.empty(0, dtype=np.int64)
    try:
        if os.path.exists(index_file_path(path)):
            _check_index(index_file_path(path))
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
    log_unknown(count_symbol(tokens, dictionary.unk()), len(tokens), path)
    return tokens


def _pieces(tokens: np.ndarray) -> list[np.ndarray]:
    return [tokens[i : i + SCANNED] for i in range(0, len(tokens), SCANNED)]


class Jitter(NamedTuple):
    """How the lengths of segments vary.

    Merity, Keskar and Socher 2017 (AWD-LSTM, arXiv:1708.02182), "variable length backpropagation
    sequences", with a constant learning rate as in the published Transformer-XL. Seed and epoch fix
    the lengths, for all workers and for a resumed run.
    """

    deviation: int
    seed: int
    epoch: int

    def draw_starts(self, length: int, segment_length: int) -> np.ndarray:
        """Return where the K segments of ``length`` tokens start and where the last one ends."""
        shortest = min(_SHORTEST, segment_length)
        longest = longest_segment(segment_length, self.deviation)
        generator = np.random.default_rng([self.seed, self.epoch])
        count = -(-length // shortest)
        halved = generator.random(count) < _HALF_AS_LONG
        around = np.where(halved, segment_length / 2, segment_length)
        drawn = generator.normal(around, self.deviation).astype(np.int64)
        ends = drawn.clip(shortest, longest).cumsum()
        return np.concatenate([[0], ends[: int(ends.searchsorted(length)) + 1]])


def longest_segment(segment_length: int, deviation: int) -> int:
    """Return the most tokens that a jittered segment may have."""
    return segment_length + _DEVIATIONS * deviation


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

    def __getitem__(self, wanted: slice) -> np.ndarray:
        begin, end, _ = wanted.indices(len(self))
        parts = [self._tokens[:0]]
        number = int(self._ends.searchsorted(begin, side="right"))
        while begin < end:
            stop, shift = min(end, int(self._ends[number])), int(self._shifts[number])
            parts.append(self._tokens[begin + shift : stop + shift])
            begin, number = stop, number + 1
        return np.concatenate(parts)


class RunningText(FairseqDataset):
    """The tokens (N,) of a split; ``shuffled`` gives each epoch another order of sentences.

    ``jitter`` is the standard deviation of segment lengths.
    """

    def __init__(self, tokens: np.ndarray, shuffled: bool = False, jitter: int = 0) -> None:
        super().__init__()
        self.tokens = tokens
        self.shuffled = shuffled
        self.jitter = jitter

    def __len__(self) -> int:
        return len(self.tokens)

    def ordered(self, eos: int, seed: int, epoch: int) -> np.ndarray | ShuffledSentences:
        """Return the tokens in an epoch's order, the same on all workers."""
        return ShuffledSentences(self.tokens, eos, [seed, epoch]) if self.shuffled else self.tokens


class TokenStreams(FairseqDataset):
    """Segments of S parallel streams over the tokens (N,) of a split; N is at least S.

    Item ``k·S + s`` is segment k of stream s. The log names ``shuffled_with``, the seed of the
    sentences' order.
    """

    def __init__(
        self,
        tokens: np.ndarray | ShuffledSentences,
        dictionary: Dictionary,
        num_streams: int,
        segment_length: int,
        extended_context: int = 0,
        shuffled_with: int | None = None,
        jitter: Jitter | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.pad = dictionary.pad()
        self.eos = dictionary.eos()
        self.num_streams = num_streams
        self.segment_length = segment_length
        self.extended_context = extended_context
        self.shuffled_with = shuffled_with
        self.jitter = jitter
        # the first N mod S streams are a token longer
        self._length, self._longer = divmod(len(tokens), num_streams)
        longest = self._length + (self._longer > 0)
        self.num_segments = -(-longest // segment_length)
        if jitter is not None:
            self._starts = jitter.draw_starts(longest, segment_length)
            self.num_segments = len(self._starts) - 1

    def segment_start(self, segment: int) -> int:
        """Return how many tokens of each stream come before a segment (0 to K)."""
        if self.jitter is None:
            return segment * self.segment_length
        return int(self._starts[segment])

    def segment_bounds(self, segment: int, stream: int) -> tuple[int, int]:
        """Return a segment's first token and end in the split."""
        first = stream * self._length + min(stream, self._longer)
        last = first + self._length + (stream < self._longer)
        begin, end = (first + self.segment_start(number) for number in (segment, segment + 1))
        return min(begin, last), min(end, last)

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin, end = self.segment_bounds(*divmod(index, self.num_streams))
        context = min(begin, self.extended_context) if end > begin else 0
        target = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        first = begin - context
        source = torch.from_numpy(self.tokens[max(0, first - 1) : end - 1].astype(np.int64))
        if first == 0:
            source = torch.cat([torch.tensor([self.eos]), source])
        # the context's targets are padding, which is not scored
        target = torch.cat([torch.full((context,), self.pad), target])
        return {"id": index, "source": source[: len(target)], "target": target, "context": context}

    def __len__(self) -> int:
        return self.num_segments * self.num_streams

    def collater(self, samples: list[dict[str, Any]]) -> dict:
        """Return a batch (B, T), with shorter segments padded on the right.

        All workers' batches are as wide as the segment of the first stream, the longest one, so
        that their recurrences fit together.
        """
        first = samples[0]["id"] // self.num_streams * self.num_streams
        width = self.num_tokens(first) + self.extended_context

        def padded(key: str) -> Tensor:
            batch = torch.full((len(samples), width), self.pad)
            for row, sample in zip(batch, samples, strict=True):
                row[: len(sample[key])] = sample[key]
            return batch

        lengths = torch.tensor([len(sample["target"]) for sample in samples])
        context = [sample["context"] for sample in samples]
        counts = [len(sample["target"]) - sample["context"] for sample in samples]
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(counts),
            "stream_tokens": counts,  # a list, as the host would wait for numbers on a GPU
            # where fairseq's scorer begins
            "start_indices": context,
            "net_input": {"src_tokens": padded("source"), "src_lengths": lengths},
            "target": padded("target"),
        }

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens that item ``index`` predicts."""
        begin, end = self.segment_bounds(*divmod(index, self.num_streams))
        return end - begin

    size = num_tokens  # fairseq asks for both

    def ordered_indices(self) -> np.ndarray:
        """Return all items, segment by segment."""
        return np.arange(len(self))

    def batches(self, num_shards: int) -> list[list[int]]:
        """Return the items of each batch; worker w gets the streams from w·B to (w + 1)·B - 1."""
        per_shard = self.num_streams // num_shards
        return [list(range(first, first + per_shard)) for first in range(0, len(self), per_shard)]

    def describe(self) -> str:
        """Describe the layout of the text."""
        layout = f"{len(self.tokens):,} tokens in {_streams(self.num_streams)}"
        if self.shuffled_with is not None:
            layout += f", sentences shuffled with seed {self.shuffled_with}"
        if self.jitter is not None:
            deviation, seed, _ = self.jitter
            layout += f", lengths of deviation {deviation} drawn with seed {seed}"
        return f"{layout}, segments of {self.segment_length} tokens"

    def log_layout(self, num_shards: int, shard_id: int, longer_recurrence: int = 0) -> None:
        """Log the layout of the text and the streams of worker ``shard_id``."""
        logger.info(
            "%s%s%s; worker %d of %d has %s",
            self.describe(),
            f" after {self.extended_context} of context" if self.extended_context else "",
            f", recurrence longer by {longer_recurrence}" if longer_recurrence else "",
            shard_id + 1,
            num_shards,
            _streams(self.num_streams // num_shards),
        )
        if self.num_streams > 1 and self.num_segments == 1:
            logger.warning(
                "no stream is longer than a segment of %d tokens, so there is nothing to remember: "
                "give fewer streams (--batch-size) or shorter segments (--tokens-per-sample)",
                self.segment_length,
            )


def _streams(number: int) -> str:
    return f"{number} stream" if number == 1 else f"{number} streams"
