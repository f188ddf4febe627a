"""The default variant, ``sublayers``: a transformer's layers with weights κ and α for branches.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132, section 3): "layer normalization, and residual
connections … are retained". With S the sum of the weights ::

    h = LN(x + Σ κ_i b_i);    b_i = head_i W^{O_i} + b^O/S
    y = LN(h + Σ α_i F_i(h)); F_i(h) = relu(h W_1^i + b_1^i) W_2^i + b_2/S

κ scales columns of the output projection, α columns of the second feed-forward layer. If all κ_i
and α_i are 1, so that S = M, this is a layer of the plain transformer.

Shapes: B sentences, T queries, S keys, M branches, d model width, h head width (d/M).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights


class WeightedLinear(nn.Module):
    """``Σ_i w_i (x_i W_i + b/S)``: a linear layer with a weight for each of M branches.

    Branch i has columns i·c to (i+1)·c of the matrix, where c is the input's width divided by M.
    This is not an ``nn.Linear``: the matrix is not all that the input is multiplied with.
    """

    def __init__(self, in_features: int, out_features: int, weights: BranchWeights) -> None:
        super().__init__()
        if in_features % weights.branches:
            raise ValueError(
                f"`in_features` is {in_features}, the inner width of a feed-forward network: it "
                f"must be a multiple of the number of branches, {weights.branches}"
            )
        linear = nn.Linear(in_features, out_features)
        self.weight, self.bias = linear.weight, linear.bias
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        weights = self.weights()
        bias = (self.bias * (weights.sum() / self.weights.total)).to(self.bias.dtype)
        if self.training:
            # a backward pass would need the input both scaled and unscaled
            return F.linear(x, scale_columns(self.weight, weights), bias)
        # a step of translation has fewer numbers than the matrix
        return F.linear(scale_columns(x, weights), self.weight, bias)


def scale_columns(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``x`` (…, M·c) with the i-th c columns times weight i, in its own precision."""
    by_branch = x.view(*x.shape[:-1], len(weights), x.size(-1) // len(weights))
    return (by_branch * weights[:, None]).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention of the plain transformer (equations 1 to 3)."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj: nn.Module = nn.Linear(embed_dim, embed_dim)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, 2**-0.5)
        start_projection(self.out_proj)

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, d) for queries (B, T, d) and what they attend to, (B, S, d).

        ``mask``, which may lack dimensions of (B, M, T, S), is true for keys that a query sees, or
        is added to the scores.
        """
        dropout = self.dropout if self.training else 0.0
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(key)
        # (B, T, d) -> (B, M, T, h)
        queries, keys, values = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected
        )
        heads = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        # (B, M, T, h) -> (B, T, d)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class WeightedAttention(Attention):
    """Multi-head attention with a weight κ for each head: ``Σ κ_i b_i`` (equations 5 and 6)."""

    def __init__(self, embed_dim: int, kappa: BranchWeights, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, kappa.branches, dropout)
        self.out_proj = start_projection(WeightedLinear(embed_dim, embed_dim, kappa))


def start_projection(out_proj: nn.Module) -> nn.Module:
    """Return an output projection with the initial values of fairseq's attention."""
    nn.init.xavier_uniform_(out_proj.weight)
    nn.init.zeros_(out_proj.bias)
    return out_proj


class WeightedEncoderLayer(nn.Module):
    """An encoder layer with one branch for each attention head.

    ``options`` of the branches are those of :class:`BranchWeights`. For 8 branches: ::

        layer = WeightedEncoderLayer(512, 8, 2048, dropout=0.1, parameterization="softmax")
        y = layer(x)  # x and y: (B, T, 512)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, ffn_dim: int, dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "ffn_dim": ffn_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` is {size}: it must be at least 1")
        kappa = BranchWeights(num_heads, "kappa", **options)
        alpha = BranchWeights(num_heads, "alpha", **options)
        self.self_attn: Attention = WeightedAttention(embed_dim, kappa, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = WeightedLinear(ffn_dim, embed_dim, alpha)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, d) to (B, T, d); :meth:`Attention.forward` explains the mask."""
        h = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, x, mask)))
        return self.feed_forward(h)

    def feed_forward(self, h: Tensor) -> Tensor:
        """Return ``LN(h + Σ α_i F_i(h))``."""
        return self.final_layer_norm(h + self.dropout(self.fc2(F.relu(self.fc1(h)))))


class WeightedDecoderLayer(WeightedEncoderLayer):
    """A decoder layer with one branch for each head of its attention to the encoder."""

    def __init__(
        self, embed_dim: int, num_heads: int, ffn_dim: int, dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, ffn_dim, dropout, **options)
        self.encoder_attn = self.self_attn
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.self_attn = Attention(embed_dim, num_heads, dropout)

    def forward(self, x: Tensor, encoder_out: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, d) to (B, T, d); ``encoder_out`` is (B, S, d), and ``mask`` hides its padding.

        No token sees those after it.
        """
        past = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, x, past)))
        attended = self.encoder_attn(x, encoder_out, mask)
        return self.feed_forward(self.encoder_attn_layer_norm(x + self.dropout(attended)))
