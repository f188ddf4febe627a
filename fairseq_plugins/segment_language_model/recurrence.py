"""Segment-level recurrence (Transformer-XL, section 3.2), and the batches that carry it.

Each layer reads its states of earlier segments; no gradient passes through them. A
:class:`Recurrence` belongs to one walk over the data (a training epoch, a validation pass, an
evaluation, a generation) and not to the model, so that no walk disturbs another.

Shapes: B streams of a worker, S tokens kept, T tokens of a segment, d model width.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates, LayerState
from fairseq_plugins.segment_language_model.streams import TokenStreams

logger = logging.getLogger(__name__)


@dataclass
class _History:
    """The states of one model: its latest segment, and ``mem_len`` tokens before it.

    They let the segment run again, after an overflow, from the same states.
    """

    layers: Sequence[LayerState]
    start: int
    length: int
    mem_len: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Recurrence:
    """States of parallel streams, for each model (of an ensemble) that reads them.

    The walk's last segment starts at ``last_start``, if known. In this walk a model remembers
    ``longer`` tokens more than its ``mem_len``.
    """

    def __init__(self, last_start: int | None = None, longer: int = 0) -> None:
        self._last_start = last_start
        self.longer = longer
        self.histories: WeakKeyDictionary[nn.Module, _History] = WeakKeyDictionary()
        self._restored: _History | None = None
        self._gathered: tuple[int, dict[str, Any]] | None = None
        self._parts: list[Recurrence] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "histories": list(self.histories.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, histories=WeakKeyDictionary(dict(state["histories"])))

    def end(self, model: nn.Module) -> int:
        """Return how many tokens of each stream ``model`` has read."""
        history = self.histories.get(model)
        return 0 if history is None else history.end

    def read(self, model: nn.Module, start: int, like: Tensor) -> list[LayerState] | None:
        """Return each layer's state before the segment at ``start``, or None at a stream's start.

        The states get the device and dtype of ``like``.
        """
        if model not in self.histories and self._restored is not None:
            self.histories[model], self._restored = self._restored, None
        history = self.histories.get(model)
        if history is None:
            if start > 0:
                logger.warning(
                    "the segment at token %d starts with an empty recurrence: nothing before it "
                    "was read by this model in this walk over the data",
                    start,
                )
            return None
        if start > history.end:
            logger.warning(
                "the segment at token %d follows one that ended at token %d (a batch was skipped): "
                "the recurrence goes on from there",
                start,
                history.end,
            )
        # a segment that runs again must not read itself or later tokens
        rewound = max(0, history.end - start)
        if rewound > history.length:
            logger.warning(
                "the segment at token %d is run again after later ones: its recurrence is shorter "
                "than it was the first time",
                start,
            )
        states = [state.last(history.mem_len, rewound) for state in history.layers]
        if not states or states[0].length == 0:
            return None
        return [state.to(like) for state in states]

    def write(
        self, model: nn.Module, start: int, states: list[LayerState], length: int, mem_len: int
    ) -> None:
        """Keep the layers' ``states``, whose last ``length`` tokens begin at ``start``."""
        if mem_len == 0:
            states = []
        layers = [state.last(mem_len, segment=length) for state in states]
        self.histories[model] = _History(layers, start, length, mem_len)
        self._gathered = None

    def split(self, sizes: list[int]) -> list[Recurrence]:
        """Return recurrences of the first ``sizes[0]`` streams, of the next ``sizes[1]``, ….

        They hold the states from now on, and :meth:`state_dict` joins them. A walk must be split
        before its first segment, and always in the same way.
        """
        if not self._parts:
            firsts = itertools.accumulate(sizes, initial=0)
            for first, size in zip(firsts, sizes, strict=False):
                part = Recurrence(self._last_start, self.longer)
                if self._restored is not None:
                    order = torch.arange(first, first + size)
                    layers = [state.select(order) for state in self._restored.layers]
                    part._restored = replace(self._restored, layers=layers)
                self._parts.append(part)
            self._restored = None
        self._gathered = None
        return self._parts

    def _latest(self) -> list[_History]:
        """Return each part's states of the training model; [] if a part has no states yet."""
        if self._parts:
            histories = [history for part in self._parts for history in part._latest()]
            return histories if len(histories) == len(self._parts) else []
        history = next(iter(self.histories.values()), self._restored)
        return [] if history is None else [history]

    def reorder(self, new_order: Tensor) -> None:
        """Let stream i continue stream ``new_order[i]``, as beam search asks."""
        if torch.equal(new_order, torch.arange(len(new_order), device=new_order.device)):
            streams = {s.streams for h in self.histories.values() for s in h.layers[:1]}
            if streams <= {len(new_order)}:
                return  # sampling asks for the present order at every token
        for history in self.histories.values():
            history.layers = [state.select(new_order) for state in history.layers]

    def gather(self, group: Any = None) -> None:
        """Send all workers' states to worker 0, which writes checkpoints; every worker calls it."""
        histories = self._latest()
        if not histories or histories[0].start == self._last_start:
            return
        rank, workers = dist.get_rank(group), dist.get_world_size(group)

        def gathered(tensor: Tensor) -> Tensor:
            tensor = tensor.contiguous()
            parts = [torch.empty_like(tensor) for _ in range(workers)] if rank == 0 else None
            dist.gather(tensor, parts, dst=0, group=group)
            return tensor if parts is None else torch.cat([p.cpu() for p in parts])

        state = _as_state_dict(histories, gathered)
        self._gathered = (state["end"], state) if rank == 0 else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the training model's states as plain containers on the CPU.

        Returns None if there are no hidden states, or if other workers' states were not gathered.
        """
        histories = self._latest()
        layers = [state for history in histories for state in history.layers]
        if not histories or not all(isinstance(state, HiddenStates) for state in layers):
            return None
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return _as_state_dict(
                histories, lambda tensor: torch.empty_like(tensor, device="cpu").copy_(tensor)
            )
        if self._gathered is not None and self._gathered[0] == histories[0].end:
            return self._gathered[1]
        return None

    def load_state_dict(self, state: dict[str, Any], shard_id: int, num_shards: int) -> None:
        """Continue from this worker's part of the states of all ``num_shards`` workers."""
        # (B of all workers, S, d) -> (B, S, d)
        parts = (hidden.chunk(num_shards)[shard_id] for hidden in state["layers"])
        layers = [HiddenStates(part.clone()) for part in parts]
        self._restored = _History(layers, state["end"], 0, state["mem_len"])


def _as_state_dict(histories: list[_History], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Join the states of all parts of the streams, each tensor copied by ``copy``."""
    first = histories[0]
    layers = []
    for number in range(len(first.layers)):
        parts = [history.layers[number].last(first.mem_len).hidden for history in histories]
        # lengths differ only if an update failed between two parts
        length = min(part.size(1) for part in parts)
        parts = [part[:, part.size(1) - length :] for part in parts]
        layers.append(copy(parts[0] if len(parts) == 1 else torch.cat(parts)))
    return {"end": first.end, "mem_len": first.mem_len, "layers": layers}


class _BatchesWithRecurrence(CountingIterator):
    """Add the recurrence, and the segment's place in the streams, to each batch's ``net_input``."""

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
        """Stop after at most ``n`` batches."""
        self.total = min(self.total, n)
        return self


class StreamIterator(EpochBatchIterator):
    """fairseq's epoch iterator over :class:`TokenStreams`: segments in order, with recurrence.

    Each walk starts with an empty recurrence. A checkpoint in mid-epoch saves it, so that a resumed
    run goes on as if it had not stopped. ``dataset`` holds the streams of all workers.
    ``longer_recurrence`` tokens are remembered in addition to ``--mem-len``.
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
        """Return the place in the epoch, the layout of the streams and the recurrence."""
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
                "start cold: validation gathers the workers' states, so leave out "
                "--disable-validation and --validate-after-updates"
            )
        else:
            size = sum(hidden.nbytes for hidden in state["layers"])
            logger.info("the checkpoint holds the streams' recurrence: %.1f MiB", size / 2**20)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place in ``state_dict``, and restore the recurrence there."""
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
    """Check ``--batch-split`` against a worker's number of streams."""
    if parts < 1:
        raise ValueError(f"--batch-split is {parts}: it must be at least 1")
    if parts > streams:
        raise ValueError(
            f"--batch-split is {parts} and --batch-size {streams}: a part has at least one stream, "
            f"so give --batch-split {streams} or less, or a larger --batch-size"
        )


def split_batch(sample: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Split a batch of B streams, and its recurrence, into ``parts``.

    The published codes do the same (Transformer-XL's ``--batch_chunk``).
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
    """Train on one part after another, so that only one part's activations are in memory.

    Returns loss, sample size and statistics of the batch; the parts' gradients add up.
    """
    losses, sizes, logs = [], [], []
    for part in parts:
        # workers exchange gradients only in the last part's backward pass
        last = part is parts[-1]
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss, size, log = train_step(part)
        losses.append(loss.detach())  # so that the part's graph is freed
        sizes.append(size)
        logs.append(log)
    # criteria log sums over tokens, which fairseq adds up over workers and --update-freq, too
    return sum(losses), sum(sizes), {key: sum(log[key] for log in logs) for key in logs[0]}
