"""The state that a layer keeps of the tokens it has read (Transformer-XL, section 3.2).

Training keeps hidden states and projects them again, so that the projections learn from them too.
Inference (evaluation mode without gradients) keeps keys and values, and projects nothing twice.

Shapes: B streams, S tokens kept, T new tokens, H heads, d model width, d_h head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED


class LayerState:
    """The state of one layer: S tokens (``length``) in each of B streams (``streams``)."""

    length: int
    streams: int
    hidden: Tensor  # only in HiddenStates

    def last(self, length: int, before: int = 0, segment: int = 0) -> LayerState:
        """Drop the last ``before`` tokens; keep ``length`` + ``segment`` of the rest, detached."""
        raise NotImplementedError

    def select(self, order: Tensor) -> LayerState:
        """Return stream ``order[i]`` as stream i."""
        raise NotImplementedError

    def to(self, like: Tensor) -> LayerState:
        """Return the state in the device and dtype of ``like``."""
        raise NotImplementedError

    def __iter__(self) -> NoReturn:
        """Stop ``nn.DataParallel``, which would gather the state."""
        raise TypeError(
            "a layer's memory cannot be gathered by nn.DataParallel: use DistributedDataParallel, "
            "whose workers each keep their own"
        )


@dataclass(frozen=True)
class HiddenStates(LayerState):
    """The input of a layer: the ``latest`` tokens (B, S, d), and any ``earlier`` ones.

    There are two tensors because training keeps the segment's own anyway. The layer looks back
    ``max_length`` tokens, so :meth:`last` keeps no more before the segment.
    """

    latest: Tensor
    max_length: int = UNLIMITED
    earlier: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """Return all tokens as one tensor, (B, S, d)."""
        return torch.cat(self._parts(), dim=1) if self.earlier is not None else self.latest

    @property
    def length(self) -> int:
        """Return S."""
        return sum(part.size(1) for part in self._parts())

    @property
    def streams(self) -> int:
        """Return B."""
        return self.latest.size(0)

    def last(self, length: int, before: int = 0, segment: int = 0) -> HiddenStates:
        """Return the last tokens; see :class:`LayerState`."""
        start, end = _bounds(self.length, min(length, self.max_length) + segment, before)
        kept, first = [], 0
        for part in self._parts():
            kept.append(_cut(part.detach(), start - first, end - first))
            first += part.size(1)
        if len(kept) > 1 and 0 in (kept[0].size(1), kept[1].size(1)):
            kept = [max(kept, key=lambda part: part.size(1))]
        return replace(self, latest=kept[-1], earlier=kept[0] if len(kept) > 1 else None)

    def select(self, order: Tensor) -> HiddenStates:
        """Make stream ``order[i]`` stream i."""
        return replace(self, latest=self.hidden.index_select(0, order), earlier=None)

    def to(self, like: Tensor) -> HiddenStates:
        """Return the states as one tensor with the device and dtype of ``like``."""
        one = self.hidden.to(device=like.device, dtype=like.dtype)
        return replace(self, latest=one, earlier=None)

    def _parts(self) -> list[Tensor]:
        return [self.latest] if self.earlier is None else [self.earlier, self.latest]


class _Buffers:
    """Buffers of keys and values, (H, B, room, d_h), that the caches of a walk share.

    ``first`` is the place of the first token in its stream.
    """

    def __init__(self, keys: Tensor, values: Tensor, first: int = 0) -> None:
        self.keys, self.values, self.first = keys, values, first

    @property
    def end(self) -> int:
        """Return the place of the first token without room."""
        return self.first + self.keys.size(2)

    def keep(self, start: int, end: int, new: int) -> None:
        """Make room for ``new`` tokens after ``end``, and drop tokens before ``start``."""
        begin, length = start - self.first, end - start
        # extra room for an eighth of the tokens, in whole segments: moving the tokens only once per
        # eighth is cheap compared with attending to them
        room = length + -(-max(new, length // 8) // new) * new
        if room <= self.keys.size(2) and begin >= length // 8:
            for buffer in (self.keys, self.values):
                # a part must not overlap with its destination
                for moved in range(0, length, begin):
                    size = min(begin, length - moved)
                    buffer.narrow(2, moved, size).copy_(buffer.narrow(2, begin + moved, size))
        else:
            kept = (buffer.narrow(2, begin, length) for buffer in (self.keys, self.values))
            # assigned together: if memory runs out for the second, both stay unchanged
            self.keys, self.values = [_longer(buffer, room) for buffer in kept]
        self.first = start


def _longer(kept: Tensor, room: int) -> Tensor:
    """Return a buffer (H, B, room, d_h) that begins with ``kept``, (H, B, S, d_h)."""
    buffer = kept.new_empty(*kept.shape[:2], room, kept.size(3))
    buffer.narrow(2, 0, kept.size(2)).copy_(kept)
    return buffer


@dataclass(frozen=True)
class KeyValueCache(LayerState):
    """Keys and values of a layer in inference, each (H, B, S, d_h), which grow in place.

    They belong to tokens ``start`` to ``end`` of each stream. New ones are written after them, so
    the cost depends on the segment's length alone. ``max_length`` is as in :class:`HiddenStates`.
    """

    buffers: _Buffers
    start: int
    end: int
    max_length: int = UNLIMITED

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, max_length: int = UNLIMITED) -> KeyValueCache:
        """Build a cache from ``keys`` and ``values``, (H, B, S, d_h)."""
        return cls(_Buffers(keys, values), 0, keys.size(2), max_length)

    @property
    def length(self) -> int:
        """Return S."""
        return self.end - self.start

    @property
    def streams(self) -> int:
        """Return B."""
        return self.buffers.keys.size(1)

    @property
    def keys(self) -> Tensor:
        """Return the keys, a view."""
        return self._view(self.buffers.keys)

    @property
    def values(self) -> Tensor:
        """Return the values, a view."""
        return self._view(self.buffers.values)

    def extended(self, keys: Tensor, values: Tensor) -> KeyValueCache:
        """Return the cache with ``keys`` and ``values`` (H, B, T, d_h) added at its end.

        Other caches on the same buffers lose the tokens before its start and after its old end.
        """
        if torch.compiler.is_compiling():
            return KeyValueCache.of(
                torch.cat([self.keys, keys], dim=2),
                torch.cat([self.values, values], dim=2),
                self.max_length,
            )
        self._check_kept()
        end = self.end + keys.size(2)
        if end > self.buffers.end:
            self.buffers.keep(self.start, self.end, keys.size(2))
        cache = replace(self, end=end)
        cache.keys.narrow(2, self.length, keys.size(2)).copy_(keys)
        cache.values.narrow(2, self.length, keys.size(2)).copy_(values)
        return cache

    def last(self, length: int, before: int = 0, segment: int = 0) -> KeyValueCache:
        """Return the last tokens; see :class:`LayerState`."""
        start, end = _bounds(self.length, min(length, self.max_length) + segment, before)
        return replace(self, start=self.start + start, end=self.start + end)

    def select(self, order: Tensor) -> KeyValueCache:
        """Make stream ``order[i]`` stream i."""
        keys, values = (kept.index_select(1, order) for kept in (self.keys, self.values))
        return KeyValueCache.of(keys, values, self.max_length)

    def to(self, like: Tensor) -> KeyValueCache:
        """Return the cache with the device and dtype of ``like``."""
        if self.buffers.keys.device == like.device and self.buffers.keys.dtype == like.dtype:
            return self
        keys, values = (kept.to(like.device, like.dtype) for kept in (self.keys, self.values))
        return KeyValueCache.of(keys, values, self.max_length)

    def _view(self, buffer: Tensor) -> Tensor:
        self._check_kept()
        return buffer.narrow(2, self.start - self.buffers.first, self.length)

    def _check_kept(self) -> None:
        if self.start < self.buffers.first:
            raise RuntimeError(
                f"tokens {self.start} to {self.buffers.first} of the stream are no longer kept: "
                "another cache, which starts after them, was extended"
            )


def _bounds(size: int, length: int, before: int) -> tuple[int, int]:
    end = max(0, size - before)
    return max(0, end - length), end


def _cut(hidden: Tensor, start: int, end: int) -> Tensor:
    """Return tokens ``start`` to ``end`` of (B, S, d), copied so that the rest can be freed."""
    start, end = max(0, start), min(max(0, end), hidden.size(1))
    if start == 0 and end == hidden.size(1):
        return hidden
    return hidden[:, start : max(start, end)].clone()


def register_state(kind: type, fields: list[str], build: Callable[..., LayerState]) -> None:
    """Register a state class with torch.export and ``torch.load(weights_only=True)``."""

    def flatten(state: LayerState) -> tuple[list[Any], int]:
        return [getattr(state, name) for name in fields], getattr(state, "max_length", UNLIMITED)

    def flatten_with_keys(state: LayerState) -> tuple[list[tuple[Any, Any]], int]:
        parts, max_length = flatten(state)
        return list(zip(map(pytree.GetAttrKey, fields), parts, strict=True)), max_length

    pytree.register_pytree_node(
        kind,
        flatten,
        lambda parts, max_length: build(*parts, max_length=max_length),
        serialized_type_name=f"fairseq_plugins.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([kind])


register_state(
    HiddenStates,
    ["latest", "earlier"],
    lambda latest, earlier, max_length: HiddenStates(latest, max_length, earlier),
)
register_state(KeyValueCache, ["keys", "values"], KeyValueCache.of)
torch.serialization.add_safe_globals([_Buffers])
