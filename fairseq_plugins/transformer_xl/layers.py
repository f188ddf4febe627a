"""Layers that only Transformer-XL has: a standalone block, and dropout for small data sets.

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention import (
    FeedForward,
    PositionBiases,
    RelativeAttention,
    SegmentLayer,
)
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.key_value_cache import LayerState
from fairseq_plugins.segment_language_model.positions import (
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)


class TransformerXLBlock(SegmentLayer):
    """Attention to a segment and to ``mem_len`` tokens before it, then a feed-forward sublayer.

    Section 3.3. In the published models all blocks share one ``self_attn.biases``. ``dropout`` acts
    on each sublayer's output and on the inner activations.
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
        """Map a segment (B, T, d) to (B, T, d), and return the memory for the next one."""
        encoding = self.positions(x.size(1) + self.mem_len - 1, x.device)
        y, memory = super().forward(x, self.self_attn.project_positions(encoding), memory)
        return y, memory.last(self.mem_len)


class LockedDropout(nn.Module):
    """Dropout, with probability p, of the same elements at every token of a segment.

    Gal and Ghahramani 2016; Transformer-XL on Penn Treebank (section 4.1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(x.size(0), 1, x.size(2), device=x.device) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)


class WordDropout(nn.Module):
    """Dropout, with probability p, of whole words, everywhere in the batch.

    Merity, Keskar and Socher 2017 (AWD-LSTM), section 4. ``num_symbols`` is V.
    """

    def __init__(self, p: float, num_symbols: int) -> None:
        super().__init__()
        self.p = p
        self.num_symbols = num_symbols

    def forward(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        """Map the embeddings (B, T, d) of ``tokens`` (B, T) to (B, T, d)."""
        if not self.training or self.p == 0:
            return embedded
        kept = torch.rand(self.num_symbols, device=embedded.device) >= self.p
        return embedded * kept[tokens].unsqueeze(-1).to(embedded.dtype) / (1 - self.p)
