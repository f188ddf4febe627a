"""What a model remembers of the segments before, kept with the stream of data it belongs to.

Segment-level recurrence (Transformer-XL, section 3.2): each layer reads states of earlier
segments that are fixed, that is, without a gradient. A :class:`SegmentMemory` belongs to one
walk over the data (a training epoch, a validation pass, an evaluation, a generation) and never to
the model, so that no walk can disturb another.

Shapes: B streams, M remembered tokens, T tokens of a segment, d model width, H heads, d_h head
width. A layer's state is a tuple of tensors whose last two dimensions are time and width and whose
third from last is the stream: ``(hidden (B, M, d),)`` where gradients are wanted, so that the
projections learn from the memory too, and ``(keys (H, B, M, d_h), values (H, B, M, d_h))`` where
they are not, so that nothing is projected twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

logger = logging.getLogger(__name__)

LayerState = tuple[Tensor, ...]

_STREAM_DIM = -3
_TIME_DIM = -2


def _last(state: LayerState, length: int, before: int = 0) -> LayerState:
    """Cut every tensor to the ``length`` tokens that end ``before`` tokens before its end."""
    cut = []
    for tensor in state:
        end = max(0, tensor.size(_TIME_DIM) - before)
        start = max(0, end - length)
        cut.append(tensor.narrow(_TIME_DIM, start, end - start))
    return tuple(cut)


@dataclass
class _History:
    """States of one model up to the end of its latest segment.

    They cover the latest segment and ``mem_len`` tokens before it, so that the same segment can be
    run again (after an overflow or out of memory) from the memory that it had the first time.
    """

    layers: list[LayerState]
    start: int
    length: int
    mem_len: int

    @property
    def end(self) -> int:
        return self.start + self.length


class SegmentMemory:
    """Memory of a set of parallel streams, for each model that reads them, as in an ensemble.

    Nothing moves but by :meth:`Cursor.write`: a batch that carries no cursor leaves it alone.

    Args:
        last_start: where the last segment of the walk starts, if that is known: after it nothing
            reads the memory any more.
    """

    def __init__(self, last_start: int | None = None) -> None:
        self._last_start = last_start
        self._histories: WeakKeyDictionary[nn.Module, _History] = WeakKeyDictionary()
        self._restored: _History | None = None
        self._gathered: tuple[int, dict[str, Any]] | None = None

    def at(self, start: int) -> Cursor:
        """Return the place of the segment that starts at token ``start`` of each stream."""
        return Cursor(self, start)

    def end(self, model: nn.Module) -> int:
        """Return how many tokens of each stream ``model`` has read."""
        history = self._histories.get(model)
        return 0 if history is None else history.end

    def reorder(self, new_order: Tensor) -> None:
        """Let stream i go on from stream ``new_order[i]`` (beam search moves its beams)."""
        for history in self._histories.values():
            history.layers = [
                tuple(tensor.index_select(_STREAM_DIM, new_order) for tensor in state)
                for state in history.layers
            ]

    def gather(self, group: Any = None) -> None:
        """Bring the memory of all workers to worker 0, in the order of the streams.

        Every worker of ``group`` has to call it; :meth:`state_dict` of worker 0 then covers all
        streams. fairseq writes checkpoints on worker 0 alone, without asking the others.
        """
        history = next(iter(self._histories.values()), None)
        if history is None or history.start == self._last_start:
            return
        rank, workers = dist.get_rank(group), dist.get_world_size(group)

        def gathered(tensor: Tensor) -> Tensor:
            tensor = tensor.contiguous()
            parts = [torch.empty_like(tensor) for _ in range(workers)] if rank == 0 else None
            dist.gather(tensor, parts, dst=0, group=group)
            return tensor if parts is None else torch.cat([p.cpu() for p in parts], _STREAM_DIM)

        state = _as_state_dict(history, gathered)
        self._gathered = (history.end, state) if rank == 0 else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the memory of the one training model as plain containers on the CPU.

        None where there is nothing to keep, or where only a part of the streams could be kept
        because this worker never gathered the others' (:meth:`gather`).
        """
        history = next(iter(self._histories.values()), self._restored)
        if history is None:
            return None
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return _as_state_dict(
                history, lambda tensor: torch.empty_like(tensor, device="cpu").copy_(tensor)
            )
        if self._gathered is not None and self._gathered[0] == history.end:
            return self._gathered[1]
        return None

    def load_state_dict(self, state: dict[str, Any], shard_id: int, num_shards: int) -> None:
        """Continue from ``state``; this worker reads part ``shard_id`` of ``num_shards`` of it."""

        def part(tensor: Tensor) -> Tensor:
            size = tensor.size(_STREAM_DIM) // num_shards
            return tensor.narrow(_STREAM_DIM, shard_id * size, size).clone()

        layers = [tuple(part(tensor) for tensor in layer) for layer in state["layers"]]
        self._restored = _History(layers, state["end"], 0, state["mem_len"])

    def _history_of(self, model: nn.Module) -> _History | None:
        if model not in self._histories and self._restored is not None:
            self._histories[model], self._restored = self._restored, None
        return self._histories.get(model)


def _as_state_dict(history: _History, copy: Any) -> dict[str, Any]:
    return {
        "end": history.end,
        "mem_len": history.mem_len,
        "layers": [[copy(t) for t in _last(state, history.mem_len)] for state in history.layers],
    }


@dataclass(frozen=True)
class Cursor:
    """One segment's place in a :class:`SegmentMemory`; the batch iterator puts it into a batch."""

    memory: SegmentMemory
    start: int

    def read(self, model: nn.Module, like: Tensor) -> list[LayerState] | None:
        """Return each layer's state of the ``mem_len`` tokens before this segment.

        Args:
            model: the model whose memory it is.
            like: a tensor of the device and dtype that the states are wanted in.

        Returns:
            one state a layer, or None where nothing is remembered.
        """
        history = self.memory._history_of(model)
        if history is None:
            if self.start > 0:
                logger.warning(
                    "the segment at token %d starts with an empty memory: nothing before it was "
                    "read by this model in this walk over the data",
                    self.start,
                )
            return None
        if self.start > history.end:
            logger.warning(
                "the segment at token %d follows one that ended at token %d (a batch was skipped): "
                "the memory goes on from there",
                self.start,
                history.end,
            )
        # a segment that is run again must not read itself, nor what came after it
        rewound = max(0, history.end - self.start)
        if rewound > history.length:
            logger.warning(
                "the segment at token %d is run again after later ones: its memory is shorter than "
                "it was the first time",
                self.start,
            )
        states = [_last(state, history.mem_len, rewound) for state in history.layers]
        if not states or states[0][0].size(_TIME_DIM) == 0:
            return None
        return [tuple(t.to(device=like.device, dtype=like.dtype) for t in s) for s in states]

    def write(self, model: nn.Module, states: list[LayerState], length: int, mem_len: int) -> None:
        """Remember ``states``, which end with the ``length`` tokens of this segment.

        Args:
            model: the model whose memory it is.
            states: for each layer what it read, memory and segment: (…, up to M + T, …).
            length: T, the tokens of this segment.
            mem_len: how many tokens the next segment may read.
        """
        if mem_len == 0:
            states = []
        layers = [
            tuple(tensor.detach() for tensor in _last(state, mem_len + length)) for state in states
        ]
        self.memory._histories[model] = _History(layers, self.start, length, mem_len)
        self.memory._gathered = None
