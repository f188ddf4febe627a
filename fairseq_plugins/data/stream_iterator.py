"""Walks over parallel streams of text in order, handing each batch the memory of its streams."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fairseq.data.iterators import CountingIterator, EpochBatchIterator

from fairseq_plugins.data.token_streams import TokenStreams
from fairseq_plugins.modules.segment_memory import SegmentMemory

logger = logging.getLogger(__name__)


class _BatchesWithMemory(CountingIterator):
    """Puts the cursor of each batch's segment into its ``net_input``.

    It runs in the main process, after the loader's workers and fairseq's buffer, so the memory is
    never copied.
    """

    def __init__(self, batches: Iterable, memory: SegmentMemory, segment_length: int) -> None:
        super().__init__(batches, total=len(batches))
        self.memory = memory
        self.segment_length = segment_length

    def __next__(self) -> dict[str, Any]:
        start = self.n * self.segment_length
        batch = super().__next__()
        batch["net_input"]["memory"] = self.memory.at(start)
        return batch

    def take(self, n: int) -> _BatchesWithMemory:
        """Stop after ``n`` batches at most."""
        self.total = min(self.total, n)
        return self


class StreamIterator(EpochBatchIterator):
    """fairseq's epoch iterator over :class:`TokenStreams`: never shuffled, with a memory.

    Each walk (an epoch, a validation pass, an evaluation) starts with an empty memory of its own.
    A checkpoint in mid-epoch holds it, so that a resumed run goes on as if it had not stopped.

    Args:
        dataset: the streams of all workers.
        num_shards: number of workers.
        shard_id: this worker.
        options: what fairseq's iterator takes besides.
    """

    def __init__(
        self, dataset: TokenStreams, num_shards: int, shard_id: int, **options: Any
    ) -> None:
        super().__init__(
            dataset=dataset,
            collate_fn=dataset.collater,
            batch_sampler=dataset.batches(num_shards),
            num_shards=num_shards,
            shard_id=shard_id,
            disable_shuffling=True,
            **options,
        )
        self.memory = SegmentMemory()

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> _BatchesWithMemory | None:
        batches = super()._get_iterator_for_epoch(epoch, False, fix_batches_to_gpus, offset)
        if batches is None:
            return None
        self.memory = SegmentMemory()
        return _BatchesWithMemory(batches, self.memory, self.dataset.segment_length)

    def _layout(self) -> dict[str, int]:
        return {
            "tokens": len(self.dataset.tokens),
            "streams": self.dataset.num_streams,
            "segment_length": self.dataset.segment_length,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, the streams' layout and their memory."""
        state = super().state_dict()
        state["layout"] = self._layout()
        if state["iterations_in_epoch"] > 0:
            state["memory"] = self.memory.state_dict()
            if state["memory"] is None:
                logger.warning(
                    "the checkpoint holds no memory of the streams: with --disable-validation the "
                    "workers' memories are not gathered, and a resumed run will start cold"
                )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place in ``state_dict``, with the memory that the run had there.

        Raises:
            ValueError: the run was in the middle of an epoch over other streams.
        """
        in_epoch = state_dict.get("iterations_in_epoch", 0) > 0
        saved = state_dict.get("layout", self._layout())
        if in_epoch and saved != self._layout():
            raise ValueError(
                "the checkpoint stopped in the middle of an epoch over "
                f"{_describe(saved)}, and this run has {_describe(self._layout())}: resume with "
                "the same data, --tokens-per-sample and --batch-size times workers, or begin the "
                "epoch anew with --reset-dataloader"
            )
        super().load_state_dict({**state_dict, "shuffle": False})
        if not in_epoch:
            return
        memory = state_dict.get("memory")
        if memory is None:
            logger.warning("the checkpoint holds no memory of the streams: resuming cold")
        else:
            self.memory.load_state_dict(memory, self.shard_id, self.num_shards)
            logger.info("resuming with the memory of %d tokens of each stream", memory["end"])


def _describe(layout: dict[str, int]) -> str:
    return "{tokens:,} tokens in {streams} streams with segments of {segment_length}".format(
        **layout
    )
