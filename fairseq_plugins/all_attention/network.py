"""All-attention in plain PyTorch: the network of section 4, its ablations, and a block.

Sukhbaatar et al. 2019 (arXiv:1907.01470). Shapes: B streams, T tokens of a segment, d model width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import (
    ALL_HEADS,
    AdaptiveSpan,
    read_head_groups,
    whole_span,
)
from fairseq_plugins.all_attention.attention import (
    HEAD_SPLIT,
    IN_ATTENTION,
    JOINT,
    AllAttention,
)
from fairseq_plugins.all_attention.persistent_vectors import SoftmaxFeedForward
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.network import (
    Encoding,
    FeedForward,
    LayerSettings,
    SegmentNetwork,
)
from fairseq_plugins.segment_language_model.positions import LearnedRelativePositions
from fairseq_plugins.sizes import check_sizes

FEED_FORWARD = "ff-attn"
VARIANTS = (*IN_ATTENTION, FEED_FORWARD)


@dataclass(frozen=True)
class AllAttentionSettings(LayerSettings):
    """What differs from the model of section 4: its ablations (5.3), and adaptive span with FFN.

    Args:
        persistent: how attention uses persistent vectors, one of :data:`VARIANTS`.
        learned_spans: each head learns its span, instead of seeing all of it.
        span_ramp: R, in tokens.
        span_init: initial value of the spans, as a fraction of the largest one.
        span_epsilon: ε, added to the sum of masked weights.
        seen: the number of earlier tokens that a token sees; None for the span.
        ffn_dim: inner width of feed-forward sublayers; 0 for none.
    """

    persistent: str = JOINT
    learned_spans: bool = True
    span_ramp: int = 32
    span_init: float = 0.0
    span_epsilon: float = 0.0
    seen: int | None = None
    ffn_dim: int = 0


class AllAttentionNetwork(SegmentNetwork):
    """Layers of one softmax over persistent vectors and up to ``span`` tokens before each token.

    ``y, past = network(x, past)`` with x, y (B, T, d). Each head learns its span, to be kept in
    [0, 1] after each update (:meth:`.AdaptiveSpan.constrained`); all heads and layers share the
    position vectors.

    Args:
        dropout: rate of the dropout of the sublayers' outputs and, by default, of the rest.
        kernel: "fast", "sdpa", or "plain" for higher derivatives and torch.func.
        settings: what differs from the paper's model.
        positions: the vectors of the distances; None for new ones.
        mem_len: the number of tokens to keep as the past; ``span`` by default.
        options: further ones of :class:`.SegmentNetwork`.
    """

    kind = "AllAttentionNetwork"

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        persistent_vectors: int,
        span: int,
        dropout: float = 0.0,
        kernel: str = "fast",
        settings: AllAttentionSettings | None = None,
        positions: nn.Module | None = None,
        mem_len: int | None = None,
        **options: Any,
    ) -> None:
        check_sizes(1, num_layers=num_layers, num_heads=num_heads)
        check_sizes(0, persistent_vectors=persistent_vectors)
        settings = AllAttentionSettings() if settings is None else settings
        separate = settings.persistent == FEED_FORWARD
        context_heads = num_heads // 2 if settings.persistent == HEAD_SPLIT else num_heads
        attention_rate, inner_rate = (
            dropout if rate is None else rate
            for rate in (settings.attention_dropout, settings.activation_dropout)
        )
        layers = []
        for number in range(1, num_layers + 1):
            learned = settings.span_ramp, settings.span_init, settings.span_epsilon
            attention = AllAttention(
                embed_dim,
                num_heads,
                # a token's context excludes the token itself (section 4.3)
                Window(1, span if settings.seen is None else settings.seen),
                attention_rate,
                0 if separate else persistent_vectors,
                JOINT if separate else settings.persistent,
                AdaptiveSpan(context_heads, span, *learned) if settings.learned_spans else None,
                kernel,
            )
            feed_forward: nn.Module | None = None
            if separate:
                feed_forward = SoftmaxFeedForward(
                    persistent_vectors, embed_dim, attention_rate, kernel
                )
            elif settings.ffn_dim:
                inner_dropout = nn.Dropout(inner_rate)
                feed_forward = FeedForward(embed_dim, settings.ffn_dim, inner_dropout)
            parts = embed_dim, attention, feed_forward, nn.Dropout(dropout)
            layers.append(settings.build_layer(number, *parts))
        if positions is None:
            positions = LearnedRelativePositions(span, embed_dim // num_heads, settings.clamp_len)
        super().__init__(
            layers,
            span if mem_len is None else mem_len,
            positions,
            layer_norm=settings.build_final_norm(embed_dim),
            **options,
        )

    def encode_positions(self, farthest: int, x: Tensor) -> list[Encoding]:
        """Return the encoded distances, and each layer's heads by their spans."""
        ((distances, _), *_) = super().encode_positions(farthest, x)
        spans = learned_spans(self)
        groups = [ALL_HEADS] * len(self.layers)
        if spans and (self.compiled_length or torch.compiler.is_compiling()):
            # a compiled layer cannot depend on the values of its spans
            groups = [whole_span(span) for span in spans]
        elif spans:
            # of all layers at once, as a GPU's host waits for them
            groups = read_head_groups(spans)
        return [Encoding(distances, each) for each in groups]

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
