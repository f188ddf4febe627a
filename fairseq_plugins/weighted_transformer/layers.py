"""The default reading, ``sublayers``: fairseq's layers with weights κ and α for their branches.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132, section 3): "layer normalization, and residual
connections … are retained". With S the sum of the weights ::

    h = LN(x + Σ κ_i b_i);    b_i = head_i W^{O_i} + b^O/S
    y = LN(h + Σ α_i F_i(h)); F_i(h) = relu(h W_1^i + b_1^i) W_2^i + b_2/S

κ scales columns of the output projection, α columns of the second feed-forward layer. If all κ_i
and α_i are 1, so that S = M, this is fairseq's layer.

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
    """fairseq's decoder layer with κ in "encoder" attention, "self"-attention or both, and α."""

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
    """``Σ_i w_i (x_i W_i + b/S)``: a linear layer with a weight for each of M branches.

    Branch i has columns i·c to (i+1)·c of the matrix, where c is the input's width divided by M.
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
        """Return the weighted matrix and bias."""
        (weights,) = self.weights()
        matrix = self.weight.unflatten(1, (self.weights.branches, -1)) * weights[:, None]
        # only a part of the bias, if only some branches contribute
        bias = self.bias * (weights.sum() / self.weights.applied_sum)
        # the branch weights are always in single precision
        return matrix.flatten(1).to(self.weight.dtype), bias.to(self.weight.dtype)


class FusedAttention(MultiheadAttention):
    """fairseq's attention, which uses torch's fused attention if no attention weights are needed.

    ``out_proj`` may be any module.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # otherwise fairseq would hand the projection's weights to torch, without calling it
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
        """Return the output (T, B, d) and the weights that are asked for, as fairseq does."""
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
    """fairseq's multi-head attention with a weight κ for each head."""

    def __init__(self, embed_dim: int, kappa: BranchWeights, **options: Any) -> None:
        super().__init__(embed_dim, kappa.branches, **options)
        self.out_proj = WeightedLinear(embed_dim, embed_dim, kappa)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)
