"""Attention by content and by distance: the equations, and the module.

Transformer-XL, section 3.3 and appendix B; all-attention, section 3.

Shapes: B streams, H heads, T tokens of the segment (queries), S keys (earlier tokens and segment),
D distances, F distances beyond a clamp, G sets of relative keys (1 for all heads, or H), W
distances with a bias, d model width, d_h = d / H.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention_blocks import (
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

    The score of query t for the key at distance x is ``c_t·k_{t-x} + q_t·p_x + bias_x``, c the
    content query and q the position query (section 3.3, where c = q_i + u and q = q_i + v). All
    scores exist at once. Use it for torch.compile, higher derivatives, and devices on which the
    fast kernel was not measured.

    Args:
        query: content queries c, (H, B, T, d_h), divided by √d_h.
        keys: (H, B, S, d_h), the last T of them of the queries' own tokens.
        values: (H, B, S, d_h).
        rel_keys: p of the distances S - 1, or more, down to -1, (G, D, d_h), or :class:`Clamped`
            p of fewer; None for none.
        window: the distances that a query sees.
        dropout: probability of dropping a weight.
        position_query: q, (H, B, T, d_h), divided by √d_h; None where it is c.
        distance_bias: added to the scores at the distances that fall from ``window.farthest``,
            (H, W), -∞ allowed; nearer distances have none. It needs ``rel_keys``.
        return_lse: return the log-sum-exp of each query's scores, too.

    Returns:
        (H, B, T, d_h), zero for a query that sees nothing; and with ``return_lse``
        log Σ exp(score), (H, B, T), -∞ where there are no keys, else None.

    Raises:
        ValueError: there are too few relative keys, or a bias without any.
    """
    rel_keys = rows_by_distance(keys, rel_keys, distance_bias)
    position_query = query if position_query is None else position_query.to(query.dtype)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    num_queries, num_keys = query.size(2), keys.size(2)
    with torch.autocast(query.device.type, enabled=False):
        # (H, B, T, d_h) x (H, B, d_h, S) -> (H, B, T, S)
        scores = query @ keys.mT
        if rel_keys is not None:
            # the distances S - 1, or the clamp, to -1: (G, D, d_h) -> (G, S + 1 - F, d_h)
            rel_keys = rel_keys.to(query.dtype)[:, max(0, rel_keys.size(1) - num_keys - 1) :]
            far = num_keys + 1 - rel_keys.size(1)
            # (H, B, T, d_h) x (G, 1, d_h, S + 1 - F) -> (H, B, T, S + 1 - F)
            by_distance = position_query @ rel_keys.unsqueeze(1).mT
            if far > 0:
                # distances beyond the clamp have the score of the first: -> (H, B, T, S + 1)
                of_first = by_distance[..., :1].expand(-1, -1, -1, far)
                by_distance = torch.cat([of_first, by_distance], dim=-1)
            if distance_bias is not None:
                bias = _over_distances(distance_bias, window.farthest, num_keys)
                by_distance = by_distance + bias[:, None, None].to(query.dtype)
            # column S - 1 - x of a row is distance x -> column j is key j
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
    """Return biases (H, W) of distances that fall from ``farthest`` as (H, S + 1), S - 1 to -1."""
    beyond = num_keys - 1 - farthest  # distances that the window hides
    bias = distance_bias[:, max(0, -beyond) :]
    return F.pad(bias, (max(0, beyond), num_keys + 1 - max(0, beyond) - bias.size(1)))


# What computes attention: --attention-kernel.
KERNELS = {"fast": window_attention, "plain": plain_attention}


def check_kernel(kernel: str) -> None:
    """Raise ``ValueError`` for a kernel that is not one of ``KERNELS``."""
    if kernel not in KERNELS:
        raise ValueError(f"`kernel` is {kernel!r}: there are {', '.join(KERNELS)}")


class PositionBiases(nn.Module):
    """The vectors u and v of Transformer-XL (section 3.3, terms c and d), a pair for each head.

    Args:
        num_heads: H.
        head_dim: d_h.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.v = nn.Parameter(torch.zeros(num_heads, head_dim))


class RelativeAttention(nn.Module):
    """Multi-head attention over a window of earlier tokens.

    The score of query i for key j at distance i - j is ``(q_i + u)·k_j + (q_i + v)·p_{i-j}``,
    divided by √d_h. With p = W_kR R it is Transformer-XL's (section 3.3); without u and v that of
    Shaw et al. 2018 and of all-attention (equation 3). Projections have no biases. A query that
    sees nothing gets zero. By itself::

        keys, biases = RelativeKeyProjection(512, 8), PositionBiases(8, 64)
        attention = RelativeAttention(512, 8, Window(0, 255), keys, biases)
        terms = attention.distance_terms(SinusoidalRelativePositions(512)(x.size(1) - 1))
        y, _ = attention(x, terms)  # x, y: (B, T, 512)

    Args:
        embed_dim: d.
        num_heads: H; must divide d.
        window: the distances that a query sees.
        distance_table: maps the encoding of the distances to p, (G, D, d_h); None for scores that
            do not depend on the distance.
        biases: u and v, which several layers may share; None for none.
        dropout: probability of dropping an attention weight.
        kernel: a key of ``KERNELS``.

    Raises:
        ValueError: the window is empty, the heads do not divide the width, or there is no such
            kernel.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        distance_table: nn.Module | None = None,
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
        self.distance_table = distance_table
        self.biases = biases
        self.dropout = dropout
        self.kernel = kernel
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def distance_terms(self, encoding: Tensor | Clamped | None) -> Tensor | Clamped | None:
        """Return what the scores take from distances alone: p, (G, D, d_h), or None.

        Args:
            encoding: of the distances, falling to -1; see :mod:`.positions`. Of a
                :class:`Clamped` one, p is clamped, too.
        """
        if self.distance_table is None:
            return None
        if isinstance(encoding, Clamped):
            return Clamped(self.distance_table(encoding.rows))
        return self.distance_table(encoding)

    def distance_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that :meth:`distance_terms` depends on."""
        return [] if self.distance_table is None else list(self.distance_table.parameters())

    def reach(self, terms: Any) -> int:
        """Return how many tokens before a segment are worth keeping; a subclass may know."""
        return sys.maxsize

    def forward(
        self, x: Tensor, terms: Tensor | Clamped | None = None, past: LayerState | None = None
    ) -> tuple[Tensor, LayerState | None]:
        """Attend from each token of the segment.

        Args:
            x: the segment, (B, T, d).
            terms: what :meth:`distance_terms` returned for the distances to the first key, or more,
                down to -1; None without a ``distance_table``.
            past: this layer's state of earlier tokens, :class:`.HiddenStates` or keys and values.

        Returns:
            the attended values (B, T, d); and without gradients the keys and values of earlier
            tokens and segment, for the next one, else None.

        Raises:
            ValueError: there are no terms, or the past is something else.
        """
        if terms is None and self.distance_table is not None:
            raise ValueError("`terms` is None: give what distance_terms returns for the distances")
        content_query, position_query = self.project_queries(x)
        keys, values, cache = self.project_keys(x, past)
        attended, _ = self.attend(
            content_query, keys, values, terms, self.window, position_query=position_query
        )
        return self.out_proj(merge_heads(attended)), cache

    def project_queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, d) to content and position queries (H, B, T, d_h), None where u = v = 0."""
        query = self.q_proj(x)
        if self.biases is None:
            return self._scaled(query), None
        return (
            self._scaled(query + self.biases.u.flatten().to(query.dtype)),
            self._scaled(query + self.biases.v.flatten().to(query.dtype)),
        )

    def project_keys(
        self, x: Tensor, past: LayerState | None
    ) -> tuple[Tensor, Tensor, KeyValueCache | None]:
        """Return keys and values (H, B, S, d_h), and their cache where it is worth keeping."""
        keys, values = (split_heads(p(x), self.head_dim) for p in (self.k_proj, self.v_proj))
        if isinstance(past, KeyValueCache):
            cache = past.extended(keys, values)
            return cache.keys, cache.values, cache
        if isinstance(past, HiddenStates):
            # projected apart: the gradient of the past itself, which nobody wants, costs as much
            keys, values = (
                torch.cat([split_heads(projection(past.hidden), self.head_dim), own], dim=2)
                for projection, own in ((self.k_proj, keys), (self.v_proj, values))
            )
        elif past is not None:
            raise ValueError(
                f"`past` is a {type(past).__name__}: give HiddenStates, or the keys and values "
                "that the segment before returned"
            )
        keys, values = keys.contiguous(), values.contiguous()
        # with gradients the layer keeps its input in place of what is projected from it
        return keys, values, None if torch.is_grad_enabled() else KeyValueCache.of(keys, values)

    def attend(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the kernel does, weights dropped in training; see :func:`plain_attention`."""
        dropout = self.dropout if self.training else 0.0
        return KERNELS[self.kernel](*arguments, dropout=dropout, **options)

    def _scaled(self, query: Tensor) -> Tensor:
        # (B, T, d) -> (H, B, T, d_h)
        return split_heads(query / math.sqrt(self.head_dim), self.head_dim).contiguous()


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Map (B, T, H·d_h) to (H, B, T, d_h), a view."""
    # (B, T, H·d_h) -> (B, T, H, d_h) -> (H, B, T, d_h)
    return x.unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)


def merge_heads(x: Tensor) -> Tensor:
    """Map (H, B, T, d_h) to (B, T, H·d_h)."""
    # (H, B, T, d_h) -> (B, T, H, d_h) -> (B, T, H·d_h)
    return x.permute(1, 2, 0, 3).flatten(2)
