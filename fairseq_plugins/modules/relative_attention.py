"""Attention to a window of earlier tokens, by content and by distance, and to persistent vectors.

All-attention, equations 3, 4, 12 and 13. Shapes: B streams, H heads, T queries (the segment),
S keys (memory and segment), D distances, N persistent vectors, d model width, d_h = d / H.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .persistent_attention import PersistentVectors
from .segment_memory import LayerState

# Queries are taken in blocks, each with just the keys that its window reaches: the wider the block
# the more masked scores, the narrower the more small products.
QUERY_BLOCK = 128


class Window(NamedTuple):
    """The distances that a query sees: ``nearest`` 0 includes its own token, 1 starts before it."""

    nearest: int
    farthest: int


def align_by_distance(scores: Tensor, num_keys: int) -> Tensor:
    """Turn scores by distance into scores by key.

    Args:
        scores: (…, T, S + 1); column c of query i is its score for the distance of key i + c to
            the last query, that is, distances fall from left to right.
        num_keys: S.

    Returns:
        (…, T, S), a view: entry (i, j) is entry (i, T - 1 - i + j) of ``scores``. In memory these
        lie S apart from row to row, which is why no copy is needed.
    """
    *batch, queries, columns = scores.shape
    flat = scores.reshape(*batch, queries * columns)
    return flat.narrow(-1, queries - 1, queries * num_keys).view(*batch, queries, num_keys)


def hidden_by_window(offset: int, queries: int, keys: int, window: Window, like: Tensor) -> Tensor:
    """Return which keys are outside the window: bool (T, S), True where hidden.

    ``offset`` is the distance between the first query and the first key.
    """
    rows = torch.arange(offset, offset + queries, device=like.device).unsqueeze(1)
    distance = rows - torch.arange(keys, device=like.device)
    return (distance < window.nearest) | (distance > window.farthest)


class RelativeAttention(nn.Module):
    """Multi-head attention over a window of earlier tokens and over persistent vectors.

    The score of query t for the token at distance x is ``q_t·(k_{t-x} + p_x) / √d_h``, for a
    persistent vector ``q_t·m_k / √d_h``; one softmax goes over both (equation 13). Projections have
    no biases. A query that sees nothing at all gets zero.

    Args:
        embed_dim: d.
        num_heads: H; must divide d.
        window: the distances that a query sees.
        dropout: probability of dropping an attention weight.
        num_persistent: N, 0 for none.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        dropout: float = 0.0,
        num_persistent: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.window = window
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.persistent = (
            PersistentVectors(num_persistent, num_heads, self.head_dim) if num_persistent else None
        )

    def forward(
        self, x: Tensor, positions: Tensor, memory: LayerState | None = None
    ) -> tuple[Tensor, LayerState]:
        """Attend from each token of the segment.

        Args:
            x: the segment, (B, T, d).
            positions: vectors of the distances from the farthest down to -1, (D, d_h); D reaches
                at least the farthest distance that any query sees.
            memory: this layer's state of the tokens before.

        Returns:
            the attended values (B, T, d), and the state of memory and segment together.
        """
        query = self._split_heads(self.q_proj(x)) / math.sqrt(self.head_dim)
        if memory is not None and len(memory) == 2:
            keys = torch.cat([memory[0], self._split_heads(self.k_proj(x))], dim=-2)
            values = torch.cat([memory[1], self._split_heads(self.v_proj(x))], dim=-2)
            state: LayerState = (keys, values)
        else:
            context = x if memory is None else torch.cat([memory[0], x], dim=1)
            keys = self._split_heads(self.k_proj(context))
            values = self._split_heads(self.v_proj(context))
            state = (context,) if torch.is_grad_enabled() else (keys, values)

        persistent = None if self.persistent is None else self.persistent()
        remembered = keys.size(2) - x.size(1)
        blocks = [
            self._attend(block, keys, values, positions, persistent, remembered + start)
            for start, block in zip(
                range(0, x.size(1), QUERY_BLOCK), query.split(QUERY_BLOCK, dim=2), strict=True
            )
        ]
        # (H, B, T, d_h) -> (B, T, H, d_h) -> (B, T, d)
        attended = torch.cat(blocks, dim=2).permute(1, 2, 0, 3).flatten(2)
        return self.out_proj(attended), state

    def _split_heads(self, x: Tensor) -> Tensor:
        # (B, T, d) -> (B, T, H, d_h) -> (H, B, T, d_h): heads first, since persistent vectors are
        # the same for all streams and then meet each head in one product
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(2, 0, 1, 3).contiguous()

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        persistent: tuple[Tensor, Tensor] | None,
        own: int,
    ) -> Tensor:
        """Attend from a block of T queries, the first of which is token ``own`` of the keys.

        Returns (H, B, T, d_h).
        """
        heads, streams, queries, _ = query.shape
        first = max(0, own - self.window.farthest)
        num_keys = max(0, own + queries - self.window.nearest - first)
        offset = own - first
        scores = []
        hidden = None
        if num_keys > 0:
            keys = keys.narrow(2, first, num_keys)
            values = values.narrow(2, first, num_keys)
            # rows for the distances offset + T - 1 (last query, first key) and S fewer, downwards
            top = positions.size(0) - 1 - (offset + queries)
            by_distance = query @ positions.narrow(0, top, num_keys + 1).t()
            # (H, B, T, d_h) x (H, B, S, d_h) -> (H, B, T, S)
            by_key = query @ keys.transpose(-1, -2) + align_by_distance(by_distance, num_keys)
            hidden = hidden_by_window(offset, queries, num_keys, self.window, like=query)
            scores.append(by_key.masked_fill_(hidden, torch.finfo(by_key.dtype).min))
        if persistent is not None:
            # (H, B, T, d_h) -> (H, B·T, d_h) x (H, N, d_h) -> (H, B, T, N)
            by_vector = query.flatten(1, 2) @ persistent[0].transpose(-1, -2)
            scores.append(by_vector.unflatten(1, (streams, queries)))
        if not scores:
            return torch.zeros_like(query)

        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
        if persistent is None:
            weights = weights.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
        weights = F.dropout(weights, self.dropout, self.training)
        attended = torch.zeros_like(query)
        if num_keys > 0:
            attended = weights[..., :num_keys] @ values
        if persistent is not None:
            # (H, B, T, N) -> (H, B·T, N) x (H, N, d_h) -> (H, B, T, d_h)
            read = weights[..., num_keys:].flatten(1, 2) @ persistent[1]
            attended = attended + read.unflatten(1, (streams, queries))
        return attended
