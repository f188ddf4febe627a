"""A layer of all-attention with its positions and its memory, to be used alone.

Shapes: B streams, T tokens of a segment, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.key_value_cache import LayerState
from fairseq_plugins.segment_language_model.layer import SegmentLayer
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedRelativeKeys,
)


class AllAttentionBlock(SegmentLayer):
    """One softmax over up to ``span`` tokens before each token and over persistent vectors.

    Section 4. Each head learns how far it looks. In the published models all blocks share their
    ``positions``.

    Args:
        embed_dim: d.
        num_heads: must divide d.
        persistent_vectors: pairs of keys and values a head.
        span: how many tokens before its own a token may attend to.
        dropout: of attention weights and of what the layer adds.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        persistent_vectors: int,
        span: int,
        dropout: float = 0.0,
    ) -> None:
        attention = AllAttention(
            embed_dim,
            num_heads,
            Window(1, span),
            SharedRelativeKeys(),
            dropout,
            num_persistent=persistent_vectors,
            span=AdaptiveSpan(num_heads, span),
        )
        super().__init__(embed_dim, attention, None, nn.Dropout(dropout))
        self.positions = LearnedRelativePositions(span, embed_dim // num_heads)
        self.span = span

    def forward(self, x: Tensor, memory: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """Return the output (B, T, d) for a segment (B, T, d), and what the next one attends to."""
        self.self_attn.check_segment(x, memory)
        encoding = self.positions(x.size(1) + self.span - 1, x.device)
        y, memory = super().forward(x, self.self_attn.project_positions(encoding), memory)
        return y, memory.last(self.span)
