"""The variant ``as-written``: each attention head has a feed-forward network of its own.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), equations 5 to 7, with S the sum of the weights: ::

    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
    output = Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O/S))

FFN_i has 1/M of the inner width. All branches share b^O and the bias of the second layers, so that
matrices and biases together are those of a plain transformer.

Shapes: N tokens, M branches, d model width, h head width (d/M), f inner width of a branch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, WeightedLinear


class BranchedFeedForward(nn.Module):
    """The feed-forward networks of all heads, in place of an attention's output projection.

    ``ffn_dim`` is M·f.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        kappa: BranchWeights,
        alpha: BranchWeights,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc1 = FirstLayers(embed_dim, ffn_dim, kappa)
        self.fc2 = WeightedLinear(ffn_dim, embed_dim, alpha)
        self.activation = activation
        self.activation_dropout = nn.Dropout(activation_dropout)

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side, (…, M·h), to the weighted sum of branches, (…, d)."""
        return self.fc2(self.activation_dropout(self.activation(self.fc1(heads))))


class FirstLayers(nn.Module):
    """``κ_i (head_i W^{O_i} + b^O/S) W_1^i + b_1^i``: the branches up to their activation.

    Columns i·h to (i+1)·h of ``out_weight`` are W^{O_i}; rows i·f to (i+1)·f of ``weight`` are
    W_1^i. Nothing stands between the two matrices, so they are multiplied first in training and
    with many tokens: then no branch has a vector of width d for each token.
    """

    def __init__(self, embed_dim: int, ffn_dim: int, weights: BranchWeights) -> None:
        super().__init__()
        out = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(out.weight)
        nn.init.zeros_(out.bias)
        first = nn.Linear(embed_dim, ffn_dim)
        self.out_weight, self.out_bias = out.weight, out.bias
        self.weight, self.bias = first.weight, first.bias
        self.weights = weights

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side, (…, M·h), to inner vectors side by side, (…, M·f)."""
        branches, kappa = self.weights.branches, self.weights()
        # (d, M·h) -> (M, d, h); (M·f, d) -> (M, f, d); (M·f,) -> (M, f)
        out = self.out_weight.unflatten(1, (branches, -1)).transpose(0, 1)
        first = self.weight.unflatten(0, (branches, -1))
        bias = self.bias.unflatten(0, (branches, -1))
        # torch.export would let the comparison restrict the size of batches
        flexible = self.training or torch.compiler.is_compiling()
        if not flexible and heads[..., 0].numel() < out.size(2):
            # (…, M·h) -> (M, N, h) -> (M, N, d) -> (M, N, f) -> (…, M·f)
            x = heads.reshape(-1, branches, out.size(2)).transpose(0, 1)
            x = (x @ out.mT + self.out_bias / self.weights.total) * kappa[:, None, None]
            inner = x.to(first.dtype) @ first.mT + bias[:, None]
            return inner.transpose(0, 1).reshape(*heads.shape[:-1], len(self.weight))
        # (M, f, d), (M, d, h) -> (M, f, h)
        into = ((first @ out) * kappa[:, None, None]).to(heads.dtype)
        share = (kappa[:, None] / self.weights.total).to(bias.dtype)
        bias = bias + share * (first @ self.out_bias)
        # in place of a batched product, which copies between the layouts
        parts = zip(heads.chunk(branches, -1), into, bias, strict=True)
        return torch.cat([F.linear(*part) for part in parts], -1)
