"""A split as parallel streams, cut into segments.

The split is cut into S consecutive streams, whose lengths differ by at most one token, and each
stream into segments of T tokens, the last one shorter. So every token is predicted exactly once:
the first one from ``</s>``, every other one from the token before it. With an extended context, for
models without recurrence, each segment also reads the C tokens before it without predicting them.

Letters: N tokens of the split, S streams of all workers, B streams of one worker, T tokens of a
segment, K segments of a stream, C tokens of extended context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from torch import Tensor

from fairseq_plugins.segment_language_model.split import ShuffledSentences
from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts, StreamPasts

logger = logging.getLogger(__name__)


class RunningText(FairseqDataset):
    """The tokens (N,) of a split; ``shuffled`` gives each epoch another order of sentences."""

    def __init__(self, tokens: np.ndarray, shuffled: bool = False) -> None:
        super().__init__()
        self.tokens = tokens
        self.shuffled = shuffled

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
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.pad = dictionary.pad()
        self.eos = dictionary.eos()
        self.num_streams = num_streams
        self.segment_length = segment_length
        self.extended_context = extended_context
        self.shuffled_with = shuffled_with
        # the first N mod S streams are a token longer
        self._length, self._longer = divmod(len(tokens), num_streams)
        longest = self._length + (self._longer > 0)
        self.num_segments = -(-longest // segment_length)

    def segment_bounds(self, segment: int, stream: int) -> tuple[int, int]:
        """Return a segment's first token and end in the split."""
        first = stream * self._length + min(stream, self._longer)
        last = first + self._length + (stream < self._longer)
        begin = first + segment * self.segment_length
        return min(begin, last), min(begin + self.segment_length, last)

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
        that their pasts fit together.
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

    def batches(self, num_shards: int) -> _Batches:
        """Return the items of each batch; worker w gets the streams from w·B to (w + 1)·B - 1."""
        per_shard = self.num_streams // num_shards
        return _Batches(range(0, len(self), per_shard), per_shard)

    def describe(self) -> str:
        """Describe the layout of the text."""
        layout = f"{len(self.tokens):,} tokens in {_streams(self.num_streams)}"
        if self.shuffled_with is not None:
            layout += f", sentences shuffled with seed {self.shuffled_with}"
        return f"{layout}, segments of {self.segment_length} tokens"

    def log_layout(self, num_shards: int, shard_id: int) -> None:
        """Log the layout of the text and the streams of worker ``shard_id``."""
        logger.info(
            "%s%s; worker %d of %d has %s",
            self.describe(),
            f" after {self.extended_context} of context" if self.extended_context else "",
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


class _Batches(Sequence):
    """Batches of ``size`` items from each of ``firsts`` on, made when they are asked for."""

    def __init__(self, firsts: range, size: int) -> None:
        self.firsts = firsts
        self.size = size

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, index: Any) -> Any:
        first = self.firsts[index]
        if isinstance(index, slice):
            return _Batches(first, self.size)
        return range(first, first + self.size)


def _streams(number: int) -> str:
    return f"{number} stream" if number == 1 else f"{number} streams"


class _BatchesWithPasts(CountingIterator):
    """Add the pasts, and the segment's place in the streams, to each batch's ``net_input``."""

    def __init__(self, batches: CountingIterator, pasts: StreamPasts, segment_length: int) -> None:
        super().__init__(batches, total=len(batches))
        self.pasts = EnsemblePasts(pasts)
        self.segment_length = segment_length

    def __next__(self) -> dict[str, Any]:
        start = self.n * self.segment_length
        batch = super().__next__()
        batch["net_input"] |= {"pasts": self.pasts, "start": start}
        return batch

    def take(self, n: int) -> _BatchesWithPasts:
        """Stop after at most ``n`` batches."""
        self.total = min(self.total, n)
        return self


class StreamIterator(EpochBatchIterator):
    """fairseq's epoch iterator over :class:`TokenStreams`: segments in order, with their pasts.

    Each pass starts with empty pasts. A checkpoint in mid-epoch saves them, so that a resumed run
    goes on as if it had not stopped. ``dataset`` holds the streams of all workers.
    """

    def __init__(
        self,
        dataset: TokenStreams,
        num_shards: int,
        shard_id: int,
        save_pasts: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            dataset=dataset,
            collate_fn=dataset.collater,
            # fairseq would make a tuple of the batches
            batch_sampler=(),
            num_shards=num_shards,
            shard_id=shard_id,
            disable_shuffling=True,
            **options,
        )
        self._frozen_batches = dataset.batches(num_shards)
        dataset.log_layout(num_shards, shard_id)
        self.save_pasts = save_pasts
        self.pasts = StreamPasts()

    def ordered_batches(self, *options: object) -> _Batches:
        """Return this worker's batches, in order."""
        return self.frozen_batches[self.shard_id :: self.num_shards]

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> _BatchesWithPasts | None:
        batches = super()._get_iterator_for_epoch(epoch, False, fix_batches_to_gpus, offset)
        if batches is None:
            return None
        self.pasts = StreamPasts()
        return _BatchesWithPasts(batches, self.pasts, self.dataset.segment_length)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, the layout of the streams and their pasts."""
        state = super().state_dict()
        state["layout"] = self.dataset.describe()
        if state["iterations_in_epoch"] > 0 and self.save_pasts:
            state["pasts"] = self.pasts.state_dict()
            if state["pasts"] is None:
                logger.warning(
                    "the checkpoint holds no recurrence of the streams, and a run resumed from it "
                    "will start cold: validation gathers the workers' states, so leave out "
                    "--disable-validation and --validate-after-updates"
                )
            else:
                size = sum(hidden.nbytes for hidden in state["pasts"]["layers"])
                logger.info("the checkpoint holds the streams' recurrence: %.1f MiB", size / 2**20)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place in ``state_dict``, and restore the pasts there."""
        in_epoch = state_dict["iterations_in_epoch"] > 0
        saved = state_dict["layout"]
        if in_epoch and saved != self.dataset.describe():
            raise ValueError(
                "the checkpoint stopped in the middle of an epoch over "
                f"{saved}, and this run has {self.dataset.describe()}: resume with the same data, "
                "--tokens-per-sample, --batch-size times workers (and, with --shuffle-sentences, "
                "--seed), or begin the epoch anew with --reset-dataloader"
            )
        super().load_state_dict({**state_dict, "shuffle": False})
        if not in_epoch:
            return
        pasts = state_dict.get("pasts")
        if pasts is None:
            logger.warning("the checkpoint holds no recurrence of the streams: resuming cold")
            return
        self.pasts = StreamPasts.from_state_dict(pasts, self.shard_id, self.num_shards)
        self._next_epoch_itr.pasts = EnsemblePasts(self.pasts)
        logger.info("resuming with recurrence, after %d tokens of each stream", pasts["end"])
