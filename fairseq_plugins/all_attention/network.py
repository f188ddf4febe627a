"""All-attention in plain PyTorch: a block, and the network of section 4.

Sukhbaatar et al. 2019 (arXiv:1907.01470). Shapes: B streams, T tokens of a segment, d model width.
"""

from __future__ import annotations

import functools

from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import AllAttention, group_heads
from fairseq_plugins.segment_language_model.attention import check_sizes
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.network import SegmentLayer, SegmentNetwork
from fairseq_plugins.segment_language_model.positions import LearnedRelativePositions


class AllAttentionNetwork(SegmentNetwork):
    """Layers of one softmax over persistent vectors and up to ``span`` tokens before each token.

    ``y, past = network(x, past)`` with x, y (B, T, d). Each head learns its span; all heads and
    layers share the position vectors. ``dropout`` acts on attention weights and on the attention's
    output; ``kernel`` is "fast", or "plain" for higher derivatives and torch.func.
    """

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        persistent_vectors: int,
        span: int,
        dropout: float = 0.0,
        kernel: str = "fast",
    ) -> None:
        check_sizes(1, num_layers=num_layers, num_heads=num_heads)
        check_sizes(0, persistent_vectors=persistent_vectors)
        layers = []
        for _ in range(num_layers):
            attention = AllAttention(
                embed_dim,
                num_heads,
                Window(1, span),
                dropout,
                num_persistent=persistent_vectors,
                span=AdaptiveSpan(num_heads, span),
                kernel=kernel,
            )
            layers.append(SegmentLayer(embed_dim, attention, None, nn.Dropout(dropout)))
        positions = LearnedRelativePositions(span, embed_dim // num_heads)
        super().__init__(layers, span, positions, share=group_heads)

    def span_penalty(self) -> Tensor:
        """Return the sum of the layers' mean spans, in tokens (arXiv:1905.07799, equation 9)."""
        return sum(span.penalty() for span in learned_spans(self))  # type: ignore[return-value]


class AllAttentionBlock(AllAttentionNetwork):
    """One layer of :class:`AllAttentionNetwork`, called like the network.

    In the published models all blocks share one ``positions``.
    """

    __init__ = functools.partialmethod(AllAttentionNetwork.__init__, 1)

    @property
    def self_attn(self) -> AllAttention:
        """Return the block's attention."""
        return self.layers[0].self_attn


def learned_spans(network: SegmentNetwork) -> list[AdaptiveSpan]:
    """Return the learned spans of a network, layer by layer; [] if spans are fixed."""
    spans = [getattr(layer.self_attn, "span", None) for layer in network.layers]
    return [span for span in spans if span is not None]
