"""One layer of a segment language model: attention, then perhaps a position-wise sublayer.

Shapes: B streams, T tokens of a segment, d model width, f inner width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .segment_memory import LayerState


class FeedForward(nn.Module):
    """Two affine maps with a ReLU between (all-attention, equation 5).

    Args:
        embed_dim: d.
        inner_dim: f.
        dropout: probability of dropping an inner activation.
    """

    def __init__(self, embed_dim: int, inner_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        return self.fc2(F.dropout(F.relu(self.fc1(x)), self.dropout, self.training))


class SegmentLayer(nn.Module):
    """``LN(x + attention(x))``, then ``LN(x + feed_forward(x))`` where there is one (equation 6).

    Args:
        embed_dim: d.
        attention: maps ``(x, positions, memory)`` to ``(y, state)``, x and y (B, T, d).
        feed_forward: any map of (B, T, d) to itself, or None for a layer of attention alone.
    """

    def __init__(
        self, embed_dim: int, attention: nn.Module, feed_forward: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.feed_forward = feed_forward
        self.final_layer_norm = nn.LayerNorm(embed_dim) if feed_forward is not None else None

    def forward(
        self, x: Tensor, positions: Tensor, memory: LayerState | None = None
    ) -> tuple[Tensor, LayerState]:
        """Return the layer's output (B, T, d) and its state of memory and segment together."""
        attended, state = self.self_attn(x, positions, memory)
        x = self.self_attn_layer_norm(x + attended)
        if self.feed_forward is not None:
            x = self.final_layer_norm(x + self.feed_forward(x))
        return x, state
