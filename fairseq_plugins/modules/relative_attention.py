"""Multi-head attention by content and by distance, with persistent vectors.

Transformer-XL, section 3.3; all-attention, sections 3 and 4. Shapes: B streams, H heads, T tokens
of the segment, M tokens of the memory, S = M + T, D distances, N persistent vectors, d model width,
d_h = d / H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .layer_states import HiddenStates, KeyValueCache, LayerState
from .persistent_attention import PersistentVectors
from .window_attention import Window, window_attention


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
    """Multi-head attention over a window of earlier tokens and over persistent vectors.

    The score of query i for key j at distance i - j is ``(q_i + u)·k_j + (q_i + v)·p_{i-j}``, for a
    persistent vector ``(q_i + u)·m_k``, each divided by √d_h; one softmax goes over all of them
    (all-attention, equation 13). With p = W_kR R it is Transformer-XL's (section 3.3), without u
    and v that of Shaw et al. 2018 and of all-attention (equation 3). Projections have no biases. A
    query that sees nothing at all gets zero.

    Args:
        embed_dim: d.
        num_heads: H; must divide d.
        window: the distances that a query sees.
        distance_table: maps the encoding of the distances to p, (G, D, d_h), G being 1 or H; None
            for scores that do not depend on the distance.
        biases: u and v, which several layers may share; None for none.
        dropout: probability of dropping an attention weight.
        num_persistent: N, 0 for none.

    Raises:
        ValueError: the window is empty.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        distance_table: nn.Module | None = None,
        biases: PositionBiases | None = None,
        dropout: float = 0.0,
        num_persistent: int = 0,
    ) -> None:
        super().__init__()
        if window.farthest < window.nearest:
            raise ValueError(f"the window {window} is empty: nothing would be left to attend to")
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.window = window
        self.distance_table = distance_table
        self.biases = biases
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.persistent = (
            PersistentVectors(num_persistent, num_heads, self.head_dim) if num_persistent else None
        )

    def forward(
        self, x: Tensor, table: Tensor | None, memory: LayerState | None = None
    ) -> tuple[Tensor, LayerState]:
        """Attend from each token of the segment.

        Args:
            x: the segment, (B, T, d).
            table: vectors of the distances S - 1, or more, down to -1, (G, D, d_h).
            memory: this layer's state of the M tokens before.

        Returns:
            the attended values (B, T, d), and the state of memory and segment together.
        """
        query = self.q_proj(x)
        if isinstance(memory, KeyValueCache):
            state: LayerState = memory.extended(
                self._split_heads(self.k_proj(x)), self._split_heads(self.v_proj(x))
            )
            keys, values = state.keys, state.values
        else:
            # projected apart: the gradient of the memory itself, which nobody wants, costs as much
            context = [x] if memory is None else [memory.hidden, x]
            keys, values = (
                torch.cat([self._split_heads(project(part)) for part in context], dim=2)
                for project in (self.k_proj, self.v_proj)
            )
            if torch.is_grad_enabled():
                state = HiddenStates(torch.cat(context, dim=1))
            else:
                state = KeyValueCache.of(keys, values)

        if self.biases is None:
            content_query = position_query = self._scaled(query)
        else:
            content_query = self._scaled(query + self.biases.u.flatten().to(query.dtype))
            position_query = self._scaled(query + self.biases.v.flatten().to(query.dtype))
        attended = window_attention(
            content_query,
            position_query,
            keys,
            values,
            table,
            None if self.persistent is None else self.persistent(),
            self.window,
            self.dropout if self.training else 0.0,
        )
        # (H, B, T, d_h) -> (B, T, H, d_h) -> (B, T, d)
        return self.out_proj(attended.permute(1, 2, 0, 3).flatten(2)), state

    def _scaled(self, query: Tensor) -> Tensor:
        # (B, T, d) -> (H, B, T, d_h)
        return self._split_heads(query / math.sqrt(self.head_dim)).contiguous()

    def _split_heads(self, x: Tensor) -> Tensor:
        # (B, T, d) -> (B, T, H, d_h) -> (H, B, T, d_h)
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(2, 0, 1, 3)
