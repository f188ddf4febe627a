"""The default reading, ``sublayers``: fairseq's layers with weights κ and α of their branches.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132, section 3): "layer normalization, and residual
connections … are retained". With S the sum of the weights ::

    h = LN(x + Σ κ_i b_i);    b_i = head_i W^{O_i} + b^O/S
    y = LN(h + Σ α_i F_i(h)); F_i(h) = relu(h W_1^i + b_1^i) W_2^i + b_2/S

κ scales columns of the output projection and α those of the second feed-forward layer: the rest is
fairseq's. With κ_i = α_i = 1, which is 1/M times S = M, it is fairseq's layer.

Shapes: B sentences, T queries, S keys, M branches, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.attention import attention_heads
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, FoldedLayer


class WeightedEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with κ in its attention and α in its feed-forward network."""

    def __init__(self, cfg: TransformerConfig, kappa: BranchWeights, alpha: BranchWeights) -> None:
        super().__init__(cfg)
        self.self_attn = WeightedAttention(
            self.embed_dim, kappa, dropout=cfg.attention_dropout, self_attention=True
        )
        self.fc2 = WeightedLinear(cfg.encoder.ffn_embed_dim, self.embed_dim, alpha)


class WeightedDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with κ in attention to the "encoder", to "self", or both, and α."""

    def __init__(
        self, cfg: TransformerConfig, kappas: Mapping[str, BranchWeights], alpha: BranchWeights
    ) -> None:
        super().__init__(cfg)
        dropout = cfg.attention_dropout
        if "self" in kappas:
            self.self_attn = WeightedAttention(
                self.embed_dim, kappas["self"], dropout=dropout, self_attention=True
            )
        if "encoder" in kappas:
            self.encoder_attn = WeightedAttention(
                self.embed_dim,
                kappas["encoder"],
                dropout=dropout,
                encoder_decoder_attention=True,
                kdim=cfg.encoder.embed_dim,
                vdim=cfg.encoder.embed_dim,
            )
        self.fc2 = WeightedLinear(cfg.decoder.ffn_embed_dim, self.embed_dim, alpha)


class WeightedLinear(FoldedLayer, nn.Linear):
    """``Σ_i w_i (x_i W_i + b/S)``: a linear layer of M branches, with a weight for each.

    Branch i has the columns i·c to (i+1)·c of the matrix, with c the input's width divided by M.
    """

    def __init__(self, in_features: int, out_features: int, weights: BranchWeights) -> None:
        if in_features % weights.branches:
            raise ValueError(
                f"`ffn_embed_dim` is {in_features}: the {weights.branches} branches share it, so "
                "it must be a multiple of `branches`"
            )
        super().__init__(in_features, out_features)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        return F.linear(x, *self.folded())

    def fold(self) -> tuple[Tensor, Tensor]:
        """Return the matrix and the bias, with the weights in them."""
        (weights,) = self.weights()
        matrix = self.weight.unflatten(1, (self.weights.branches, -1)) * weights[:, None]
        # not all of it where only some branches contribute
        bias = self.bias * (weights.sum() / self.weights.applied_sum)
        # the weights are in single precision, whatever the matrix is in
        return matrix.flatten(1).to(self.weight.dtype), bias.to(self.weight.dtype)


class FusedAttention(MultiheadAttention):
    """fairseq's attention, by torch's fused attention where nobody asks for attention weights.

    It takes another ``out_proj``, which fairseq's own would pass by.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # otherwise fairseq would hand the projection's weights to torch
        self.skip_embed_dim_check = True

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, (T, B, d), and the weights that are asked for, as fairseq's does."""
        if incremental_state is None and not (need_weights or need_head_weights or before_softmax):
            projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
            module = self.dropout_module
            dropout = module.p if module.training or module.apply_during_inference else 0.0
            masks = key_padding_mask, attn_mask
            return self.out_proj(attention_heads(*projected, self.num_heads, *masks, dropout)), None
        return super().forward(
            query,
            key,
            value,
            key_padding_mask,
            incremental_state,
            need_weights,
            static_kv,
            attn_mask,
            before_softmax,
            need_head_weights,
        )


class WeightedAttention(FusedAttention):
    """fairseq's multi-head attention with weights κ, one for each of its heads."""

    def __init__(self, embed_dim: int, kappa: BranchWeights, **options: Any) -> None:
        super().__init__(embed_dim, kappa.branches, **options)
        self.out_proj = WeightedLinear(embed_dim, embed_dim, kappa)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)
