"""One layer of a segment language model: attention, then perhaps a position-wise sublayer.

Shapes: B streams, T tokens of a segment, d model width, f inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer_states import HiddenStates, LayerState
from .relative_attention import DistanceTerms


class FeedForward(nn.Module):
    """Two affine maps with a ReLU between (all-attention, equation 5).

    Args:
        embed_dim: d.
        inner_dim: f.
        dropout: acts on the inner activations.
    """

    def __init__(self, embed_dim: int, inner_dim: int, dropout: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


class SegmentLayer(nn.Module):
    """``LN(x + attention(x))``, then ``LN(x + feed_forward(x))`` where there is one.

    All-attention, equation 6; Transformer-XL, section 3.3. With ``normalize_before`` it is
    ``x + attention(LN(x))``, memory included, and ``x + feed_forward(LN(x))``.

    Args:
        embed_dim: d.
        attention: maps ``(x, terms, memory)`` to ``(y, state)``, x and y (B, T, d).
        feed_forward: any map of (B, T, d) to itself, or None for a layer of attention alone.
        dropout: acts on what each sublayer adds.
        normalize_before: normalise the input of each sublayer in place of the sum.
    """

    def __init__(
        self,
        embed_dim: int,
        attention: nn.Module,
        feed_forward: nn.Module | None,
        dropout: nn.Module,
        normalize_before: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.feed_forward = feed_forward
        self.final_layer_norm = nn.LayerNorm(embed_dim) if feed_forward is not None else None
        self.dropout = dropout
        self.normalize_before = normalize_before

    def forward(
        self, x: Tensor, terms: DistanceTerms, memory: LayerState | None = None
    ) -> tuple[Tensor, LayerState]:
        """Return the layer's output (B, T, d) and its state of memory and segment together."""
        if not self.normalize_before:
            attended, state = self.self_attn(x, terms, memory)
            x = self.self_attn_layer_norm(x + self.dropout(attended))
            if self.feed_forward is not None:
                x = self.final_layer_norm(x + self.dropout(self.feed_forward(x)))
            return x, state

        normalized = memory
        if isinstance(memory, HiddenStates):
            normalized = HiddenStates(self.self_attn_layer_norm(memory.hidden), memory.reach)
        attended, state = self.self_attn(self.self_attn_layer_norm(x), terms, normalized)
        if isinstance(state, HiddenStates):
            # the memory holds what enters the layer, so that the normalisation learns from it too
            hidden = x if memory is None else torch.cat([memory.hidden, x], dim=1)
            state = HiddenStates(hidden, state.reach)
        x = x + self.dropout(attended)
        if self.feed_forward is not None:
            x = x + self.dropout(self.feed_forward(self.final_layer_norm(x)))
        return x, state
