"""A stack of layers that reads a segment and the past of its text.

Transformer-XL, section 3; all-attention, section 3. Shapes: B streams, T tokens of a segment, d
model width, D distances.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.segment_language_model.attention import is_inference
from fairseq_plugins.segment_language_model.attention_blocks import Clamped
from fairseq_plugins.segment_language_model.past import HiddenStates, LayerPast, Past


class FeedForward(nn.Module):
    """Two affine maps, with a ReLU and dropout between them (all-attention, equation 5)."""

    def __init__(self, embed_dim: int, inner_dim: int, dropout: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


class Encoding(NamedTuple):
    """What a layer projects positions from: encoded distances, (D, …), that fall to -1.

    ``shared`` comes from other layers: u and v, or the groups of heads.
    """

    distances: Tensor | Clamped | None
    shared: Any = None


class SegmentLayer(nn.Module):
    """``LN(x + attention(x))``, then ``LN(x + sublayer(x))`` for each further sublayer.

    All-attention, equation 6; Transformer-XL, section 3.3. With ``normalize_before`` it is
    ``x + sublayer(LN(x))``, and the past is normalised too. ``feed_forward`` maps (B, T, d) to
    (B, T, d). ``memory``, which also takes a padding mask, replaces it, or follows it if
    ``memory_interleave``. ``dropout`` acts on each sublayer's output.
    """

    def __init__(
        self,
        embed_dim: int,
        attention: nn.Module,
        feed_forward: nn.Module | None,
        dropout: nn.Module,
        normalize_before: bool = False,
        layer_norm_epsilon: float = 1e-5,
        memory: nn.Module | None = None,
        memory_interleave: bool = False,
    ) -> None:
        super().__init__()
        self.memory_replaces = memory is not None and not memory_interleave
        if self.memory_replaces:
            feed_forward, memory = memory, None
        norm = functools.partial(nn.LayerNorm, embed_dim, layer_norm_epsilon)
        self.self_attn = attention
        self.self_attn_layer_norm = norm()
        self.feed_forward = feed_forward
        self.final_layer_norm = norm() if feed_forward is not None else None
        self.memory = memory
        self.memory_layer_norm = norm() if memory is not None else None
        self.dropout = dropout
        self.normalize_before = normalize_before

    def forward(
        self,
        x: Tensor,
        positions: Any,
        past: LayerPast | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerPast, Any]:
        """Map a segment (B, T, d) to (B, T, d); return also the next one's past, and positions.

        ``positions`` are an :class:`Encoding`, or those that an earlier call returned;
        ``padding_mask`` (B, T) is true for padding.
        """
        if isinstance(positions, Encoding):
            # here, because FSDP gathers a layer's parameters when it calls the layer
            positions = self.self_attn.project_positions(*positions)
        entering, entering_past = x, past
        if self.normalize_before:
            entering = self.self_attn_layer_norm(x)
            if isinstance(past, HiddenStates):
                entering_past = HiddenStates((self.self_attn_layer_norm(past.hidden),))
        attended, next_past = self.self_attn(entering, positions, entering_past)
        if next_past is None:
            # the layer's input, so that projections and normalisation learn from the past too
            earlier = past if isinstance(past, HiddenStates) else HiddenStates(())
            next_past = earlier.extended(x)
            seen = next_past.last(self.self_attn.max_past(positions, x.size(1)))
            if seen is not next_past:
                next_past = HiddenStates(seen.parts, shortened=True)
        x = self._add(x, attended, self.self_attn_layer_norm)
        for sublayer, layer_norm, is_memory in (
            (self.feed_forward, self.final_layer_norm, self.memory_replaces),
            (self.memory, self.memory_layer_norm, True),
        ):
            if sublayer is not None:
                entering = layer_norm(x) if self.normalize_before else x
                added = sublayer(entering, padding_mask) if is_memory else sublayer(entering)
                x = self._add(x, added, layer_norm)
        return x, next_past, positions

    def _add(self, x: Tensor, added: Tensor, layer_norm: nn.Module) -> Tensor:
        x = x + self.dropout(added)
        return x if self.normalize_before else layer_norm(x)


@dataclass(frozen=True)
class LayerSettings:
    """How layers of both papers may differ from the published ones.

    Args:
        attention_dropout: rate of the attention weights' dropout; None for the published choice.
        activation_dropout: rate of the dropout of a feed-forward sublayer's inner activations; None
            for that of the sublayers' outputs.
        clamp_len: larger distances count as this one.
        normalize_before: ``x + sublayer(LN(x))``, and, with ``final_norm``, LN at the end.
        memory: builds the product-key memory of a layer, by its number from 1, or None.
        memory_interleave: memories follow feed-forward sublayers instead of replacing them.
    """

    attention_dropout: float | None = None
    activation_dropout: float | None = None
    clamp_len: int | None = None
    normalize_before: bool = False
    final_norm: bool = True
    layer_norm_epsilon: float = 1e-5
    memory: Callable[[int], nn.Module | None] = lambda number: None
    memory_interleave: bool = False

    def build_layer(
        self,
        number: int,
        embed_dim: int,
        attention: nn.Module,
        feed_forward: nn.Module | None,
        dropout: nn.Module,
    ) -> SegmentLayer:
        """Return layer ``number``, from 1, with its memory."""
        norms = self.normalize_before, self.layer_norm_epsilon
        memory = self.memory(number), self.memory_interleave
        return SegmentLayer(embed_dim, attention, feed_forward, dropout, *norms, *memory)

    def build_final_norm(self, embed_dim: int) -> nn.Module | None:
        """Return the norm of the last layer's output, which pre-norm networks have."""
        if not self.normalize_before or not self.final_norm:
            return None
        return nn.LayerNorm(embed_dim, self.layer_norm_epsilon)


class SegmentNetwork(nn.Module):
    """Layers that read a segment and its past: ``y, past = network(x, past)``.

    Args:
        layers: the :class:`SegmentLayer` modules.
        mem_len: number of tokens to keep as the past of the next segment.
        positions: encodes distances, for relative positions.
        absolute_positions: adds a vector for each place of a segment to every layer's input.
        layer_norm: normalises the last layer's output.
        share: returns what each layer shares with the others, given all layers.
        checkpoint_activations: compute activations again in the backward pass.
        compiled_length: T of the segments that torch.compile's layers read, once the past is full;
            shorter segments and the first ones of a text run without it. 0 compiles nothing.
    """

    def __init__(
        self,
        layers: Sequence[SegmentLayer],
        mem_len: int,
        positions: nn.Module | None = None,
        absolute_positions: nn.Module | None = None,
        layer_norm: nn.Module | None = None,
        share: Callable[[Sequence[SegmentLayer]], Sequence[Any]] | None = None,
        checkpoint_activations: bool = False,
        compiled_length: int = 0,
    ) -> None:
        super().__init__()
        if mem_len < 0:
            raise ValueError(f"`mem_len` is {mem_len}: it must be at least 0")
        self.positions = positions
        self.absolute_positions = absolute_positions
        self.layers = nn.ModuleList(layers)
        self.layer_norm = layer_norm
        self.mem_len = mem_len
        self.share = share
        self.checkpoint_activations = checkpoint_activations
        self.compiled_length = compiled_length
        if compiled_length:
            for layer in layers:
                # with shapes that change, a compiled layer is slower than a plain one
                layer.compile(dynamic=False)

    def forward(
        self,
        x: Tensor,
        past: Past | None = None,
        keep: int | None = None,
        padding_mask: Tensor | None = None,
        first_place: int = 0,
    ) -> tuple[Tensor, Past]:
        """Map a segment (B, T, d) to (B, T, d), and return the past of the next segment.

        ``past`` is None at the start of a text. ``keep`` overrides ``mem_len``. ``padding_mask``
        (B, T) is true for padding. ``first_place`` is the first token's place, for absolute
        positions.
        """
        keep = self.mem_len if keep is None else keep
        length = x.size(1)
        if keep > 0 and not is_inference(self):
            x = x.clone()  # the past holds it, and the caller may change it
        layers: Sequence[LayerPast | None] = [None] * len(self.layers)
        if past is not None and past.layers:
            # under autocast, keys and values stay in the precision of their projections
            autocast = torch.is_autocast_enabled(x.device.type)
            layers = [
                layer.to(x.device)
                if autocast and not isinstance(layer, HiddenStates)
                else layer.to(device=x.device, dtype=x.dtype)
                for layer in past.layers
            ]
        earlier = 0 if past is None else past.length
        positions, farthest = self._positions(x, past, earlier + length - 1, keep + length - 1)
        # inference projects positions a few times only, and compiling takes minutes
        encoded = isinstance(positions[0], Encoding)
        compiled = length == self.compiled_length and earlier == keep
        compiled = compiled and not (encoded and is_inference(self))
        if compiled:
            layers = [None if layer is None else layer.whole() for layer in layers]
        next_layers: list[LayerPast] = []
        projected: list[Any] = []
        shared = None
        for index, layer in enumerate(self.layers):
            if self.absolute_positions is not None:
                x = self.absolute_positions.add_to_layer(x, index, first_place)
            entering = positions[index]
            if encoded and shared is not None:
                entering = entering._replace(shared=shared)
            inputs = x, entering, layers[index], padding_mask
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, next_layer, entered = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                # the latter runs without torch.compile, and with hooks
                run = layer if compiled or not self.compiled_length else layer._call_impl
                x, next_layer, entered = run(*inputs)
            projected.append(entered)
            shared = getattr(entered, "biases", None)  # u and v, for layers without their own
            if keep > 0:
                next_layers.append(next_layer.last(keep))
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        num_tokens = length + (0 if past is None else past.num_tokens)
        if keep == 0 or not is_inference(self):
            return x, Past(tuple(next_layers), num_tokens)
        return x, Past(tuple(next_layers), num_tokens, tuple(projected), farthest)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # weights may repeat u and v in each of the layers that share them
        names = {prefix + name for name, _ in self.named_parameters()}
        for name in [name for name in state_dict if ".self_attn.biases." in name]:
            first = state_dict.get(f"{prefix}layers.0.self_attn.biases.{name[-1]}")
            if name not in names and first is not None and torch.equal(state_dict[name], first):
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _positions(
        self, x: Tensor, past: Past | None, farthest: int, ever_farthest: int
    ) -> tuple[tuple[Any, ...], int]:
        """Return positions from ``farthest`` (or more) down for each layer, and the farthest.

        In inference the past has them; it gets more of them as it grows to ``ever_farthest``.
        """
        if is_inference(self):
            if past is not None and past.positions is not None and past.farthest >= farthest:
                return past.positions, past.farthest
            # twice as many as needed: a past that grows token by token would project each time
            farthest = max(farthest, min(2 * farthest, ever_farthest))
        encoding = None if self.positions is None else self.positions(farthest, x)
        shared = self.share(self.layers) if self.share else [None] * len(self.layers)
        return tuple(Encoding(encoding, each) for each in shared), farthest
