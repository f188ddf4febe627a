"""The pasts of a worker's streams in one pass over data, and in checkpoints.

Shapes: B streams, S tokens of a past, d model width.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.past import HiddenStates, Past

logger = logging.getLogger(__name__)


class StreamPasts:
    """A model's pasts of a worker's streams in one pass over data, which owns them.

    The model takes the past before a segment, and gives back the past after it. The latest segment,
    or in training all segments of an update, may run again after an overflow: from the same pasts.
    """

    def __init__(self, past: Past | None = None) -> None:
        self._past = Past() if past is None else past
        self._update: int | None = None
        # before the segments that may run again, by their start
        self._before: dict[int, Past] = {}
        self._parts: list[StreamPasts] = []
        # of all workers, where a checkpoint is written
        self._gathered: dict[str, Any] | None = None

    def start_update(self, update: int) -> None:
        """Begin an update of the training, or run its segments again."""
        if update != self._update:
            self._update = update
            self._before.clear()
        for part in self._parts:
            part.start_update(update)

    def before(self, start: int) -> Past:
        """Return the past before the segment at ``start``; empty if it is gone."""
        past = self._before.get(start)
        if past is None:
            past = self._skip_to(start)
        if self._update is None:
            self._before.clear()
        self._before[start] = self._past = past
        return past

    def _skip_to(self, start: int) -> Past:
        past, end = self._past, self._past.num_tokens
        keeps_nothing = end > 0 and not past.layers
        if start != end and not keeps_nothing:
            past = past if start > end else Past()
            logger.warning(
                "the segment at token %d follows token %d (a batch was skipped, or runs again): %s",
                start,
                end,
                "the recurrence goes on" if past.layers else "it starts with an empty recurrence",
            )
        return dataclasses.replace(past, num_tokens=start)

    def after(self, past: Past) -> None:
        """Store the past after the segment whose past was asked for."""
        self._past, self._gathered = past, None

    def split(self, sizes: list[int]) -> list[StreamPasts]:
        """Return the pasts of the first ``sizes[0]`` streams, of the next ``sizes[1]``, ….

        They hold the pasts from now on, and :meth:`state_dict` joins them. A pass is split before
        its first segment, and always in the same way.
        """
        if not self._parts:
            streams = torch.arange(sum(sizes)).split(sizes)
            self._parts = [StreamPasts(self._past.select(part)) for part in streams]
            for part in self._parts:
                part._update = self._update
        self._gathered = None
        return self._parts

    def _all_pasts(self) -> list[Past]:
        """Return each part's past; [] if a part has none yet."""
        pasts = [part._past for part in self._parts or [self]]
        return pasts if all(past.num_tokens for past in pasts) else []

    def gather(self, group: dist.ProcessGroup | None = None) -> None:
        """Send all workers' pasts to worker 0, which writes checkpoints; every worker calls it."""
        pasts = self._all_pasts()
        self._gathered = gather_pasts(pasts, group) if pasts else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the pasts as plain containers on the CPU.

        Returns None if there is none, or if other workers' pasts were not gathered.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return self._gathered
        pasts = self._all_pasts()
        if not pasts or not all(isinstance(s, HiddenStates) for p in pasts for s in p.layers):
            return None
        return _as_state_dict(
            pasts, lambda tensor: torch.empty_like(tensor, device="cpu").copy_(tensor)
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], shard_id: int, num_shards: int) -> StreamPasts:
        """Return this worker's part of the pasts of all ``num_shards`` workers."""
        # (B of all workers, S, d) -> (B, S, d)
        parts = [hidden.chunk(num_shards)[shard_id].clone() for hidden in state["layers"]]
        # older checkpoints do not say which layers dropped tokens
        shortened = state.get("shortened", [False] * len(parts))
        layers = [HiddenStates((part,), cut) for part, cut in zip(parts, shortened, strict=True)]
        return cls(Past(tuple(layers), state["end"]))


class EnsemblePasts:
    """The pasts of each model that reads the batches of a pass; training has one model."""

    def __init__(self, first: StreamPasts | None = None) -> None:
        self.first = StreamPasts() if first is None else first
        self._by_model: dict[nn.Module, StreamPasts] = {}

    def __getitem__(self, model: nn.Module) -> StreamPasts:
        """Return a model's pasts: ``first`` for the first model that asks, then new ones."""
        if not self._by_model:
            self._by_model[model] = self.first
        return self._by_model.setdefault(model, StreamPasts())


def gather_pasts(
    pasts: list[Past], group: dist.ProcessGroup | None = None
) -> dict[str, Any] | None:
    """Return the joined pasts of all workers on worker 0, and None on the others."""
    rank, workers = dist.get_rank(group), dist.get_world_size(group)

    def gathered(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(workers)] if rank == 0 else None
        dist.gather(tensor, parts, dst=0, group=group)
        return tensor if parts is None else torch.cat([part.cpu() for part in parts])

    state = _as_state_dict(pasts, gathered)
    return state if rank == 0 else None


def _as_state_dict(pasts: list[Past], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Join the pasts of all parts of the streams, each tensor copied by ``copy``."""
    layers, shortened = [], []
    for states in zip(*(past.layers for past in pasts), strict=True):
        # lengths differ only if an update failed between two parts
        length = min(state.length for state in states)
        parts = [state.last(length).hidden for state in states]
        layers.append(copy(parts[0] if len(parts) == 1 else torch.cat(parts)))
        shortened.append(any(state.shortened for state in states))
    return {"end": pasts[0].num_tokens, "layers": layers, "shortened": shortened}
