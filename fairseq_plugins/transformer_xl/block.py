"""A layer of Transformer-XL with its positions and its memory, to be used alone.

Shapes: B streams, T tokens of a segment, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.key_value_cache import LayerState
from fairseq_plugins.segment_language_model.layer import FeedForward, SegmentLayer
from fairseq_plugins.segment_language_model.positions import (
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)


class TransformerXLBlock(SegmentLayer):
    """Attention to a segment and to ``mem_len`` tokens before it, then a feed-forward sublayer.

    Section 3.3. In the published models all blocks share their ``self_attn.biases``.

    Args:
        embed_dim: d; even.
        num_heads: must divide d.
        ffn_dim: inner width of the feed-forward sublayer.
        mem_len: how many tokens before the segment are remembered.
        dropout: of what each sublayer adds, and of the inner activations.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, ffn_dim: int, mem_len: int, dropout: float = 0.0
    ) -> None:
        if mem_len < 0:
            raise ValueError(f"`mem_len` is {mem_len}: it must be at least 0")
        positions = SinusoidalRelativePositions(embed_dim)
        biases = PositionBiases(num_heads, embed_dim // num_heads)
        projection = RelativeKeyProjection(embed_dim, num_heads)
        attention = RelativeAttention(embed_dim, num_heads, Window(0), projection, biases)
        feed_forward = FeedForward(embed_dim, ffn_dim, nn.Dropout(dropout))
        super().__init__(embed_dim, attention, feed_forward, nn.Dropout(dropout))
        self.mem_len = mem_len
        self.positions = positions

    def forward(self, x: Tensor, memory: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """Return the output (B, T, d) for a segment (B, T, d), and what the next one attends to."""
        self.self_attn.check_segment(x, memory)
        encoding = self.positions(x.size(1) + self.mem_len - 1, x.device)
        y, memory = super().forward(x, self.self_attn.project_positions(encoding), memory)
        return y, memory.last(self.mem_len)
