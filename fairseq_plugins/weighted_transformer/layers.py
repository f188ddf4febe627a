"""fairseq's transformer layers, with branched attention for attention and feed-forward network.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), section 3 and figure 1. Branched attention is one
sublayer: one residual connection, and one normalisation before or after it.

Shapes: B sentences, T target tokens, S source tokens, M branches, d model width.
"""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import EncDecBaseConfig
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.branched_attention import (
    AttentionHeads,
    BranchedAttention,
    BranchedFeedForward,
)


class BranchedEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with one sublayer, branched self-attention.

    Args:
        cfg: fairseq's configuration of the model.
        weights: κ and α of as many branches as there are heads.

    Raises:
        ValueError: the branches cannot share the feed-forward width.
    """

    def __init__(self, cfg: TransformerConfig, weights: BranchWeights) -> None:
        super().__init__(cfg)
        self.self_attn = _branched(self, cfg, cfg.encoder, weights, self_attention=True)
        del self.fc1, self.fc2, self.final_layer_norm

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output, (S, B, d).

        Args:
            x: (S, B, d).
            encoder_padding_mask: (B, S), true for padding.
            attn_mask: (S, S), true or 1 where a query does not see a key.
        """
        if attn_mask is not None:
            attn_mask = x.new_zeros(attn_mask.shape).masked_fill(attn_mask.bool(), -1e4)
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        branched, _ = self.self_attn(
            x,
            x,
            x,
            key_padding_mask=encoder_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
        )
        x = residual + self.dropout_module(branched)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        return x


class BranchedDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with two sublayers, one of which is branched attention.

    Args:
        cfg: fairseq's configuration of the model.
        weights: κ and α of as many branches as there are heads.
        branched: "encoder" for the attention to the encoder, which a feed-forward network follows
            in the plain transformer, or "self" for masked self-attention.

    Raises:
        ValueError: the branches cannot share the feed-forward width.
    """

    def __init__(self, cfg: TransformerConfig, weights: BranchWeights, branched: str) -> None:
        super().__init__(cfg)
        if branched == "self":
            self.self_attn = _branched(self, cfg, cfg.decoder, weights, self_attention=True)
        else:
            widths = {"kdim": cfg.encoder.embed_dim, "vdim": cfg.encoder.embed_dim}
            self.encoder_attn = _branched(
                self, cfg, cfg.decoder, weights, encoder_decoder_attention=True, **widths
            )
        del self.fc1, self.fc2, self.final_layer_norm

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return the layer's output, (T, B, d), and the weights of the attention to the encoder.

        Args:
            x: (T, B, d); with ``incremental_state`` the last token of each sentence alone.
            encoder_out: (S, B, d).
            encoder_padding_mask: (B, S), true for padding.
            incremental_state: keys and values of the tokens before.
            prev_self_attn_state: ignored; fairseq's layer has it for its export to ONNX.
            prev_attn_state: ignored.
            self_attn_mask: (T, T), added to the scores.
            self_attn_padding_mask: (B, T), true for padding.
            need_attn: whether to return the weights averaged over the heads, (B, T, S).
            need_head_weights: whether to return those of each head, (M, B, T, S).

        Returns:
            Output; weights, or None where they are not asked for; and None, as fairseq's layer does
            outside of that export.
        """
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(
            x,
            x,
            x,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        x = residual + self.dropout_module(x)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        if encoder_out is None:
            return x, None, None
        residual = x
        if self.normalize_before:
            x = self.encoder_attn_layer_norm(x)
        x, weights = self.encoder_attn(
            x,
            encoder_out,
            encoder_out,
            key_padding_mask=encoder_padding_mask,
            incremental_state=incremental_state,
            static_kv=True,
            need_weights=need_attn or (not self.training and self.need_attn),
            need_head_weights=need_head_weights,
        )
        x = residual + self.dropout_module(x)
        if not self.normalize_before:
            x = self.encoder_attn_layer_norm(x)
        return x, weights, None


def _branched(
    layer: nn.Module,
    cfg: TransformerConfig,
    part: EncDecBaseConfig,
    weights: BranchWeights,
    **attention: Any,
) -> BranchedAttention:
    """Return branched attention for a layer of the encoder or the decoder.

    Args:
        layer: the layer, for its width, activation and dropout.
        cfg: fairseq's configuration of the model.
        part: fairseq's configuration of the encoder or the decoder.
        weights: κ and α.
        **attention: further arguments of fairseq's MultiheadAttention.
    """
    heads = AttentionHeads(
        layer.embed_dim, part.attention_heads, dropout=cfg.attention_dropout, **attention
    )
    feed_forward = BranchedFeedForward(
        layer.embed_dim,
        part.ffn_embed_dim,
        weights,
        layer.activation_fn,
        layer.activation_dropout_module.p,
    )
    return BranchedAttention(heads, feed_forward)
