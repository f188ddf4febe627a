"""What a layer keeps of the tokens it has read: hidden states, or projected keys and values.

Transformer-XL, section 3.2. Training keeps hidden states and projects them anew, so that the
projections learn from them too. Inference keeps keys and values, so that nothing is projected
twice.

Shapes: B streams, S tokens kept, T new tokens, H heads, d model width, d_h head width.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class LayerState(Protocol):
    """State of one layer over the S tokens of B streams."""

    @property
    def length(self) -> int:
        """Return S."""

    @property
    def streams(self) -> int:
        """Return B."""

    def last(self, length: int, before: int = 0, segment: int = 0) -> LayerState:
        """Return the ``segment`` tokens that end ``before`` the end, and ``length`` before them.

        Or as many as there are. Detached.
        """

    def select(self, order: Tensor) -> LayerState:
        """Return stream ``order[i]`` as stream i."""

    def to(self, like: Tensor) -> LayerState:
        """Return the state in the device and dtype of ``like``."""


@dataclass(frozen=True)
class HiddenStates:
    """The input of a layer, hidden (B, S, d).

    :meth:`last` keeps no more than ``reach`` tokens before the segment: how far the layer looks.
    """

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
        """Implement :meth:`LayerState.last`."""
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
    """Keys and values of a layer, each (H, B, S, d_h), which grow in place.

    They are tokens ``start`` to ``end`` of two buffers (H, B, room, d_h). New tokens are written
    behind them, so cost grows with what a segment adds, not with what is kept. :meth:`last` keeps
    no more than ``reach`` tokens before the segment.
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
        """Implement :meth:`LayerState.last`."""
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
        # moving half of what is kept at a time makes copying cheaper than attending
        room = self.length + max(new, self.length // 2)
        buffers = []
        for kept in (self.keys, self.values):
            buffer = kept.new_empty(*kept.shape[:2], room, kept.size(3))
            buffer[:, :, : self.length] = kept
            buffers.append(buffer)
        return KeyValueCache(*buffers, 0, self.length, self.reach)


def _bounds(size: int, length: int, before: int) -> tuple[int, int]:
    end = max(0, size - before)
    return max(0, end - length), end
