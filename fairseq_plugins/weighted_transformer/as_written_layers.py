"""fairseq's transformer layers in the reading ``as-written``.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), section 3 and figure 1. Branched attention is one
sublayer with one residual connection and one norm: ``y = LN(x + Σ α_i F_i(κ_i b_i))``.

Shapes: B sentences, T target tokens, S source tokens, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.as_written_attention import (
    BranchedAttention,
    BranchedFeedForward,
)
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.layers import FusedAttention


class BranchedEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with branched self-attention as its only sublayer."""

    def __init__(self, cfg: TransformerConfig, weights: BranchWeights) -> None:
        super().__init__(cfg)
        networks = _build_networks(self, cfg.encoder.ffn_embed_dim, weights)
        self.self_attn = _build_attention(self, cfg, networks, self_attention=True)
        del self.fc1, self.fc2, self.final_layer_norm

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Map ``x`` (S, B, d) to (S, B, d), with fairseq's masks."""
        if attn_mask is not None:
            attn_mask = x.new_zeros(attn_mask.shape).masked_fill(attn_mask.bool(), -1e4)
        x, _ = _apply_sublayer(
            self,
            self.self_attn,
            self.self_attn_layer_norm,
            x,
            key_padding_mask=encoder_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
        )
        return x


class BranchedDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with two sublayers; one or both are branched attention.

    ``weights`` are κ and α of attention to the "encoder" and of "self"-attention, or of one of the
    two. If there are both, each has half the feed-forward width.
    """

    def __init__(self, cfg: TransformerConfig, weights: Mapping[str, BranchWeights]) -> None:
        super().__init__(cfg)
        width = cfg.decoder.ffn_embed_dim
        if width % len(weights):
            raise ValueError(
                f"`ffn_embed_dim` is {width}: both attentions are branched and share it, so it "
                "must be even"
            )
        networks = {
            name: _build_networks(self, width // len(weights), of_attention)
            for name, of_attention in weights.items()
        }
        if "self" in networks:
            self.self_attn = _build_attention(self, cfg, networks["self"], self_attention=True)
        if "encoder" in networks:
            self.encoder_attn = _build_attention(
                self,
                cfg,
                networks["encoder"],
                encoder_decoder_attention=True,
                kdim=cfg.encoder.embed_dim,
                vdim=cfg.encoder.embed_dim,
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
        """Return output (T, B, d), the weights of attention to the encoder or None, and None.

        ``prev_self_attn_state`` and ``prev_attn_state``, for export to ONNX, are ignored.
        """
        x, _ = _apply_sublayer(
            self,
            self.self_attn,
            self.self_attn_layer_norm,
            x,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        if encoder_out is None:
            return x, None, None
        x, weights = _apply_sublayer(
            self,
            self.encoder_attn,
            self.encoder_attn_layer_norm,
            x,
            encoder_out,
            key_padding_mask=encoder_padding_mask,
            incremental_state=incremental_state,
            static_kv=True,
            need_weights=need_attn or (not self.training and self.need_attn),
            need_head_weights=need_head_weights,
        )
        return x, weights, None


def _apply_sublayer(
    layer: nn.Module,
    attention: nn.Module,
    norm: nn.Module,
    x: Tensor,
    keys: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` (T, B, d) after attention, residual connection and norm, and the weights.

    ``keys`` are (S, B, d); None for self-attention. The ``options`` go to attention.
    """
    query = norm(x) if layer.normalize_before else x
    keys = query if keys is None else keys
    out, weights = attention(query, keys, keys, **options)
    out = x + layer.dropout_module(out)
    return (out if layer.normalize_before else norm(out)), weights


def _build_networks(layer: nn.Module, width: int, weights: BranchWeights) -> BranchedFeedForward:
    """Return one attention's networks, whose inner widths sum to ``width``."""
    # --retain-dropout-modules names dropout by its module
    dropout = FairseqDropout(layer.activation_dropout_module.p, BranchedFeedForward.__name__)
    return BranchedFeedForward(layer.embed_dim, width, weights, layer.activation_fn, dropout)


def _build_attention(
    layer: nn.Module, cfg: TransformerConfig, networks: BranchedFeedForward, **attention: Any
) -> BranchedAttention:
    heads = FusedAttention(
        layer.embed_dim, networks.branches, dropout=cfg.attention_dropout, **attention
    )
    # each branch has its own part of the output projection
    heads.out_proj = nn.Identity()
    return BranchedAttention(heads, networks)
