"""Batches of parallel streams: in order, each with the streams' recurrence, or in parts of them.

Shapes: B streams of a worker, T tokens of a segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from torch import Tensor

from fairseq_plugins.segment_language_model.recurrence import Recurrence
from fairseq_plugins.segment_language_model.streams import TokenStreams

logger = logging.getLogger(__name__)


class _BatchesWithRecurrence(CountingIterator):
    """Puts the recurrence, and the segment's place in it, into each batch's ``net_input``."""

    def __init__(
        self, batches: CountingIterator, recurrence: Recurrence, streams: TokenStreams
    ) -> None:
        super().__init__(batches, total=len(batches))
        self.recurrence = recurrence
        self.streams = streams

    def __next__(self) -> dict[str, Any]:
        segment = self.n
        batch = super().__next__()
        batch["net_input"]["recurrence"] = self.recurrence
        batch["net_input"]["start"] = self.streams.segment_start(segment)
        return batch

    def take(self, n: int) -> _BatchesWithRecurrence:
        """Stop after ``n`` batches at most."""
        self.total = min(self.total, n)
        return self


class StreamIterator(EpochBatchIterator):
    """fairseq's epoch iterator over :class:`TokenStreams`: segments in order, with recurrence.

    Each walk (an epoch, a validation pass, an evaluation) starts with an empty recurrence.
    A checkpoint in mid-epoch holds it, so that a resumed run goes on as if it had not stopped.

    ``dataset`` has the streams of all ``num_shards`` workers. The recurrence is by
    ``longer_recurrence`` tokens longer than ``--mem-len``.
    """

    def __init__(
        self,
        dataset: TokenStreams,
        num_shards: int,
        shard_id: int,
        save_recurrence: bool = True,
        longer_recurrence: int = 0,
        **options: Any,
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
        dataset.log_layout(num_shards, shard_id, longer_recurrence)
        self.save_recurrence = save_recurrence
        self.longer_recurrence = longer_recurrence
        self.recurrence = Recurrence()

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> _BatchesWithRecurrence | None:
        batches = super()._get_iterator_for_epoch(epoch, False, fix_batches_to_gpus, offset)
        if batches is None:
            return None
        last_start = self.dataset.segment_start(self.dataset.num_segments - 1)
        self.recurrence = Recurrence(last_start, self.longer_recurrence)
        return _BatchesWithRecurrence(batches, self.recurrence, self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, the layout and the recurrence."""
        state = super().state_dict()
        state["layout"] = self.dataset.describe()
        if state["iterations_in_epoch"] > 0:
            state["recurrence"] = self._recurrence_state() if self.save_recurrence else None
        return state

    def _recurrence_state(self) -> dict[str, Any] | None:
        state = self.recurrence.state_dict()
        if state is None:
            logger.warning(
                "the checkpoint holds no recurrence of the streams, and a run resumed from it will "
                "start cold: the workers' states are gathered when fairseq validates, so leave "
                "out --disable-validation and --validate-after-updates"
            )
        else:
            size = sum(hidden.nbytes for hidden in state["layers"])
            logger.info("the checkpoint holds the streams' recurrence: %.1f MiB", size / 2**20)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place in ``state_dict``, with the recurrence that the run had there."""
        in_epoch = state_dict["iterations_in_epoch"] > 0
        saved = state_dict["layout"]
        if in_epoch and saved != self.dataset.describe():
            raise ValueError(
                "the checkpoint stopped in the middle of an epoch over "
                f"{saved}, and this run has {self.dataset.describe()}: resume with the same data, "
                "--tokens-per-sample, --segment-jitter and --batch-size times workers (and, with "
                "--shuffle-sentences or --segment-jitter, --seed), or begin the epoch anew with "
                "--reset-dataloader"
            )
        super().load_state_dict({**state_dict, "shuffle": False})
        if not in_epoch:
            return
        states = state_dict.get("recurrence")
        if states is None:
            logger.warning("the checkpoint holds no recurrence of the streams: resuming cold")
        else:
            self.recurrence.load_state_dict(states, self.shard_id, self.num_shards)
            logger.info("resuming with recurrence, after %d tokens of each stream", states["end"])


def check_parts(parts: int, streams: int) -> None:
    """Refuse to split a worker's streams into so many parts."""
    if parts < 1:
        raise ValueError(f"--batch-split is {parts}: it must be at least 1")
    if parts > streams:
        raise ValueError(
            f"--batch-split is {parts} and --batch-size {streams}: a part has at least one stream, "
            f"so give --batch-split {streams} or less, or a larger --batch-size"
        )


def split_batch(sample: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Return the parts of a batch of B streams, each with its part of the recurrence.

    ``--batch-split``, as in the published codes (Transformer-XL's ``--batch_chunk``).
    """
    net_input = dict(sample["net_input"])
    recurrence, start = net_input.pop("recurrence", None), net_input.pop("start", None)
    size, larger = divmod(len(sample["target"]), parts)
    sizes = [size + (part < larger) for part in range(parts)]
    recurrences = [None] * parts if recurrence is None else recurrence.split(sizes)
    made, end = [], 0
    for size, own_recurrence in zip(sizes, recurrences, strict=True):
        streams = slice(end, end + size)
        end += size
        counts = sample["stream_tokens"][streams]
        own_input: dict[str, Any] = {key: value[streams] for key, value in net_input.items()}
        if own_recurrence is not None:
            own_input |= {"recurrence": own_recurrence, "start": start}
        made.append(
            {
                "id": sample["id"][streams],
                "nsentences": size,
                "ntokens": sum(counts),
                "stream_tokens": counts,
                "start_indices": sample["start_indices"][streams],
                "net_input": own_input,
                "target": sample["target"][streams],
            }
        )
    return made


def train_in_parts(
    parts: list[dict[str, Any]],
    model: Any,
    train_step: Callable[[dict[str, Any]], tuple[Tensor, int, dict[str, Any]]],
) -> tuple[Tensor, int, dict[str, Any]]:
    """Train on one part after another, so that activations of one part are held at a time.

    Returns loss, sample size and statistics of the batch; its gradients add up to the whole's.
    """
    losses, sizes, logs = [], [], []
    for part in parts:
        # workers exchange gradients in the backward pass of the last part, if in one at all
        last = part is parts[-1]
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss, size, log = train_step(part)
        losses.append(loss.detach())  # it holds on to the part's graph
        sizes.append(size)
        logs.append(log)
    # criteria log sums over the tokens, which fairseq adds up over workers and --update-freq, too
    return sum(losses), sum(sizes), {key: sum(log[key] for log in logs) for key in logs[0]}
