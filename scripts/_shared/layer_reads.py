"""What the layers of a model read in a forward pass: weights of tokens, vectors and slots.

:func:`record` watches a model's layers. A memory's slots are those that its keys select. Attention
weights are computed block by block in the models, and thrown away: they are computed again from a
layer's modules and inputs, by the plain equations of its paper, with the output that follows from
them, which is the layer's own up to rounding.

Shapes: H heads, B streams, T tokens (queries), S keys, N persistent vectors, D distances, n tokens
without padding, k slots read by a head, d model width, d_h head width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import (
    HEAD_SPLIT,
    JOINT,
    SINGLE_HEAD,
    AllAttention,
    GroupedKeyValues,
    SpannedPositions,
)
from fairseq_plugins.all_attention.persistent_vectors import SoftmaxFeedForward
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.segment_language_model.attention import RelativeAttention, RelativePositions
from fairseq_plugins.segment_language_model.attention_blocks import Clamped
from fairseq_plugins.segment_language_model.past import HiddenStates, KeyValues
from fairseq_plugins.weighted_transformer.layers import Attention

_LAYER = re.compile(r"(encoder|decoder)\.(?:network\.)?layers\.(\d+)\.(.*)")


class Layer(NamedTuple):
    """A part of a layer of the "encoder" or the "decoder", with the layer's number from 1."""

    part: str
    number: int
    path: str
    module: nn.Module


class Reads(NamedTuple):
    """The weights with which tokens read, and the output that follows from computed ones.

    ``keys`` (H, B, T, S) are the weights of tokens, of which the last T are the queries' own;
    ``vectors`` (H, B, T, N) those of persistent vectors; ``slots`` and ``slot_weights`` (n, H, k)
    what a memory reads.
    """

    output: Tensor | None = None
    keys: Tensor | None = None
    vectors: Tensor | None = None
    slots: Tensor | None = None
    slot_weights: Tensor | None = None


def relative_attention(
    layer: RelativeAttention,
    x: Tensor,
    positions: RelativePositions,
    past: HiddenStates | KeyValues | None = None,
) -> Reads:
    """``softmax(((q + u)·k + (q + v)·p) / √d_h)`` (Transformer-XL, section 3.3)."""
    query = _split(layer.q_proj(x), layer.head_dim)
    u, v = positions.biases or (torch.zeros(len(query), layer.head_dim),) * 2
    keys, values = _keys_and_values(
        lambda tokens: (layer.k_proj(tokens), layer.v_proj(tokens)), layer.head_dim, x, past
    )
    scores = (query + u[:, None, None]) @ keys.mT
    if positions.rel_keys is not None:
        rel_keys = positions.rel_keys
        scores = scores + _by_distance(query + v[:, None, None], rel_keys, keys.size(2))
    weights = _softmax(_within(layer.window, scores / math.sqrt(layer.head_dim)))
    return Reads(layer.out_proj(_join(weights @ values)), weights)


def all_attention(
    layer: AllAttention, x: Tensor, positions: SpannedPositions, past: Any = None
) -> Reads:
    """One softmax over tokens, times ``m``, and persistent vectors (all-attention, section 4)."""
    query = _split(layer.q_proj(x), layer.head_dim)
    context_query = query[: layer.context_heads]
    keys, values = _grouped_keys_and_values(layer, x, positions, past)
    scores = context_query @ keys.mT
    scores = scores + _by_distance(context_query, positions.rel_keys, keys.size(2))
    scores = _within(layer.window, scores / math.sqrt(layer.head_dim))
    if layer.span is not None:
        # a·m / Σ a·m is a softmax of scores with log m added
        scores = scores + _span_mask(layer.span, scores).log()
    if layer.persistent is None:
        weights = _softmax(scores)
        return Reads(layer.out_proj(_join(weights @ values)), weights)
    if layer.variant == SINGLE_HEAD:
        query = _join(query).unsqueeze(0)
    elif layer.variant == HEAD_SPLIT:
        query = query[layer.context_heads :]
    vector_scores, vector_values = _vector_scores(layer.persistent, query)
    if layer.variant == JOINT:
        both = _softmax(torch.cat([scores, vector_scores], dim=3))
        weights, vectors = both.split([scores.size(3), vector_scores.size(3)], dim=3)
    else:
        weights, vectors = _softmax(scores), _softmax(vector_scores)
    attended, by_vectors = weights @ values, vectors @ vector_values
    if layer.variant == HEAD_SPLIT:
        attended = torch.cat([attended, by_vectors])
    else:
        # a single wide head is split like the others
        attended = attended + _split(_join(by_vectors), layer.head_dim)
    return Reads(layer.out_proj(_join(attended)), weights, vectors)


def softmax_feed_forward(layer: SoftmaxFeedForward, x: Tensor, padding_mask: Any = None) -> Reads:
    """``U softmax(V x)`` (all-attention, equation 9)."""
    scores, values = _vector_scores(layer.persistent, x.unsqueeze(0))
    vectors = _softmax(scores)
    return Reads((vectors @ values).squeeze(0), vectors=vectors)


def multihead_attention(
    layer: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Reads:
    """``softmax(q·k / √d_h)``, fairseq's."""
    # fairseq's tensors are (T, B, d)
    queries, keys, values = (
        _split(x.transpose(0, 1), layer.head_dim)
        for x in (layer.q_proj(query), layer.k_proj(key), layer.v_proj(value))
    )
    scores = queries @ keys.mT / math.sqrt(layer.head_dim)
    if attn_mask is not None:
        scores = scores + attn_mask
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None].bool(), -torch.inf)
    weights = _softmax(scores)
    return Reads(layer.out_proj(_join(weights @ values).transpose(0, 1)), weights)


def branched_attention(
    layer: Attention, query: Tensor, key: Tensor, mask: Tensor | None = None, **_: Any
) -> Reads:
    """``softmax(q·k / √d_h)``; branches weigh its heads by κ in ``out_proj``."""
    output, weights = layer.forward(query, key, mask, need_weights=True)
    # (B, H, T, S) -> (H, B, T, S)
    return Reads(output, weights.transpose(0, 1))


EQUATIONS: dict[type[nn.Module], Callable[..., Reads]] = {
    RelativeAttention: relative_attention,
    AllAttention: all_attention,
    SoftmaxFeedForward: softmax_feed_forward,
    MultiheadAttention: multihead_attention,
    Attention: branched_attention,
}


def layers(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[Layer]:
    """Yield the modules of some kinds in a model's layers."""
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            part, number, path = _LAYER.search(name).groups()
            yield Layer(part, int(number) + 1, path, module)


@contextmanager
def record(
    model: nn.Module,
    see: Callable[[Layer, Reads], None],
    *kinds: type[nn.Module],
) -> Iterator[None]:
    """Let ``see`` have what each layer reads in each call; with kinds, only layers of these."""
    with ExitStack() as stack:
        for layer in layers(model, *(kinds or (*EQUATIONS, ProductKeyMemory))):
            if isinstance(layer.module, ProductKeyMemory):
                handle = layer.module.keys.register_forward_hook(partial(_select, see, layer))
            else:
                hook = partial(_compute, see, layer)
                handle = layer.module.register_forward_hook(hook, with_kwargs=True)
            stack.enter_context(handle)
        yield


def _select(
    see: Callable[[Layer, Reads], None], layer: Layer, _: Any, __: Any, selected: tuple
) -> None:
    scores, slots = selected
    see(layer, Reads(slots=slots, slot_weights=scores.detach().softmax(-1)))


@torch.no_grad()
def _compute(
    see: Callable[[Layer, Reads], None],
    layer: Layer,
    module: nn.Module,
    inputs: tuple,
    options: dict[str, Any],
    _: Any,
) -> None:
    (equation,) = (x for kind, x in EQUATIONS.items() if isinstance(module, kind))
    see(layer, equation(module, *inputs, **options))


def _split(x: Tensor, head_dim: int) -> Tensor:
    """Map (B, T, H·d_h) to (H, B, T, d_h)."""
    return x.unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)


def _join(x: Tensor) -> Tensor:
    """Map (H, B, T, d_h) to (B, T, H·d_h)."""
    return x.permute(1, 2, 0, 3).flatten(2)


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax; a query that sees nothing has weights 0."""
    return scores.softmax(-1).nan_to_num(0.0)


def _distances(scores: Tensor) -> Tensor:
    """Return the distance from each query to each key, (T, S), of scores (H, B, T, S)."""
    queries, keys = scores.shape[2:]
    return torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)


def _within(window: Any, scores: Tensor) -> Tensor:
    distances = _distances(scores)
    hidden = (distances < window.nearest) | (distances > window.farthest)
    return scores.masked_fill(hidden, -torch.inf)


def _by_distance(query: Tensor, positions: Tensor | Clamped, num_keys: int) -> Tensor:
    """Return q·p for each query and key, (H, B, T, S); rows of p are distances that fall to -1."""
    rows = positions.rows if isinstance(positions, Clamped) else positions
    by_distance = query @ rows.unsqueeze(1).mT  # (H, B, T, D)
    distances = _distances(query.new_empty(1, 1, query.size(2), num_keys))
    last = rows.size(1) - 2
    row = last - distances.clamp(-1, last)
    return by_distance.gather(3, row.expand(*query.shape[:2], -1, -1))


def _span_mask(span: AdaptiveSpan, scores: Tensor) -> Tensor:
    """Return ``m_z(x) = clamp((R + z - x) / R, 0, 1)``, x from 0 for the nearest key."""
    z = span.max_span * span.value[:, None, None, None]
    return ((span.ramp + z - (_distances(scores) - 1)) / span.ramp).clamp(0, 1)


def _keys_and_values(
    project: Callable[[Tensor], tuple[Tensor, Tensor]], head_dim: int, x: Tensor, past: Any
) -> tuple[Tensor, Tensor]:
    """Return keys and values (H, B, S, d_h) of the past and of ``x``."""
    if isinstance(past, HiddenStates):
        x = torch.cat([past.hidden, x], dim=1)
    keys, values = (_split(part, head_dim) for part in project(x))
    if isinstance(past, KeyValues):
        keys, values = torch.cat([past.keys, keys], 2), torch.cat([past.values, values], 2)
    return keys, values


def _grouped_keys_and_values(
    layer: AllAttention, x: Tensor, positions: SpannedPositions, past: Any
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all heads; zeros where a head's group keeps fewer tokens."""
    groups, order = positions.groups
    parts = []
    for number, group in enumerate(groups):
        tokens = x
        if isinstance(past, HiddenStates):
            tokens = torch.cat([past.last(group.width).hidden, x], dim=1)
        part = [
            projection(tokens, group, layer.context_heads)
            for projection in (layer.k_proj, layer.v_proj)
        ]
        if isinstance(past, GroupedKeyValues):
            earlier = past.groups[number].keys, past.groups[number].values
            part = [torch.cat(pair, dim=2) for pair in zip(earlier, part, strict=True)]
        parts.append(part)
    most = max(keys.size(2) for keys, _ in parts)
    padded = [[F.pad(x, (0, 0, most - x.size(2), 0)) for x in part] for part in parts]
    keys, values = (torch.cat(x) for x in zip(*padded, strict=True))
    return (keys, values) if order is None else (keys[order], values[order])


def _vector_scores(vectors: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (H, B, T, N) of a query, not yet divided, and values (H, 1, N, d_h)."""
    keys, values = vectors()
    return query @ keys.unsqueeze(1).mT / math.sqrt(keys.size(2)), values.unsqueeze(1)
