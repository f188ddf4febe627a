"""What a layer keeps of the tokens that it has read: hidden states, or keys and values.

Transformer-XL, section 3.2: the states of earlier segments are reused. Training keeps hidden
states, from which keys and values are projected anew, so that the projections learn from the
memory too; where no gradient is wanted keys and values themselves are kept, so that nothing is
projected twice.

Shapes: B streams, S tokens, T new ones of them, H heads, d model width, d_h head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HiddenStates:
    """The input of a layer, hidden (B, S, d)."""

    hidden: Tensor

    @property
    def length(self) -> int:
        """Return S."""
        return self.hidden.size(1)

    @property
    def streams(self) -> int:
        """Return B."""
        return self.hidden.size(0)

    def last(self, length: int, before: int = 0) -> HiddenStates:
        """Return the ``length`` tokens, or as many as there are, that end ``before`` the end."""
        start, end = _bounds(self.length, length, before)
        return HiddenStates(self.hidden[:, start:end].detach())

    def select(self, order: Tensor) -> HiddenStates:
        """Return stream ``order[i]`` as stream i."""
        return HiddenStates(self.hidden.index_select(0, order))

    def to(self, like: Tensor) -> HiddenStates:
        """Return the states in the device and dtype of ``like``."""
        return HiddenStates(self.hidden.to(device=like.device, dtype=like.dtype))


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of a layer, each (H, B, S, d_h), that grow in place.

    They are tokens ``start`` to ``end`` of two buffers (H, B, room, d_h). New ones are written
    behind them, so that a segment costs what it brings and not what is remembered.
    """

    key_buffer: Tensor
    value_buffer: Tensor
    start: int
    end: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> KeyValueCache:
        """Return a cache of ``keys`` and ``values``, (H, B, S, d_h)."""
        return cls(keys, values, 0, keys.size(2))

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
                torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            )
        new = keys.size(2)
        cache = self if self.end + new <= self.key_buffer.size(2) else self._moved(new)
        cache.key_buffer[:, :, cache.end : cache.end + new] = keys
        cache.value_buffer[:, :, cache.end : cache.end + new] = values
        return KeyValueCache(cache.key_buffer, cache.value_buffer, cache.start, cache.end + new)

    def last(self, length: int, before: int = 0) -> KeyValueCache:
        """Return the ``length`` tokens, or as many as there are, that end ``before`` the end."""
        start, end = _bounds(self.length, length, before)
        return KeyValueCache(
            self.key_buffer.detach(),
            self.value_buffer.detach(),
            self.start + start,
            self.start + end,
        )

    def select(self, order: Tensor) -> KeyValueCache:
        """Return stream ``order[i]`` as stream i."""
        return KeyValueCache(
            self.key_buffer.index_select(1, order),
            self.value_buffer.index_select(1, order),
            self.start,
            self.end,
        )

    def to(self, like: Tensor) -> KeyValueCache:
        """Return the cache in the device and dtype of ``like``."""
        return KeyValueCache(
            self.key_buffer.to(device=like.device, dtype=like.dtype),
            self.value_buffer.to(device=like.device, dtype=like.dtype),
            self.start,
            self.end,
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
        return KeyValueCache(*buffers, 0, self.length)


LayerState = HiddenStates | KeyValueCache


def _bounds(size: int, length: int, before: int) -> tuple[int, int]:
    end = max(0, size - before)
    return max(0, end - length), end
