"""The past of a text: what a network keeps of the tokens it has read (Transformer-XL, section 3.2).

A past is a value, an argument and a result: ``y, past = network(x, past)``. Whoever holds one can
continue from it, any number of times. Training keeps each layer's inputs and projects them again,
so that the projections learn from them too. Inference (evaluation mode without gradients) keeps
keys, values and projected positions, and projects nothing twice.

Shapes: B streams, S tokens of the past, T new tokens, H heads, d model width, d_h head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LayerPast(Protocol):
    """What one layer keeps of the last S tokens (``length``) of B streams (``streams``)."""

    @property
    def length(self) -> int:
        """Return S."""

    @property
    def streams(self) -> int:
        """Return B."""

    def last(self, length: int) -> LayerPast:
        """Return the last ``length`` tokens, or all if there are fewer."""

    def select(self, order: Tensor) -> LayerPast:
        """Return stream ``order[i]`` as stream i."""

    def whole(self) -> LayerPast:
        """Return the same tokens without what lies around them in memory, for compiled layers."""

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> LayerPast:
        """Return the past with a function's result, of the same shape, for each tensor."""


class LayerPositions(Protocol):
    """What a layer's scores depend on besides the tokens, projected from encoded distances."""

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Return u and v, which layers without their own take from the first one; or None."""


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Inputs of a layer, detached: ``parts`` along the text, each (B, S_i, d).

    A new segment is a new part, so that pasts share the tensors of the tokens that they share.
    ``shortened`` says that a layer dropped earlier tokens because it did not see them.
    """

    parts: tuple[Tensor, ...]
    shortened: bool = False

    @property
    def hidden(self) -> Tensor:
        """Return all tokens as one tensor, (B, S, d)."""
        if len(self.parts) > 1:
            return torch.cat(self.parts, dim=1)
        (hidden,) = self.parts
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return hidden
        # autograd keeps no tensors of torch.inference_mode
        return hidden.clone() if hidden.is_inference() else hidden

    @property
    def length(self) -> int:
        """Return S."""
        return sum(part.size(1) for part in self.parts)

    @property
    def streams(self) -> int:
        """Return B."""
        return self.parts[0].size(0)

    def extended(self, x: Tensor) -> HiddenStates:
        """Return the states with those of a new segment, (B, T, d), at the end."""
        return HiddenStates((*self.parts, x.detach()), self.shortened)

    def last(self, length: int) -> HiddenStates:
        """Return the last ``length`` tokens, or all if there are fewer."""
        if length >= self.length:
            return self
        parts: list[Tensor] = []
        for part in reversed(self.parts):
            size = min(part.size(1), length)
            if size > 0 or not parts:
                parts.insert(0, part.narrow(1, part.size(1) - size, size))
            length -= size
        return HiddenStates(tuple(parts))

    def select(self, order: Tensor) -> HiddenStates:
        """Return stream ``order[i]`` as stream i."""
        return HiddenStates((self.hidden.index_select(0, order),), self.shortened)

    def whole(self) -> HiddenStates:
        """Return the states as one tensor."""
        return HiddenStates((self.hidden,), self.shortened)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> HiddenStates:
        """Return the states as one tensor, the function's result."""
        return HiddenStates((function(self.hidden),), self.shortened)


class _Buffers:
    """Buffers of keys and values, (H, B, room, d_h), of which some tokens are written."""

    def __init__(self, keys: Tensor, values: Tensor, written: int) -> None:
        self.keys, self.values = keys, values
        # taken out while a thread writes, so that no other writes to the same place
        self._written = [written]

    def claim(self, end: int, new: int) -> bool:
        """Reserve ``new`` tokens behind ``end``; False if others are there, or no room."""
        try:
            written = self._written.pop()
        except IndexError:
            return False
        fits = written == end and end + new <= self.keys.size(2)
        self._written.append(end + new if fits else written)
        return fits


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values of a layer in inference, each (H, B, S, d_h).

    They are tokens ``start`` to ``end`` of ``buffers``. New tokens are written behind them, so the
    cost of a segment does not depend on S; where another continuation has been written there
    already, they are copied first.
    """

    buffers: _Buffers
    start: int
    end: int

    @classmethod
    def wrap(cls, keys: Tensor, values: Tensor) -> KeyValues:
        """Keep ``keys`` and ``values``, (H, B, S, d_h), without a copy."""
        return cls(_Buffers(keys, values, keys.size(2)), 0, keys.size(2))

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
        return self.buffers.keys.narrow(2, self.start, self.length)

    @property
    def values(self) -> Tensor:
        """Return the values, a view."""
        return self.buffers.values.narrow(2, self.start, self.length)

    def extended(self, keys: Tensor, values: Tensor) -> KeyValues:
        """Return the past with the keys and values of new tokens, (H, B, T, d_h), at the end."""
        if torch.compiler.is_compiling():
            return KeyValues.wrap(
                torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            )
        past = self
        # tensors of torch.inference_mode cannot be changed outside of it
        writable = torch.is_inference_mode_enabled() or not self.buffers.keys.is_inference()
        if not (writable and self.buffers.claim(self.end, keys.size(2))):
            past = self._moved(keys.size(2))
        end = past.end + keys.size(2)
        past.buffers.keys.narrow(2, past.end, keys.size(2)).copy_(keys)
        past.buffers.values.narrow(2, past.end, keys.size(2)).copy_(values)
        return KeyValues(past.buffers, past.start, end)

    def _moved(self, new: int) -> KeyValues:
        """Return a copy in buffers with room for ``new`` tokens, which are claimed, and more."""
        # room for a quarter of the tokens, in whole segments: moving all tokens once per quarter is
        # cheap compared with attending to them
        room = self.length + -(-max(new, self.length // 4) // new) * new
        buffers = []
        for tokens in (self.keys, self.values):
            buffer = tokens.new_empty(*tokens.shape[:2], room, tokens.size(3))
            buffer.narrow(2, 0, self.length).copy_(tokens)
            buffers.append(buffer)
        keys, values = buffers
        return KeyValues(_Buffers(keys, values, self.length + new), 0, self.length)

    def last(self, length: int) -> KeyValues:
        """Return the last ``length`` tokens, or all if there are fewer."""
        return KeyValues(self.buffers, max(self.start, self.end - length), self.end)

    def select(self, order: Tensor) -> KeyValues:
        """Return stream ``order[i]`` as stream i."""
        return KeyValues.wrap(self.keys.index_select(1, order), self.values.index_select(1, order))

    def whole(self) -> KeyValues:
        """Return views of the same tokens, from 0 on; the next tokens go elsewhere."""
        return KeyValues.wrap(self.keys, self.values)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> KeyValues:
        """Return the past with the function's results; itself where they are its arguments."""
        keys = self.keys  # each access makes another view
        mapped = function(keys)
        return self if mapped is keys else KeyValues.wrap(mapped, function(self.values))


@dataclass(frozen=True, eq=False)
class Past:
    """What a network keeps of a text: each layer's past, and in inference projected positions.

    ``num_tokens`` of each stream were read so far; ``layers`` is empty if nothing is kept of them.
    ``positions`` are each layer's, for the distances from ``farthest`` down to -1. ``kind`` is that
    of the network, if it is known.
    """

    layers: tuple[LayerPast, ...] = ()
    num_tokens: int = 0
    positions: tuple[LayerPositions, ...] | None = None
    farthest: int = -1
    kind: str = ""

    def __repr__(self) -> str:
        """Describe the past without its numbers."""
        return f"Past({self.num_tokens} tokens read, {self.length} kept, {len(self.layers)} layers)"

    @property
    def length(self) -> int:
        """Return S, the most tokens that a layer keeps."""
        return max([0, *(layer.length for layer in self.layers)])

    @property
    def next_place(self) -> int:
        """Return the next token's place, for absolute positions; a past of nothing begins anew."""
        return self.num_tokens if self.layers else 0

    def select(self, order: Tensor) -> Past:
        """Return stream ``order[i]`` as stream i, as beam search asks; ``order`` is (B,)."""
        unchanged = torch.arange(len(order), device=order.device)
        if self.layers and self.layers[0].streams == len(order) and torch.equal(order, unchanged):
            return self  # sampling asks for the present order at every token
        return self.map_layers(lambda layer: layer.select(order))

    def to(self, *args: Any, **options: Any) -> Past:
        """Return the past in another dtype or on another device, as :meth:`Tensor.to` does."""

        def move(tensor: Tensor) -> Tensor:
            moved = tensor.to(*args, **options)
            # numbers of heads stay integers
            return moved if tensor.is_floating_point() else tensor.to(moved.device)

        moved = replace(self, positions=tree_map_only(Tensor, move, self.positions))
        return moved.map_layers(lambda layer: layer.map_tensors(move))

    def map_layers(self, function: Callable[[LayerPast], LayerPast]) -> Past:
        """Return the past with the function's result for each layer."""
        return replace(self, layers=tuple(map(function, self.layers)))


# for torch.load(weights_only=True)
torch.serialization.add_safe_globals([Past, HiddenStates, KeyValues, _Buffers])
