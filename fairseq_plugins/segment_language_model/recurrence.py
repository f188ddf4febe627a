"""Segment-level recurrence: the states of earlier segments that each layer reads.

Transformer-XL, section 3.2. No gradient passes through the states. A :class:`Recurrence` belongs to
one walk over the data (a training epoch, a validation pass, an evaluation, a generation) and not to
the model, so that no walk disturbs another.

Shapes: B streams, d model width.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates, LayerState

logger = logging.getLogger(__name__)


@dataclass
class _History:
    """States of one model: its latest segment and ``mem_len`` tokens before it.

    So the segment can be run again, after an overflow, from the states that it had the first time.
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

    The last segment of the walk, if known, starts at ``last_start``. In this walk a model reads
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
        """Return each layer's state of the ``mem_len`` tokens before the segment at ``start``.

        None where there is nothing before it. The states have the device and dtype of ``like``.
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
        # a segment that is run again must not read itself, nor what came after it
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
        """Keep the layers' ``states``, which end with the ``length`` tokens from ``start`` on."""
        if mem_len == 0:
            states = []
        layers = [state.last(mem_len, segment=length) for state in states]
        self.histories[model] = _History(layers, start, length, mem_len)
        self._gathered = None

    def split(self, sizes: list[int]) -> list[Recurrence]:
        """Return recurrences of the first ``sizes[0]`` streams, the ``sizes[1]`` next ones, ….

        From now on they hold the states, and :meth:`state_dict` puts them together. A walk is split
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
        """Return the states of the training model, for each part; [] where a part has none yet."""
        if self._parts:
            histories = [history for part in self._parts for history in part._latest()]
            return histories if len(histories) == len(self._parts) else []
        history = next(iter(self.histories.values()), self._restored)
        return [] if history is None else [history]

    def reorder(self, new_order: Tensor) -> None:
        """Let stream i go on from stream ``new_order[i]``, as beam search does."""
        if torch.equal(new_order, torch.arange(len(new_order), device=new_order.device)):
            streams = {s.streams for h in self.histories.values() for s in h.layers[:1]}
            if streams <= {len(new_order)}:
                return  # sampling asks for this order at every token
        for history in self.histories.values():
            history.layers = [state.select(new_order) for state in history.layers]

    def gather(self, group: Any = None) -> None:
        """Bring all workers' states to worker 0, which writes checkpoints; all must call it."""
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
        """Return the states of the training model as plain containers on the CPU.

        None where there are no hidden states, or the other workers' were never gathered.
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
        """Continue from part ``shard_id`` of ``num_shards`` of ``state``."""

        def part(hidden: Tensor) -> HiddenStates:
            # (B, S, d) of all workers -> of this one
            size = hidden.size(0) // num_shards
            return HiddenStates(hidden.narrow(0, shard_id * size, size).clone())

        layers = [part(hidden) for hidden in state["layers"]]
        self._restored = _History(layers, state["end"], 0, state["mem_len"])


def _as_state_dict(histories: list[_History], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the states of the parts of a training model's streams as those of one."""
    first = histories[0]
    layers = []
    for number in range(len(first.layers)):
        parts = [history.layers[number].last(first.mem_len).hidden for history in histories]
        # of different lengths only where an update failed between two parts
        length = min(part.size(1) for part in parts)
        parts = [part[:, part.size(1) - length :] for part in parts]
        layers.append(copy(parts[0] if len(parts) == 1 else torch.cat(parts)))
    return {"end": first.end, "mem_len": first.mem_len, "layers": layers}
