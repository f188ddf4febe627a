"""fairseq's transformer layers with branched attention in place of attention and feed-forward.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), section 3 and figure 1. Attention and the
feed-forward network behind it are one sublayer, with one residual connection and one normalisation.

Shapes: B sentences, T target tokens, S source tokens, d model width.
"""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerConfig
from fairseq.modules import MultiheadAttention
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
    """fairseq's encoder layer with branched self-attention for its only sublayer.

    Args:
        cfg: fairseq's.
        weights: κ and α, of as many branches as there are heads.
    """

    def __init__(self, cfg: TransformerConfig, weights: BranchWeights) -> None:
        super().__init__(cfg)
        options = _attention_options(cfg, cfg.encoder.attention_heads)
        heads = AttentionHeads(self.embed_dim, self_attention=True, **options)
        self.self_attn = _branched(self, heads, cfg.encoder.ffn_embed_dim, weights)
        del self.fc1, self.fc2, self.final_layer_norm

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Map (S, B, d) to (S, B, d), as fairseq's layer does.

        Args:
            x: the tokens.
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
    """fairseq's decoder layer with one of its attentions branched and no sublayer after that.

    Args:
        cfg: fairseq's.
        weights: κ and α, of as many branches as there are heads.
        branched: "encoder" for the attention to the encoder, which a feed-forward network follows
            in the plain transformer, or "self" for masked self-attention.
    """

    def __init__(self, cfg: TransformerConfig, weights: BranchWeights, branched: str) -> None:
        super().__init__(cfg)
        options = _attention_options(cfg, cfg.decoder.attention_heads)
        if branched == "self":
            heads = AttentionHeads(self.embed_dim, self_attention=True, **options)
        else:
            widths = {"kdim": cfg.encoder.embed_dim, "vdim": cfg.encoder.embed_dim}
            heads = AttentionHeads(
                self.embed_dim, encoder_decoder_attention=True, **widths, **options
            )
        attention = _branched(self, heads, cfg.decoder.ffn_embed_dim, weights)
        setattr(self, "self_attn" if branched == "self" else "encoder_attn", attention)
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
        """Map (T, B, d) to (T, B, d) and the weights of the attention to the encoder.

        Args:
            x: the tokens; with ``incremental_state`` the last one of each sentence.
            encoder_out: (S, B, d).
            encoder_padding_mask: (B, S), true for padding.
            incremental_state: keys and values of the tokens before.
            prev_self_attn_state: only for fairseq's export to ONNX, which is not there.
            prev_attn_state: the same.
            self_attn_mask: (T, T), what is added to scores.
            self_attn_padding_mask: (B, T), true for padding.
            need_attn: whether to return the attention's weights, averaged over heads, (B, T, S).
            need_head_weights: whether to return those of each head.
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


def _attention_options(cfg: TransformerConfig, heads: int) -> dict[str, Any]:
    return {"num_heads": heads, "dropout": cfg.attention_dropout}


def _branched(
    layer: nn.Module, heads: MultiheadAttention, ffn_embed_dim: int, weights: BranchWeights
) -> BranchedAttention:
    feed_forward = BranchedFeedForward(
        layer.embed_dim,
        ffn_embed_dim,
        weights,
        layer.activation_fn,
        layer.activation_dropout_module.p,
    )
    return BranchedAttention(heads, feed_forward)
