"""Transformer-XL in plain PyTorch: the network of section 3, its ablations, and a block.

Dai et al. 2019 (arXiv:1901.02860). Shapes: B streams, T tokens of a segment, d model width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fairseq_plugins.segment_language_model.attention import (
    PositionBiases,
    RelativeAttention,
)
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.network import (
    FeedForward,
    LayerSettings,
    SegmentNetwork,
)
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedAbsolutePositions,
    LearnedRelativeKeys,
    RelativeKeyProjection,
    SinusoidalAbsolutePositions,
    SinusoidalRelativePositions,
)
from fairseq_plugins.sizes import check_heads, check_sizes
from fairseq_plugins.transformer_xl.dropout import LockedDropout

# the published PyTorch code's standard deviation of initial weights
INIT_STD = 0.02
_ALL_EARLIER = Window(0)


@dataclass(frozen=True)
class TransformerXLSettings(LayerSettings):
    """What differs from the model of section 3: ablations (section 4.2), PTB's model, practice.

    Args:
        positions: one of :data:`POSITIONS`. Those of places exclude recurrence; sinusoids of places
            are for the caller to add (``absolute_positions.add_to_embeddings``).
        window: the distances that a token sees.
        segment: T, of which learned vectors of distances or places need to know.
        separate_biases: each layer has its own u and v.
        position_dropout: rate of the dropout of sinusoids.
        locked_dropout: drop the same elements at every token of a segment.
    """

    positions: str = "transformer-xl"
    window: Window = _ALL_EARLIER
    segment: int | None = None
    separate_biases: bool = False
    position_dropout: float = 0.0
    locked_dropout: bool = False


class Sizes(NamedTuple):
    """The sizes of a network on which its position encoding depends, too."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mem_len: int


class PositionEncoding(NamedTuple):
    """A choice of positions.

    ``encode`` builds the module that encodes distances or, if not ``relative``, places; ``project``
    builds each layer's map from the encoding to relative keys. ``biased`` attention has u and v.
    """

    relative: bool
    encode: Callable[[Sizes, TransformerXLSettings], nn.Module]
    project: Callable[[Sizes, TransformerXLSettings], nn.Module | None] = lambda sizes, settings: (
        None
    )
    biased: bool = False


def _sinusoids(sizes: Sizes, settings: TransformerXLSettings) -> nn.Module:
    rate = settings.position_dropout
    dropout = dropout_class(settings.locked_dropout)(rate) if rate else None
    return SinusoidalRelativePositions(sizes.embed_dim, settings.clamp_len, dropout)


def _shaw_keys(sizes: Sizes, settings: TransformerXLSettings) -> nn.Module:
    farthest = max(1, sizes.mem_len + _segment(settings) - 1)
    farthest = min(farthest, settings.clamp_len or farthest)
    return LearnedRelativeKeys(sizes.num_heads, farthest, sizes.embed_dim // sizes.num_heads)


def _segment(settings: TransformerXLSettings) -> int:
    if settings.segment is None:
        raise ValueError(f"`segment` is None: positions {settings.positions!r} need its length")
    return settings.segment


POSITIONS = {
    "transformer-xl": PositionEncoding(
        True,
        _sinusoids,
        lambda sizes, _: RelativeKeyProjection(sizes.embed_dim, sizes.num_heads),
        biased=True,
    ),
    "shaw": PositionEncoding(True, lambda _, settings: Distances(settings.clamp_len), _shaw_keys),
    "learned-absolute": PositionEncoding(
        False,
        lambda sizes, settings: LearnedAbsolutePositions(
            sizes.num_layers, _segment(settings), sizes.embed_dim
        ),
    ),
    "sinusoidal-absolute": PositionEncoding(
        False, lambda sizes, _: SinusoidalAbsolutePositions(sizes.embed_dim)
    ),
}


class TransformerXL(SegmentNetwork):
    """Layers of attention to a segment and ``mem_len`` tokens before it, and of feed-forward.

    ``y, past = network(x, past)`` with x, y (B, T, d). It begins with weights from N(0, 0.02), as
    the paper's models do.

    Args:
        ffn_dim: inner width of the feed-forward sublayers; 0 for none.
        dropout: rate of the dropout of each sublayer's output and of the inner activations.
        kernel: "fast", "sdpa", or "plain" for higher derivatives and torch.func.
        settings: what differs from the paper's model.
        init_std: standard deviation of the initial weights; None leaves those of the parts.
        options: further ones of :class:`.SegmentNetwork`.
    """

    kind = "TransformerXL"

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        mem_len: int,
        dropout: float = 0.0,
        kernel: str = "fast",
        settings: TransformerXLSettings | None = None,
        init_std: float | None = INIT_STD,
        **options: Any,
    ) -> None:
        check_heads(embed_dim, num_heads)
        check_sizes(1, num_layers=num_layers)
        check_sizes(0, ffn_dim=ffn_dim)
        settings = TransformerXLSettings() if settings is None else settings
        if settings.positions not in POSITIONS:
            known = ", ".join(POSITIONS)
            raise ValueError(f"`positions` is {settings.positions!r}: there are {known}")
        sizes = Sizes(num_layers, embed_dim, num_heads, mem_len)
        positions = POSITIONS[settings.positions]
        make_dropout = dropout_class(settings.locked_dropout)
        inner_rate = dropout if settings.activation_dropout is None else settings.activation_dropout
        layers = []
        for number in range(1, num_layers + 1):
            projection = positions.project(sizes, settings)
            # the other layers use those of the first
            biased = positions.biased and (number == 1 or settings.separate_biases)
            attention = RelativeAttention(
                embed_dim,
                num_heads,
                settings.window,
                projection,
                PositionBiases(num_heads, embed_dim // num_heads) if biased else None,
                settings.attention_dropout or 0.0,
                kernel,
            )
            feed_forward = None
            if ffn_dim:
                feed_forward = FeedForward(embed_dim, ffn_dim, make_dropout(inner_rate))
            parts = embed_dim, attention, feed_forward, make_dropout(dropout)
            layers.append(settings.build_layer(number, *parts))
        encoding = positions.encode(sizes, settings)
        super().__init__(
            layers,
            mem_len,
            positions=encoding if positions.relative else None,
            absolute_positions=None if positions.relative else encoding,
            layer_norm=settings.build_final_norm(embed_dim),
            **options,
        )
        if init_std is not None:
            initialise(self, init_std, init_std, memory_modules(self))


def dropout_class(locked: bool) -> type[nn.Module]:
    """Return the class of dropout for embeddings, sublayers and activations."""
    return LockedDropout if locked else nn.Dropout


def memory_modules(network: SegmentNetwork) -> set[nn.Module]:
    """Return the modules of a network's product-key memories, which have own initial values."""
    sublayers = [part for layer in network.layers for part in (layer.feed_forward, layer.memory)]
    return {
        module
        for sublayer in sublayers
        if sublayer is not None and not isinstance(sublayer, FeedForward)
        for module in sublayer.modules()
    }


def initialise(
    model: nn.Module, std: float, norm_std: float, excluded: Collection[nn.Module]
) -> None:
    """Draw weights from N(0, std), and those of norms from N(1, norm_std); biases become 0."""
    for module in model.modules():
        if module in excluded:
            continue
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, norm_std)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | LearnedRelativeKeys | LearnedAbsolutePositions):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, PositionBiases):
            nn.init.normal_(module.u, std=std)
            nn.init.normal_(module.v, std=std)


class TransformerXLBlock(TransformerXL):
    """One layer of :class:`TransformerXL`, called like the network.

    In the published models all blocks share ``self_attn.biases.u`` and ``v``.
    """

    __init__ = functools.partialmethod(TransformerXL.__init__, 1)

    @property
    def self_attn(self) -> RelativeAttention:
        """Return the block's attention."""
        return self.layers[0].self_attn
