"""Multi-head attention by content and by distance, with persistent vectors.

All-attention, sections 3 and 4. Shapes: B streams, H heads, T tokens of the segment, M tokens of
the memory, S = M + T, D distances, N persistent vectors, d model width, d_h = d / H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .persistent_attention import PersistentVectors
from .segment_memory import LayerState
from .window_attention import Window, window_attention


class RelativeAttention(nn.Module):
    """Multi-head attention over a window of earlier tokens and over persistent vectors.

    The score of query t for the token at distance x is ``q_t·(k_{t-x} + p_x) / √d_h`` (equation 3),
    for a persistent vector ``q_t·m_k / √d_h`` (equation 12); one softmax goes over both (equation
    13). Projections have no biases. A query that sees nothing at all gets zero.

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
            positions: vectors of the distances S - 1 down to -1, (D, d_h), D = S + 1.
            memory: this layer's state of the M tokens before.

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

        if self.persistent is None:
            none = query.new_empty(self.num_heads, 0, self.head_dim)
            persistent = (none, none)
        else:
            persistent = self.persistent()
        dropout = self.dropout if self.training else 0.0
        attended = window_attention(
            query, keys, values, positions, *persistent, self.window, dropout
        )
        # (H, B, T, d_h) -> (B, T, H, d_h) -> (B, T, d)
        return self.out_proj(attended.permute(1, 2, 0, 3).flatten(2)), state

    def _split_heads(self, x: Tensor) -> Tensor:
        # (B, T, d) -> (B, T, H, d_h) -> (H, B, T, d_h)
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(2, 0, 1, 3).contiguous()
