"""What a layer keeps of the tokens that it has read: hidden states, or keys and values.

Transformer-XL, section 3.2: the states of earlier segments are reused. Training keeps hidden
states, from which keys and values are projected anew, so that the projections learn from the
memory too; where no gradient is wanted keys and values themselves are kept, so that nothing is
projected twice.

Where heads have learned spans, no more is kept than the ones that see farthest reach.

Shapes: B streams, S tokens, T new ones of them, H heads, d model width, d_h head width.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class HiddenStates:
    """The input of a layer, hidden (B, S, d), of which ``reach`` tokens are worth remembering."""

    hidden: Tensor
    reach: int = sys.maxsize

    @property
    def length(self) -> int:
        """Return S."""
        return self.hidden.size(1)

    @property
    def streams(self) -> int:
        """Return B."""
        return self.hidden.size(0)

    def last(self, length: int, before: int = 0, segment: int = 0) -> HiddenStates:
        """Return the ``segment`` tokens that end ``before`` the end, and ``length`` before them.

        Or as many as there are, and no more than ``reach`` before the segment.
        """
        start, end = _bounds(self.length, min(length, self.reach) + segment, before)
        return replace(self, hidden=self.hidden[:, start:end].detach())

    def select(self, order: Tensor) -> HiddenStates:
        """Return stream ``order[i]`` as stream i."""
        return replace(self, hidden=self.hidden.index_select(0, order))

    def to(self, like: Tensor) -> HiddenStates:
        """Return the states in the device and dtype of ``like``."""
        return replace(self, hidden=self.hidden.to(device=like.device, dtype=like.dtype))


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of a layer, each (H, B, S, d_h), that grow in place.

    They are tokens ``start`` to ``end`` of two buffers (H, B, room, d_h). New ones are written
    behind them, so that a segment costs what it brings and not what is remembered, which is no more
    than ``reach`` tokens before it.
    """

    key_buffer: Tensor
    value_buffer: Tensor
    start: int
    end: int
    reach: int = sys.maxsize

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, reach: int = sys.maxsize) -> KeyValueCache:
        """Return a cache of ``keys`` and ``values``, (H, B, S, d_h)."""
        return cls(keys, values, 0, keys.size(2), reach)

    @property
    def groups(self) -> tuple[KeyValueCache, ...]:
        """Return this cache: it is of the one group that all heads are in."""
        return (self,)

    @property
    def length(self) -> int:
        """Return S."""
        return self.end - self.start

    @property
    def streams(self) -> int:
        """Return B."""
        return self.key_buffer.size(1)

    @property
    def keys(self) -> Tensor:
        """Return the keys, a view."""
        return self.key_buffer[:, :, self.start : self.end]

    @property
    def values(self) -> Tensor:
        """Return the values, a view."""
        return self.value_buffer[:, :, self.start : self.end]

    def extended(self, keys: Tensor, values: Tensor) -> KeyValueCache:
        """Return the cache with ``keys`` and ``values`` (H, B, T, d_h) at its end.

        This cache keeps what it had; what was written behind it before is lost.
        """
        if torch.is_grad_enabled():
            # what gradients pass through may not be overwritten
            return KeyValueCache.of(
                torch.cat([self.keys, keys], dim=2),
                torch.cat([self.values, values], dim=2),
                self.reach,
            )
        new = keys.size(2)
        cache = self if self.end + new <= self.key_buffer.size(2) else self._moved(new)
        cache.key_buffer[:, :, cache.end : cache.end + new] = keys
        cache.value_buffer[:, :, cache.end : cache.end + new] = values
        return replace(cache, end=cache.end + new)

    def last(self, length: int, before: int = 0, segment: int = 0) -> KeyValueCache:
        """Return the ``segment`` tokens that end ``before`` the end, and ``length`` before them.

        Or as many as there are, and no more than ``reach`` before the segment.
        """
        start, end = _bounds(self.length, min(length, self.reach) + segment, before)
        return replace(
            self,
            key_buffer=self.key_buffer.detach(),
            value_buffer=self.value_buffer.detach(),
            start=self.start + start,
            end=self.start + end,
        )

    def select(self, order: Tensor) -> KeyValueCache:
        """Return stream ``order[i]`` as stream i."""
        return replace(
            self,
            key_buffer=self.key_buffer.index_select(1, order),
            value_buffer=self.value_buffer.index_select(1, order),
        )

    def to(self, like: Tensor) -> KeyValueCache:
        """Return the cache in the device and dtype of ``like``."""
        return replace(
            self,
            key_buffer=self.key_buffer.to(device=like.device, dtype=like.dtype),
            value_buffer=self.value_buffer.to(device=like.device, dtype=like.dtype),
        )

    def _moved(self, new: int) -> KeyValueCache:
        """Return a copy at the front of new buffers with room for ``new`` tokens and more."""
        # moving half the memory's length at a time makes copying cheaper than attending
        room = self.length + max(new, self.length // 2)
        buffers = []
        for kept in (self.keys, self.values):
            buffer = kept.new_empty(*kept.shape[:2], room, kept.size(3))
            buffer[:, :, : self.length] = kept
            buffers.append(buffer)
        return KeyValueCache(*buffers, 0, self.length, self.reach)


@dataclass(frozen=True)
class GroupedCaches:
    """Keys and values of a layer whose heads see more or less far: a cache a group of heads."""

    groups: tuple[KeyValueCache, ...]

    @property
    def length(self) -> int:
        """Return S of the group that remembers most."""
        return max(cache.length for cache in self.groups)

    @property
    def streams(self) -> int:
        """Return B."""
        return self.groups[0].streams

    def last(self, length: int, before: int = 0, segment: int = 0) -> GroupedCaches:
        """Return what :meth:`KeyValueCache.last` gives for each group."""
        return GroupedCaches(tuple(c.last(length, before, segment) for c in self.groups))

    def select(self, order: Tensor) -> GroupedCaches:
        """Return stream ``order[i]`` as stream i."""
        return GroupedCaches(tuple(cache.select(order) for cache in self.groups))

    def to(self, like: Tensor) -> GroupedCaches:
        """Return the caches in the device and dtype of ``like``."""
        return GroupedCaches(tuple(cache.to(like) for cache in self.groups))


LayerState = HiddenStates | KeyValueCache | GroupedCaches


def join_caches(caches: list[KeyValueCache]) -> KeyValueCache | GroupedCaches:
    """Return the state of a layer from the caches of its groups of heads."""
    return caches[0] if len(caches) == 1 else GroupedCaches(tuple(caches))


def _bounds(size: int, length: int, before: int) -> tuple[int, int]:
    end = max(0, size - before)
    return max(0, end - length), end
