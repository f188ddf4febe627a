"""One layer of a segment language model: attention, then position-wise sublayers.

Shapes: B streams, T tokens of a segment, d model width, f inner width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention import RelativeAttention
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates, LayerState


class FeedForward(nn.Module):
    """Two affine maps with a ReLU, then dropout, between (all-attention, equation 5)."""

    def __init__(self, embed_dim: int, inner_dim: int, dropout: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        return self.fc2(self.dropout(F.relu(self.fc1(x), inplace=True)))


class SegmentLayer(nn.Module):
    """``LN(x + attention(x))``, then ``LN(x + sublayer(x))`` for each further sublayer.

    All-attention, equation 6; Transformer-XL, section 3.3. With ``normalize_before`` it is
    ``x + sublayer(LN(x))``, states of earlier segments normalised too. A sublayer whose
    ``takes_padding`` is true also gets the padding mask.

    ``feed_forward`` is any map of (B, T, d) to itself, or None; ``dropout`` acts on what each
    sublayer adds. ``added_sublayer`` is another map after ``feed_forward``, or ``parallel`` to it.
    """

    def __init__(
        self,
        embed_dim: int,
        attention: RelativeAttention,
        feed_forward: nn.Module | None,
        dropout: nn.Module,
        normalize_before: bool = False,
        added_sublayer: nn.Module | None = None,
        layer_norm_epsilon: float = 1e-5,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        norm = functools.partial(nn.LayerNorm, embed_dim, layer_norm_epsilon)
        self.self_attn_layer_norm = norm()
        self.feed_forward = feed_forward
        self.final_layer_norm = norm() if feed_forward is not None else None
        self.added_sublayer = added_sublayer
        after = added_sublayer is not None and not parallel
        self.added_layer_norm = norm() if after else None
        self.dropout = dropout
        self.normalize_before = normalize_before

    def forward(
        self,
        x: Tensor,
        positions: Any,
        past: LayerState | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """Return the output (B, T, d), and this layer's state of earlier tokens and segment.

        ``x`` is the segment, (B, T, d); ``positions`` are from the attention's
        ``project_positions``; ``padding_mask`` (B, T) is true for padding.
        """
        attended, state = self._attend(x, positions, past)
        if state is None:
            # what enters the layer, so that projections and normalisation learn from the past too
            earlier = None if past is None else past.hidden
            state = HiddenStates(x, self.self_attn.max_past(positions), earlier)
        x = self._add(x, attended, self.self_attn_layer_norm)
        if self.final_layer_norm is not None:
            entering = self.final_layer_norm(x) if self.normalize_before else x
            added = _apply(self.feed_forward, entering, padding_mask)
            if self.added_sublayer is not None and self.added_layer_norm is None:
                added = added + _apply(self.added_sublayer, entering, padding_mask)
            x = self._add(x, added, self.final_layer_norm)
        if self.added_layer_norm is not None:
            entering = self.added_layer_norm(x) if self.normalize_before else x
            added = _apply(self.added_sublayer, entering, padding_mask)
            x = self._add(x, added, self.added_layer_norm)
        return x, state

    def _attend(
        self, x: Tensor, positions: Any, past: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
            if isinstance(past, HiddenStates):
                past = HiddenStates(self.self_attn_layer_norm(past.hidden), past.max_length)
        return self.self_attn(x, positions, past)

    def _add(self, x: Tensor, added: Tensor, layer_norm: nn.Module) -> Tensor:
        if self.normalize_before:
            return x + self.dropout(added)
        return layer_norm(x + self.dropout(added))


def _apply(sublayer: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    if getattr(sublayer, "takes_padding", False):
        return sublayer(x, padding_mask)
    return sublayer(x)
