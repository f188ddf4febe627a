"""A stack of layers that reads a segment and the past of its text.

Transformer-XL, section 3; all-attention, section 3. Shapes: B streams, T tokens of a segment, d
model width, D distances.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.segment_language_model.attention import check_widths, is_inference
from fairseq_plugins.segment_language_model.attention_blocks import Clamped
from fairseq_plugins.segment_language_model.past import (
    HiddenStates,
    LayerPast,
    LayerPositions,
    Past,
)
from fairseq_plugins.sizes import check_sizes


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

    ``shared`` is u and v of the first layer (Transformer-XL), or the layer's groups of heads, of
    which all layers' spans are read at once (all-attention).
    """

    distances: Tensor | Clamped | None
    shared: tuple | None = None


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
        positions: Encoding | LayerPositions,
        past: LayerPast | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerPast, LayerPositions]:
        """Map a segment (B, T, d) to (B, T, d); return also the next one's past, and positions.

        ``positions`` are an :class:`Encoding`, or those that an earlier call returned;
        ``padding_mask`` (B, T) is true for padding.
        """
        # here, because FSDP gathers a layer's parameters when it calls the layer
        projected: LayerPositions = (
            self.self_attn.project_positions(*positions)
            if isinstance(positions, Encoding)
            else positions
        )
        inputs, input_past = x, past
        if self.normalize_before:
            inputs = self.self_attn_layer_norm(x)
            if isinstance(past, HiddenStates):
                input_past = past.map_tensors(self.self_attn_layer_norm)
        attended, next_past = self.self_attn(inputs, projected, input_past)
        if next_past is None:
            # the layer's input, so that projections and normalisation learn from the past too
            earlier = past if isinstance(past, HiddenStates) else HiddenStates(())
            next_past = earlier.extended(x)
            seen = next_past.last(self.self_attn.max_past(projected, x.size(1)))
            if seen is not next_past:
                next_past = HiddenStates(seen.parts, shortened=True)
        x = self._add(x, attended, self.self_attn_layer_norm)
        for sublayer, layer_norm, is_memory in (
            (self.feed_forward, self.final_layer_norm, self.memory_replaces),
            (self.memory, self.memory_layer_norm, True),
        ):
            if sublayer is not None:
                inputs = layer_norm(x) if self.normalize_before else x
                added = sublayer(inputs, padding_mask) if is_memory else sublayer(inputs)
                x = self._add(x, added, layer_norm)
        return x, next_past, projected

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
        checkpoint_activations: compute activations again in the backward pass.
        compiled_length: T of the segments that torch.compile's layers read, once the past is full;
            shorter segments and the first ones of a text run without it. 0 compiles nothing.
    """

    # pasts carry it; wrappers such as FSDP's inherit it
    kind = ""

    def __init__(
        self,
        layers: Sequence[SegmentLayer],
        mem_len: int,
        positions: nn.Module | None = None,
        absolute_positions: nn.Module | None = None,
        layer_norm: nn.Module | None = None,
        checkpoint_activations: bool = False,
        compiled_length: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(0, mem_len=mem_len)
        self.positions = positions
        self.absolute_positions = absolute_positions
        self.layers = nn.ModuleList(layers)
        self.layer_norm = layer_norm
        self.mem_len = mem_len
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
    ) -> tuple[Tensor, Past]:
        """Map a segment (B, T, d) to (B, T, d), and return the past of the next segment.

        ``past`` is None at the start of a text. ``keep`` overrides ``mem_len``. ``padding_mask``
        (B, T) is true for padding.
        """
        keep = self.mem_len if keep is None else keep
        past = self._accept(past, x)
        if keep > 0 and not is_inference(self):
            x = x.clone()  # the past holds it, and the caller may change it
        positions, farthest = self._positions(x, past, keep)
        run = self._choose_run(x, past, keep, positions)
        layers: list[LayerPast] = []
        projected: list[LayerPositions] = []
        for number, layer in enumerate(self.layers):
            if self.absolute_positions is not None:
                x = self.absolute_positions.add_to_layer(x, number, past.next_place)
            layer_past = past.layers[number] if past.layers else None
            encoding = _hand_on(projected, positions[number])
            x, layer_past, layer_positions = run(layer, x, encoding, layer_past, padding_mask)
            projected.append(layer_positions)
            if keep > 0:
                layers.append(layer_past.last(keep))
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        next_past = Past(tuple(layers), past.num_tokens + x.size(1), kind=self.kind)
        if keep > 0 and is_inference(self):
            next_past = replace(next_past, positions=tuple(projected), farthest=farthest)
        return x, next_past

    def _accept(self, past: Past | None, x: Tensor) -> Past:
        """Return the past in the dtype and on the device of ``x``; refuse other networks' pasts."""
        past = Past() if past is None else past
        theirs, ours = (len(past.layers), past.kind or self.kind), (len(self.layers), self.kind)
        if past.layers and theirs != ours:
            raise ValueError(
                f"`past` comes from {theirs[0]} layers of {theirs[1]}, and the network has "
                f"{ours[0]} of {ours[1]}: a past belongs to the network that returned it; begin "
                "other text with None"
            )
        return past.map_layers(functools.partial(_fit, x))

    def encode_positions(self, farthest: int, x: Tensor) -> list[Encoding]:
        """Return what each layer projects positions from, for the distances from ``farthest``."""
        distances = None if self.positions is None else self.positions(farthest, x)
        return [Encoding(distances)] * len(self.layers)

    def _positions(
        self, x: Tensor, past: Past, keep: int
    ) -> tuple[Sequence[Encoding | LayerPositions], int]:
        """Return each layer's positions, from the farthest that it may see (or more); and that one.

        In inference the past has them; it gets more of them until it is full.
        """
        farthest = past.length + x.size(1) - 1
        if is_inference(self):
            if past.positions is not None and past.farthest >= farthest:
                return past.positions, past.farthest
            # twice as many as needed: a past that grows token by token would project each time
            farthest = max(farthest, min(2 * farthest, keep + x.size(1) - 1))
        return self.encode_positions(farthest, x), farthest

    def _choose_run(
        self, x: Tensor, past: Past, keep: int, positions: Sequence[Encoding | LayerPositions]
    ) -> Callable[..., tuple[Tensor, LayerPast, LayerPositions]]:
        """Return the function that runs a layer, whose activations may be computed again."""
        run = self._choose_call(x, past, keep, positions)
        if self.checkpoint_activations and torch.is_grad_enabled():
            return functools.partial(checkpoint, run, use_reentrant=False)
        return run

    def _choose_call(
        self, x: Tensor, past: Past, keep: int, positions: Sequence[Encoding | LayerPositions]
    ) -> Callable[..., tuple[Tensor, LayerPast, LayerPositions]]:
        """Return the function that calls a layer: plainly, or compiled."""
        # inference projects positions a few times only, and compiling takes minutes
        projects_once = is_inference(self) and isinstance(positions[0], Encoding)
        if x.size(1) == self.compiled_length and past.length == keep and not projects_once:
            return lambda layer, x, encoded, past, *rest: layer(
                x, encoded, None if past is None else past.whole(), *rest
            )
        # without torch.compile, and with hooks
        if self.compiled_length:
            return lambda layer, *inputs: layer._call_impl(*inputs)
        return lambda layer, *inputs: layer(*inputs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *rest: object
    ) -> None:
        # weights may repeat u and v in each of the layers that share them
        names = {prefix + name for name, _ in self.named_parameters()}
        for name in [name for name in state_dict if ".self_attn.biases." in name]:
            first = state_dict.get(f"{prefix}layers.0.self_attn.biases.{name[-1]}")
            if name not in names and first is not None and torch.equal(state_dict[name], first):
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _fit(x: Tensor, past: LayerPast) -> LayerPast:
    """Move a layer's past to the device and the dtype of ``x``."""
    if isinstance(past, HiddenStates):
        check_widths(past.parts[0].shape[-1:], x.shape[-1:])
    if (
        not x.is_meta
        and torch.is_autocast_enabled(x.device.type)
        and not isinstance(past, HiddenStates)
    ):
        # keys and values stay in the precision of their projections
        return past.map_tensors(lambda tensor: tensor.to(x.device))
    return past.map_tensors(lambda tensor: tensor.to(x.device, x.dtype))


def _hand_on(
    projected: list[LayerPositions], positions: Encoding | LayerPositions
) -> Encoding | LayerPositions:
    """Give a layer u and v of the first one, which all share unless they have their own."""
    if isinstance(positions, Encoding) and projected and projected[0].biases is not None:
        return positions._replace(shared=projected[0].biases)
    return positions
