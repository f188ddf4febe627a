"""Transformer-XL in plain PyTorch: a block, and the network of section 3.

Dai et al. 2019 (arXiv:1901.02860). Shapes: B streams, T tokens of a segment, d model width.
"""

from __future__ import annotations

import functools

from torch import nn

from fairseq_plugins.segment_language_model.attention import (
    PositionBiases,
    RelativeAttention,
    check_heads,
    check_sizes,
)
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.network import (
    FeedForward,
    SegmentLayer,
    SegmentNetwork,
)
from fairseq_plugins.segment_language_model.positions import (
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)


class TransformerXL(SegmentNetwork):
    """Layers of attention to a segment and ``mem_len`` tokens before it, and of feed-forward.

    ``y, past = network(x, past)`` with x, y (B, T, d). All layers share u and v. ``dropout`` acts
    on each sublayer's output and on the inner activations; ``kernel`` is "fast", or "plain" for
    higher derivatives and torch.func.
    """

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        mem_len: int,
        dropout: float = 0.0,
        kernel: str = "fast",
    ) -> None:
        check_heads(embed_dim, num_heads)
        check_sizes(1, num_layers=num_layers, ffn_dim=ffn_dim)
        layers = []
        for number in range(num_layers):
            # the other layers use those of the first
            biases = None if number else PositionBiases(num_heads, embed_dim // num_heads)
            projection = RelativeKeyProjection(embed_dim, num_heads)
            attention = RelativeAttention(
                embed_dim, num_heads, Window(0), projection, biases, kernel=kernel
            )
            feed_forward = FeedForward(embed_dim, ffn_dim, nn.Dropout(dropout))
            layers.append(SegmentLayer(embed_dim, attention, feed_forward, nn.Dropout(dropout)))
        super().__init__(layers, mem_len, SinusoidalRelativePositions(embed_dim))


class TransformerXLBlock(TransformerXL):
    """One layer of :class:`TransformerXL`, called like the network.

    In the published models all blocks share ``self_attn.biases.u`` and ``v``.
    """

    __init__ = functools.partialmethod(TransformerXL.__init__, 1)

    @property
    def self_attn(self) -> RelativeAttention:
        """Return the block's attention."""
        return self.layers[0].self_attn
