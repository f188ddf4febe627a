"""Branches that have residual connections and norms of their own, with weights κ and α.

Two readings of "layer normalization, and residual connections … are retained" (Ahmed, Keskar,
Socher 2017, arXiv:1711.02132, section 3): behind each branch's network, or around each branch. With
b_i = head_i W^{O_i} + b^O/S and S the sum of the weights, as in
:mod:`~fairseq_plugins.weighted_transformer.branched_attention`, that module's reading is in a layer
``y = LN(x + Σ α_i F_i(κ_i b_i))``. Here it is ::

    z_i = κ_i b_i;          y = LN(x + Σ α_i LN(z_i + F_i(z_i)))      NormalizedBranches
    z_i = LN(x + κ_i b_i);  y = LN(Σ α_i (z_i + F_i(z_i)))            ResidualBranches

and with S = M in the last line ``y = LN(mean z_i + Σ α_i F_i(z_i))``. The inner norm is one for all
branches: a layer has a plain transformer's parameters, and κ and α.

Shapes: N tokens, M branches, d model width, h head width (d/M), f inner width of a branch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout, LayerNorm
from torch import Tensor

from fairseq_plugins.weighted_transformer.branched_attention import (
    BranchedFeedForward,
    branch_linear,
    weighted_sum,
)


class _NetworksWithNorm(BranchedFeedForward):
    """What both readings have: an inner norm, residual dropout, and vectors of the model's width.

    Args:
        *args: those of :class:`BranchedFeedForward`.
        dropout: of what is added to a residual connection.
        **options: those of :class:`BranchedFeedForward`.
    """

    def __init__(self, *args: Any, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layer_norm = LayerNorm(self.fc1.in_features)
        self.dropout = FairseqDropout(dropout, type(self).__name__)

    def _drop(self, x: Tensor) -> Tensor:
        """Return vectors (N, M, d) after dropout, with one mask for the branches of a token.

        That is what dropout of a sum of branches does, and M times as cheap.
        """
        if not (self.dropout.training or self.dropout.apply_during_inference):
            return x
        return x * self.dropout(torch.ones_like(x[:, :1]))

    def _fold_projection(self, kappa: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices (M, h, d) and biases (M, d) from heads to κ_i b_i."""
        bias = self.out_proj.bias * (kappa[:, None] / self.weights.applied_sum)
        return self._cast((self._projections() * kappa[:, None, None]).mT), self._cast(bias)


class NormalizedBranches(_NetworksWithNorm):
    """``Σ_i α_i LN(z_i + F_i(z_i))`` of given heads, with ``z_i = κ_i b_i``.

    The first layers are merged with the output projection. The norm needs a vector of the model's
    width for every token and branch.
    """

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side, (…, M·h), to the weighted sum of the branches, (…, d)."""
        into, bias, projection, projection_bias, second, second_bias, alpha = (
            self._folded_matrices()
        )
        flat = heads.flatten(0, -2)
        inner = self.activation_dropout(self.activation(branch_linear(flat, into, bias)))
        if self.shared:
            added = F.linear(inner.unflatten(1, (self.branches, -1)), second, second_bias)
        else:
            added = branch_linear(inner, second, second_bias)
            added = added.unflatten(1, (self.branches, -1))
        z = branch_linear(flat, projection, projection_bias).view_as(added)
        # (N, M, d)
        each = self.layer_norm(z + self._drop(added))
        return weighted_sum(each, alpha).view(heads.shape[:-1] + each.shape[-1:])

    def _fold(self) -> tuple[Tensor, ...]:
        """Fold κ and the output projection into the layers of the networks.

        Returns:
            Matrices and biases from heads to inner vectors, (M, h, f) and (M, f), and to z_i,
            (M, h, d) and (M, d); those of the second layers, (M, f, d) and (M, d), or (d, f) and
            (d,) of a shared one; α (M,).
        """
        kappa, alpha = self.weights()
        second, bias = self.fc2.weight, self.fc2.bias / self.weights.applied_sum
        if not self.shared:
            second = second.unflatten(1, (self.branches, -1)).permute(1, 2, 0)
            bias = bias.expand(self.branches, -1)
        first = self._fold_first(kappa)
        return *first, *self._fold_projection(kappa), second, bias, self._cast(alpha)


class ResidualBranches(_NetworksWithNorm):
    """``Σ_i α_i (z_i + F_i(z_i))`` of given heads and x, with ``z_i = LN(x + κ_i b_i)``.

    Where the weights' sum is M it is ``mean z_i + Σ_i α_i F_i(z_i)``. The second layers of all
    branches are one product.
    """

    adds_residual = True

    def forward(self, heads: Tensor, residual: Tensor) -> Tensor:
        """Map heads side by side, (…, M·h), and x, (…, d), to the sum of the branches, (…, d)."""
        projection, bias, alpha, out, out_bias = self._folded_matrices()
        added = branch_linear(heads.flatten(0, -2), projection, bias)
        added = self._drop(added.unflatten(1, (self.branches, -1)))
        # (N, 1, d) + (N, M, d)
        z = self.layer_norm(residual.flatten(0, -2).unsqueeze(1) + added)
        if self.shared:
            inner = self.activation_dropout(self.activation(self.fc1(z)))
            inner = weighted_sum(inner, alpha)
        else:
            first, first_bias = self._first_layers()
            inner = self.activation(branch_linear(z.flatten(1), first.mT, first_bias))
            inner = self.activation_dropout(inner)
        kept = weighted_sum(z, alpha) if self.weights.applied_sum == 1 else z.mean(1)
        return (kept + self.dropout(F.linear(inner, out, out_bias))).view_as(residual)

    def _fold(self) -> tuple[Tensor, ...]:
        """Fold κ and α into the matrices.

        Returns:
            Matrices (M, h, d) and biases (M, d) from heads to κ_i b_i; α (M,); matrix (d, M·f) and
            bias (d,) of the second layers, α included, or the matrix (d, f) of a shared one
            without α.
        """
        kappa, alpha = self.weights()
        return *self._fold_projection(kappa), self._cast(alpha), *self._fold_second(alpha)
