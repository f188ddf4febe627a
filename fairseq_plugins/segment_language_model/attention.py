"""Attention by content and by distance: the equations, and the module of Transformer-XL.

Transformer-XL, section 3.3 and appendix B; all-attention, section 3.

Shapes: B streams, H heads, T tokens of the segment (queries), S keys (past and segment), D
distances, F distances beyond a clamp, G sets of relative keys (1 for all heads, or H), W distances
with a bias, d model width, d_h = d / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention_blocks import (
    UNLIMITED,
    Clamped,
    Window,
    hidden_by_window,
    map_rows,
    rel_shift,
    rows_by_distance,
)
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from fairseq_plugins.segment_language_model.past import HiddenStates, KeyValues


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rel_keys: Tensor | Clamped | None,
    window: Window,
    dropout: float = 0.0,
    position_query: Tensor | None = None,
    distance_bias: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each query to the keys in its window, in differentiable operations.

    The score of query t for the key at distance x is ``c_t·k_{t-x} + q_t·p_x + bias_x``, where c
    is the projected query plus u, and q the projected query plus v (section 3.3).

    Args:
        query: c, (H, B, T, d_h), divided by √d_h.
        keys: (H, B, S, d_h); the last T belong to the queries' own tokens.
        values: (H, B, S, d_h).
        rel_keys: p for the distances S - 1 (or more) down to -1, (G, D, d_h), or
            :class:`Clamped`; None for scores by content alone.
        window: the distances that a query sees.
        dropout: the probability of dropping a weight.
        position_query: q, shaped like ``query``; None if it equals c.
        distance_bias: (H, W), -∞ allowed, for the distances from ``window.farthest`` down; needs
            ``rel_keys``.
        return_lse: also return log Σ exp(score), (H, B, T).

    Returns (H, B, T, d_h), zero for a query that sees nothing; and the log-sum-exp or None.
    """
    rows = rows_by_distance(keys, rel_keys, distance_bias)
    position_query = query if position_query is None else position_query.to(query.dtype)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    num_queries, num_keys = query.size(2), keys.size(2)
    with torch.autocast(query.device.type, enabled=False):
        # (H, B, T, d_h) x (H, B, d_h, S) -> (H, B, T, S)
        scores = query @ keys.mT
        if rows is not None:
            # the distances from S - 1, or the clamp, to -1: (G, D, d_h) -> (G, S + 1 - F, d_h)
            rows = rows.to(query.dtype)[:, max(0, rows.size(1) - num_keys - 1) :]
            far = num_keys + 1 - rows.size(1)
            # (H, B, T, d_h) x (G, 1, d_h, S + 1 - F) -> (H, B, T, S + 1 - F)
            by_distance = position_query @ rows.unsqueeze(1).mT
            if far > 0:
                # distances beyond the clamp use the first row's score: -> (H, B, T, S + 1)
                first_row = by_distance[..., :1].expand(-1, -1, -1, far)
                by_distance = torch.cat([first_row, by_distance], dim=-1)
            if distance_bias is not None:
                bias = _over_distances(distance_bias, window.farthest, num_keys)
                by_distance = by_distance + bias[:, None, None].to(query.dtype)
            # from one column per distance, S - 1 to -1, to one column per key
            scores = scores + rel_shift(by_distance, num_keys)
        hidden = hidden_by_window(num_keys - num_queries, num_queries, num_keys, window, scores)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        blind = hidden.all(-1)  # the first tokens of a stream may see nothing
        weights = scores.softmax(-1).masked_fill(blind.unsqueeze(-1), 0.0)
        attended = F.dropout(weights, dropout) @ values
        if not return_lse:
            return attended, None
        lse = scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1)
        return attended, lse.masked_fill(blind, -torch.inf)


def _over_distances(distance_bias: Tensor, farthest: int, num_keys: int) -> Tensor:
    """Fit biases (H, W), from ``farthest`` down, to the distances S - 1 to -1: (H, S + 1)."""
    beyond = num_keys - 1 - farthest  # distances that the window hides
    bias = distance_bias[:, max(0, -beyond) :]
    return F.pad(bias, (max(0, beyond), num_keys + 1 - max(0, beyond) - bias.size(1)))


KERNELS = {"fast": window_attention, "plain": plain_attention}


def choose_kernel(kernel: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the kernel of this name; torch.compile needs the plain one."""
    if kernel not in KERNELS:
        raise ValueError(f"`kernel` is {kernel!r}: there are {', '.join(KERNELS)}")
    return KERNELS["plain" if torch.compiler.is_compiling() else kernel]


class RelativePositions(NamedTuple):
    """All that a layer's scores depend on, besides the tokens.

    ``rel_keys`` are p for the distances S - 1 (or more) down to -1, (G, D, d_h), or clamped;
    ``biases`` are u and v, each (H, d_h). Each may be None.
    """

    rel_keys: Tensor | Clamped | None
    biases: tuple[Tensor, Tensor] | None


# for torch.load(weights_only=True) of a past
torch.serialization.add_safe_globals([RelativePositions, Clamped])


class PositionBiases(nn.Module):
    """The vectors u and v of Transformer-XL (section 3.3, terms c and d), each (H, d_h)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.v = nn.Parameter(torch.zeros(num_heads, head_dim))


class RelativeAttention(nn.Module):
    """Multi-head attention to a segment and to its past (section 3.3).

    The score of query i for key j is ``(q_i + u)·k_j + (q_i + v)·p_{i-j}``, divided by √d_h, with
    p = W_kR R. By itself::

        keys, biases = RelativeKeyProjection(512, 8), PositionBiases(8, 64)
        attention = RelativeAttention(512, 8, Window(0, 255), keys, biases)
        encoding = SinusoidalRelativePositions(512)(x.size(1) - 1, x)
        y, _ = attention(x, attention.project_positions(encoding))  # x, y: (B, T, 512)

    ``position_projection`` maps the encoding of the distances to p, (G, D, d_h). Without
    ``biases``, u and v are another layer's, or 0.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        position_projection: nn.Module | None = None,
        biases: PositionBiases | None = None,
        dropout: float = 0.0,
        kernel: str = "fast",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        choose_kernel(kernel)
        self.head_dim = embed_dim // num_heads
        self.window = window
        self.position_projection = position_projection
        self.biases = biases
        self.dropout = dropout
        self.kernel = kernel
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def project_positions(
        self, encoding: Tensor | Clamped | None, biases: tuple[Tensor, Tensor] | None = None
    ) -> RelativePositions:
        """Return what the scores depend on, given the encoding of distances that fall to -1.

        ``biases`` are u and v of another layer, for a layer that has none.
        """
        if self.biases is not None:
            # copies, because other layers use them when FSDP has freed this one's parameters
            biases = self.biases.u.clone(), self.biases.v.clone()
        if self.position_projection is None or encoding is None:
            return RelativePositions(None, biases)
        return RelativePositions(map_rows(self.position_projection, encoding), biases)

    def max_past(self, positions: RelativePositions, length: int) -> int:
        """Return how many tokens before the next segment attention can use: any number."""
        return UNLIMITED

    def forward(
        self,
        x: Tensor,
        positions: RelativePositions,
        past: HiddenStates | KeyValues | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        """Attend from each token of the segment ``x`` (B, T, d).

        ``positions`` come from :meth:`project_positions` and reach at least to the first key.
        Returns (B, T, d); and, in inference, the keys and values of past and segment, else None.
        """
        check_past(x, past)
        query = self.q_proj(x)
        if positions.biases is None:
            content_query, position_query = scaled_heads(query, self.head_dim), None
        else:
            u, v = (bias.flatten().to(query.dtype) for bias in positions.biases)
            content_query = scaled_heads(query + u, self.head_dim)
            position_query = scaled_heads(query + v, self.head_dim)

        def project(tokens: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.k_proj(tokens), self.v_proj(tokens)
            return split_heads(keys, self.head_dim), split_heads(values, self.head_dim)

        keys, values, keys_and_values = extend_keys_and_values(project, x, past, is_inference(self))
        attended, _ = choose_kernel(self.kernel)(
            content_query,
            keys,
            values,
            positions.rel_keys,
            self.window,
            dropout=self.dropout if self.training else 0.0,
            position_query=position_query,
        )
        return self.out_proj(merge_heads(attended)), keys_and_values


def is_inference(module: nn.Module) -> bool:
    """Return whether to keep keys and values: in evaluation mode, without gradients."""
    # the first pass of activation checkpointing is training, though it has no gradients
    return not (module.training or torch.is_grad_enabled())


def extend_keys_and_values(
    project: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    past: HiddenStates | KeyValues | None,
    inference: bool,
    max_past: int = UNLIMITED,
) -> tuple[Tensor, Tensor, KeyValues | None]:
    """Return keys and values (H, B, S, d_h) of up to ``max_past`` tokens of the past and of ``x``.

    ``project`` maps tokens (B, T, d) to keys and values. Inference also returns both as the past.
    """
    keys, values = project(x)
    if isinstance(past, KeyValues):
        if not inference:
            raise ValueError(
                "`past` holds keys and values, from which training learns nothing: a layer in "
                ".eval() under torch.no_grad() made it; stay in that mode, or read the earlier "
                "text again in training"
            )
        extended = past.extended(keys, values)
        return extended.keys, extended.values, extended
    if past is not None:
        # projected apart, which avoids the costly and useless gradient of the past itself
        earlier_keys, earlier_values = project(past.last(max_past).hidden)
        keys = torch.cat([earlier_keys, keys], dim=2)
        values = torch.cat([earlier_values, values], dim=2)
    keys, values = keys.contiguous(), values.contiguous()
    return keys, values, KeyValues.wrap(keys, values) if inference else None


def check_sizes(least: int, **sizes: int) -> None:
    """Refuse arguments that are below ``least``."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"`{name}` is {size}: it must be at least {least}")


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Refuse a number of heads that does not divide the width."""
    check_sizes(1, embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")


def check_past(x: Tensor, past: Any) -> None:
    """Refuse a segment that is not (B, T, d), or whose past has other streams."""
    if x.dim() != 3 or x.size(1) == 0:
        raise ValueError(f"`x` is {tuple(x.shape)}: give a segment (B, T, d) of one token or more")
    if past is not None and past.streams != len(x):
        raise ValueError(
            f"`past` has {past.streams} streams and `x` has {len(x)}: a past belongs to its "
            "streams; begin other text with None"
        )


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Map (B, T, H·d_h) to (H, B, T, d_h), a view."""
    return x.unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)


def scaled_heads(query: Tensor, head_dim: int) -> Tensor:
    """Divide queries (B, T, H·d_h) by √d_h, and split them: (H, B, T, d_h)."""
    return split_heads(query / math.sqrt(head_dim), head_dim).contiguous()


def merge_heads(x: Tensor) -> Tensor:
    """Map (H, B, T, d_h) to (B, T, H·d_h)."""
    return x.permute(1, 2, 0, 3).flatten(2)
