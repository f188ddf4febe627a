"""Layers of both variants as fairseq's encoder and decoder call them: (T, B, d), masks, decoding.

Shapes: B sentences, T queries, S keys, M branches, d model width.
"""

from __future__ import annotations

from typing import Any

from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules import FairseqDropout
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.as_written import (
    AsWrittenDecoderLayer,
    AsWrittenEncoderLayer,
)
from fairseq_plugins.weighted_transformer.layers import (
    Attention,
    WeightedDecoderLayer,
    WeightedEncoderLayer,
)
from fairseq_plugins.weighted_transformer.options import AS_WRITTEN, SUBLAYERS


class FairseqEncoderLayer(nn.Module):
    """Base class of encoder layers with fairseq's arguments; list it before ours."""

    upgrade_state_dict_named = TransformerEncoderLayerBase.upgrade_state_dict_named

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None = None) -> Tensor:
        """Map (S, B, d) to (S, B, d); the mask (B, S) is true for padding."""
        return super().forward(x, _visible(encoder_padding_mask))


class FairseqDecoderLayer(FairseqIncrementalState):
    """Base class of decoder layers with fairseq's arguments; list it before ours."""

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return output (T, B, d), the weights (M, B, T, S) of attention to the encoder or None.

        fairseq adds ``self_attn_mask`` (T, T) to scores, and gives none to decode token by token.
        """
        pasts = None
        if incremental_state is not None:
            pasts = self.get_incremental_state(incremental_state, "pasts")
            if pasts is None:
                pasts = {"self": {}, "encoder": {}}
                self.set_incremental_state(incremental_state, "pasts", pasts)
            else:
                encoder_out = None
            # no token that is generated is padding
            self_mask = None
        else:
            self_mask = _visible(self_attn_padding_mask)
            if self_attn_mask is not None:
                seen = self_attn_mask == 0
                self_mask = seen if self_mask is None else self_mask & seen
        mask = _visible(encoder_padding_mask)
        need_weights = need_attn or need_head_weights
        x, weights = self.decode(x, encoder_out, mask, self_mask, pasts, need_weights)
        return x, None if weights is None else weights.transpose(0, 1), None

    def reorder_incremental_state(self, incremental_state: dict[str, Any], order: Tensor) -> None:
        """Let the pasts follow the beams, which continue those in ``order`` (B,)."""
        pasts = self.get_incremental_state(incremental_state, "pasts") or {}
        for name, past in pasts.items():
            for which, kept in past.items():
                # beams of a sentence attend to the same source, and stay side by side
                if name == "self" or len(kept) != len(order):
                    past[which] = kept.index_select(0, order)


def _visible(padding_mask: Tensor | None) -> Tensor | None:
    """Return a mask (B, 1, 1, S) that is true for what is not padding, from fairseq's (B, S)."""
    return None if padding_mask is None else ~padding_mask[:, None, None].bool()


class SublayersEncoderLayer(FairseqEncoderLayer, WeightedEncoderLayer):
    """The variant ``sublayers`` in fairseq's encoder."""


class SublayersDecoderLayer(FairseqDecoderLayer, WeightedDecoderLayer):
    """The variant ``sublayers`` in fairseq's decoder."""


class BranchedEncoderLayer(FairseqEncoderLayer, AsWrittenEncoderLayer):
    """The variant ``as-written`` in fairseq's encoder."""


class BranchedDecoderLayer(FairseqDecoderLayer, AsWrittenDecoderLayer):
    """The variant ``as-written`` in fairseq's decoder."""


LAYERS = {
    (SUBLAYERS, "encoder"): SublayersEncoderLayer,
    (SUBLAYERS, "decoder"): SublayersDecoderLayer,
    (AS_WRITTEN, "encoder"): BranchedEncoderLayer,
    (AS_WRITTEN, "decoder"): BranchedDecoderLayer,
}


class RetainableDropout(FairseqDropout):
    """fairseq's dropout, which stays in training mode where --retain-dropout keeps it."""

    def train(self, mode: bool = True) -> RetainableDropout:
        """Set training mode, unless dropout is retained."""
        return super().train(mode or self.apply_during_inference)


def make_dropouts_retainable(layer: nn.Module, name: str) -> None:
    """Put fairseq's dropouts, which --retain-dropout-modules knows by ``name``, into a layer."""
    for module in list(layer.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                owner = "MultiheadAttention" if isinstance(module, Attention) else name
                setattr(module, child_name, RetainableDropout(child.p, owner))
