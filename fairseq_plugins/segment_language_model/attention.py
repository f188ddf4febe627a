"""Attention by content and by distance: the equations, the module, and the layer around it.

Transformer-XL, section 3.3 and appendix B; all-attention, section 3.

Shapes: B streams, H heads, T tokens of the segment (queries), S keys (earlier tokens and segment),
D distances, F distances beyond a clamp, G sets of relative keys (1 for all heads, or H), W
distances with a bias, d model width, d_h = d / H.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention_blocks import (
    UNLIMITED,
    Clamped,
    Window,
    hidden_by_window,
    rel_shift,
    rows_by_distance,
)
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from fairseq_plugins.segment_language_model.key_value_cache import (
    HiddenStates,
    KeyValueCache,
    LayerState,
)


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
                of_first = by_distance[..., :1].expand(-1, -1, -1, far)
                by_distance = torch.cat([of_first, by_distance], dim=-1)
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


def check_kernel(kernel: str) -> None:
    """Refuse an unknown kernel."""
    if kernel not in KERNELS:
        raise ValueError(f"`kernel` is {kernel!r}: there are {', '.join(KERNELS)}")


def choose_kernel(kernel: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the kernel; torch.compile and torch.export need the plain one."""
    return KERNELS["plain" if torch.compiler.is_compiling() else kernel]


class PositionBiases(nn.Module):
    """The vectors u and v of Transformer-XL (section 3.3, terms c and d), each (H, d_h)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.v = nn.Parameter(torch.zeros(num_heads, head_dim))


class RelativeAttention(nn.Module):
    """Multi-head attention over a window of earlier tokens.

    The score of query i for key j is ``(q_i + u)·k_j + (q_i + v)·p_{i-j}``, divided by √d_h. With
    p = W_kR R it is Transformer-XL's score (section 3.3), without u and v all-attention's
    (equation 3). By itself::

        keys, biases = RelativeKeyProjection(512, 8), PositionBiases(8, 64)
        attention = RelativeAttention(512, 8, Window(0, 255), keys, biases)
        encoding = SinusoidalRelativePositions(512)(x.size(1) - 1)
        y, _ = attention(x, attention.project_positions(encoding))  # x, y: (B, T, 512)

    ``position_projection`` maps the encoding of the distances to p, (G, D, d_h). Layers may share
    the ``biases``, u and v.
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
        if window.farthest < window.nearest:
            raise ValueError(f"the window {window} is empty: nothing would be left to attend to")
        if embed_dim % num_heads:
            raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")
        check_kernel(kernel)
        self.num_heads = num_heads
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

    def project_positions(self, encoding: Tensor | Clamped | None) -> Tensor | Clamped | None:
        """Return p (G, D, d_h), given the encoding of distances that fall to -1; or None."""
        if self.position_projection is None:
            return None
        if isinstance(encoding, Clamped):
            return Clamped(self.position_projection(encoding.rows))
        return self.position_projection(encoding)

    def position_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that :meth:`project_positions` depends on."""
        return [] if self.position_projection is None else [*self.position_projection.parameters()]

    def max_past(self, positions: Any) -> int:
        """Return how many tokens before a segment attention can use; a subclass may limit them."""
        return UNLIMITED

    def forward(
        self, x: Tensor, positions: Tensor | Clamped | None = None, past: LayerState | None = None
    ) -> tuple[Tensor, LayerState | None]:
        """Attend from each token of the segment ``x`` (B, T, d).

        ``positions`` come from :meth:`project_positions` and reach at least to the first key.
        Returns (B, T, d); and, in inference (evaluation mode without gradients), the keys and
        values of earlier tokens and segment, else None.
        """
        if positions is None and self.position_projection is not None:
            raise ValueError(
                "`positions` is None: pass the result of project_positions for the distances"
            )
        self.check_segment(x, past)
        content_query, position_query = self.project_queries(x)
        keys, values, cache = self.project_keys(x, past)
        attended, _ = self.attend(
            content_query, keys, values, positions, self.window, position_query=position_query
        )
        return self.out_proj(merge_heads(attended)), cache

    def check_segment(self, x: Tensor, past: LayerState | None) -> None:
        """Refuse a segment that is not (B, T, d), or that has other streams than its past."""
        embed_dim = self.num_heads * self.head_dim
        if x.dim() != 3 or x.size(1) == 0 or x.size(2) != embed_dim:
            raise ValueError(
                f"`x` is {tuple(x.shape)}: give a segment (B, T, {embed_dim}) of one token or more"
            )
        if past is not None and getattr(past, "streams", len(x)) != len(x):
            raise ValueError(
                f"`past` has {past.streams} streams and `x` has {len(x)}: a memory belongs to its "
                "streams; begin other text with None"
            )

    def project_queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, d) to content and position queries (H, B, T, d_h); None if they are equal."""
        query = self.q_proj(x)
        if self.biases is None:
            return self._scaled(query), None
        return (
            self._scaled(query + self.biases.u.flatten().to(query.dtype)),
            self._scaled(query + self.biases.v.flatten().to(query.dtype)),
        )

    def project_keys(
        self, x: Tensor, past: LayerState | None, max_past: int = UNLIMITED, heads: Any = None
    ) -> tuple[Tensor, Tensor, KeyValueCache | None]:
        """Return keys and values (H, B, S, d_h) of up to ``max_past`` earlier tokens and ``x``.

        Inference also returns their cache. ``heads`` is for :meth:`project_heads`.
        """
        # the first pass of activation checkpointing is training, though it has no gradients
        inference = not (self.training or torch.is_grad_enabled())
        keys, values = (self.project_heads(p, x, heads) for p in (self.k_proj, self.v_proj))
        if isinstance(past, KeyValueCache):
            if not inference:
                raise ValueError(
                    "`past` holds keys and values, from which `k_proj` and `v_proj` learn nothing: "
                    "a layer in .eval() under torch.no_grad() made it, so stay in that mode, or "
                    "read the earlier text again in training"
                )
            cache = past.extended(keys, values)
            return cache.keys, cache.values, cache
        if isinstance(past, HiddenStates):
            # projected apart, which avoids the costly and useless gradient of the past itself
            seen = past.hidden[:, max(0, past.length - max_past) :]
            keys, values = (
                torch.cat([self.project_heads(projection, seen, heads), own], dim=2)
                for projection, own in ((self.k_proj, keys), (self.v_proj, values))
            )
        elif past is not None:
            raise ValueError(
                f"`past` is a {type(past).__name__}: give HiddenStates, or the keys and values "
                "that the segment before returned"
            )
        keys, values = keys.contiguous(), values.contiguous()
        if not inference or torch.compiler.is_compiling():
            return keys, values, None
        return keys, values, KeyValueCache.of(keys, values, max_past)

    def project_heads(self, projection: nn.Linear, x: Tensor, heads: Any = None) -> Tensor:
        """Map (B, T, d) to keys or values (H, B, T, d_h); a subclass may choose some heads."""
        return split_heads(projection(x), self.head_dim)

    def attend(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Call the kernel, with dropout in training; see :func:`plain_attention`."""
        dropout = self.dropout if self.training else 0.0
        return choose_kernel(self.kernel)(*arguments, dropout=dropout, **options)

    def _scaled(self, query: Tensor) -> Tensor:
        return split_heads(query / math.sqrt(self.head_dim), self.head_dim).contiguous()


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Map (B, T, H·d_h) to (H, B, T, d_h), a view."""
    return x.unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)


def merge_heads(x: Tensor) -> Tensor:
    """Map (H, B, T, d_h) to (B, T, H·d_h)."""
    return x.permute(1, 2, 0, 3).flatten(2)


class FeedForward(nn.Module):
    """Two affine maps, with a ReLU and dropout between them (all-attention, equation 5)."""

    def __init__(self, embed_dim: int, inner_dim: int, dropout: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        return self.fc2(self.dropout(F.relu(self.fc1(x), inplace=True)))


class SegmentLayer(nn.Module):
    """``LN(x + attention(x))``, then ``LN(x + sublayer(x))`` for each further sublayer.

    All-attention, equation 6; Transformer-XL, section 3.3. With ``normalize_before`` it is
    ``x + sublayer(LN(x))``, and the states of earlier segments are normalised too.

    ``feed_forward`` maps (B, T, d) to itself; so does ``added_sublayer``, after it or ``parallel``
    to it. ``dropout`` acts on each sublayer's output. A sublayer whose ``takes_padding`` is true
    also gets the padding mask.
    """

    def __init__(
        self,
        embed_dim: int,
        attention: RelativeAttention,
        feed_forward: nn.Module | None,
        dropout: nn.Module,
        normalize_before: bool = False,
        added_sublayer: nn.Module | None = None,
        layer_norm_epsilon: float = 1e-5,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        norm = functools.partial(nn.LayerNorm, embed_dim, layer_norm_epsilon)
        self.self_attn_layer_norm = norm()
        self.feed_forward = feed_forward
        self.final_layer_norm = norm() if feed_forward is not None else None
        self.added_sublayer = added_sublayer
        after = added_sublayer is not None and not parallel
        self.added_layer_norm = norm() if after else None
        self.dropout = dropout
        self.normalize_before = normalize_before

    def forward(
        self,
        x: Tensor,
        positions: Any,
        past: LayerState | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """Map the segment (B, T, d) to (B, T, d), and return the state that the next one reads.

        ``positions`` come from the attention's ``project_positions``; ``padding_mask`` (B, T) is
        true for padding.
        """
        entering, entering_past = x, past
        if self.normalize_before:
            entering = self.self_attn_layer_norm(x)
            if isinstance(past, HiddenStates):
                normalised = self.self_attn_layer_norm(past.hidden)
                entering_past = HiddenStates(normalised, past.max_length)
        attended, state = self.self_attn(entering, positions, entering_past)
        if state is None:
            # the layer's input, so that projections and normalisation learn from the past too
            earlier = None if past is None else past.hidden
            state = HiddenStates(x, self.self_attn.max_past(positions), earlier)
        x = self._add(x, attended, self.self_attn_layer_norm)
        if self.final_layer_norm is not None:
            entering = self.final_layer_norm(x) if self.normalize_before else x
            added = _apply(self.feed_forward, entering, padding_mask)
            if self.added_sublayer is not None and self.added_layer_norm is None:
                added = added + _apply(self.added_sublayer, entering, padding_mask)
            x = self._add(x, added, self.final_layer_norm)
        if self.added_layer_norm is not None:
            entering = self.added_layer_norm(x) if self.normalize_before else x
            added = _apply(self.added_sublayer, entering, padding_mask)
            x = self._add(x, added, self.added_layer_norm)
        return x, state

    def _add(self, x: Tensor, added: Tensor, layer_norm: nn.Module) -> Tensor:
        if self.normalize_before:
            return x + self.dropout(added)
        return layer_norm(x + self.dropout(added))


def _apply(sublayer: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    if getattr(sublayer, "takes_padding", False):
        return sublayer(x, padding_mask)
    return sublayer(x)
