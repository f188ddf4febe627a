"""Branched attention: each head has a feed-forward network of its own, and κ and α weigh them.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), equations 5 to 7: ::

    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
    output = Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O/S))

FFN_i has 1/M of the inner width, or is one network of the whole width for all branches. S is the
sum of the κ_i, and of the α_i: 1, or M where they are applied M times. One bias b^O and one bias of
the second layers do for all branches, each branch has 1/S of them: the matrices and biases together
are a plain transformer's.

Nothing stands between W^{O_i} and the first layer of FFN_i: their product is formed once, and no
branch has a vector of the model's width for each token.

Shapes: B sentences, T queries, S keys, N tokens, M branches, d model width, h head width (d/M), f
inner width of a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.fairseq_integration.forward_passes import InferenceCache
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights


class BranchedAttention(nn.Module):
    """Attention heads and the feed-forward networks behind them, called as the heads are.

    For 8 branches of a model of width 512: ::

        heads = AttentionHeads(512, 8)
        attention = BranchedAttention(heads, BranchedFeedForward(512, 2048, BranchWeights(8)))
        output, _ = attention(x, x, x, need_weights=False)  # x and output: (T, B, 512)

    :class:`BranchWeights` says what an optimizer has to do for κ and α.

    Args:
        heads: M :class:`AttentionHeads`, or what is called as they are.
        feed_forward: the networks of M branches.

    Raises:
        ValueError: there are not as many branches as heads.
    """

    def __init__(self, heads: nn.Module, feed_forward: BranchedFeedForward) -> None:
        super().__init__()
        if heads.num_heads != feed_forward.branches:
            raise ValueError(
                f"`feed_forward` has {feed_forward.branches} branches: it must have one for each "
                f"of the {heads.num_heads} heads"
            )
        self.heads = heads
        self.feed_forward = feed_forward

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sum of the branches (equation 7), and the attention's weights.

        Args:
            query: (T, B, d).
            *args: what the heads take next: keys and values, both (S, B, d), and masks.
            **kwargs: the same by name.

        Returns:
            (T, B, d), and the weights, (B, T, S), if they are asked for.
        """
        heads, weights = self.heads(query, *args, **kwargs)
        if self.feed_forward.adds_residual:
            return self.feed_forward(heads, query), weights
        return self.feed_forward(heads), weights


class AttentionHeads(nn.Module):
    """Multi-head attention without output projection: the heads side by side.

    Args:
        embed_dim: d.
        num_heads: M; must divide d.
        dropout: probability of dropping an attention weight.
        kdim: width of the keys; None for d.
        vdim: width of the values; None for d.

    Raises:
        ValueError: the heads do not divide the width.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, embed_dim)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        # as fairseq's attention starts
        gain = 2**-0.5 if {kdim, vdim} <= {None, embed_dim} else 1.0
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads side by side, and the weights that are asked for.

        Args:
            query: (T, B, d).
            key: (S, B, kdim).
            value: (S, B, vdim).
            key_padding_mask: (B, S), true for padding; None for none.
            need_weights: return the weights, averaged over the heads; without them it is faster.
            attn_mask: added to the scores, (T, S); None for none.

        Returns:
            (T, B, d), and the weights (B, T, S) or None.
        """
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        dropout = self.dropout if self.training else 0.0
        heads = attention_heads(*projected, self.num_heads, key_padding_mask, attn_mask, dropout)
        if not need_weights:
            return heads, None
        queries, keys, _ = (split_heads(x, self.num_heads) for x in projected)
        scores = queries @ keys.mT * queries.size(-1) ** -0.5
        mask = merge_masks(key_padding_mask, attn_mask, scores.dtype)
        return heads, (scores if mask is None else scores + mask).softmax(-1).mean(1)


def attention_heads(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return heads side by side, by torch's fused attention, which forms no matrix of weights.

    Args:
        queries: projected, (T, B, d).
        keys: projected, (S, B, d).
        values: projected, (S, B, d).
        num_heads: M.
        key_padding_mask: (B, S), true for padding; None for none.
        attn_mask: added to the scores, (T, S); None for none.
        dropout: probability of dropping a weight.

    Returns:
        (T, B, d).
    """
    queries, keys, values = (split_heads(x, num_heads) for x in (queries, keys, values))
    mask = merge_masks(key_padding_mask, attn_mask, queries.dtype)
    heads = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    # (B, M, T, h) -> (T, B, d)
    return heads.permute(2, 0, 1, 3).flatten(2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Map (T, B, d) to (B, M, T, h), a view."""
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def merge_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return what both masks add to scores (B, M, T, S); None for nothing.

    Args:
        key_padding_mask: (B, S), true for padding; None for none.
        attn_mask: (T, S), added to the scores, or true where a query does not see a key; or None.
        dtype: of the scores.
    """
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    if key_padding_mask is not None:
        # (B, S) -> (B, 1, 1, S)
        padding = key_padding_mask[:, None, None].bool()
        mask = torch.zeros_like(padding, dtype=dtype) if mask is None else mask
        mask = mask.masked_fill(padding, float("-inf"))
    return None if mask is None else mask.to(dtype)


class BranchedFeedForward(nn.Module):
    """``Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O/S))`` of given heads (equations 6 and 7).

    The matrices are those of a transformer layer: ``out_proj``, whose columns i·h to (i+1)·h are
    W^{O_i}, and ``fc1`` and ``fc2``, whose rows and columns i·f to (i+1)·f belong to FFN_i.

    Args:
        embed_dim: d; a multiple of M.
        ffn_embed_dim: M·f, or f of a shared network.
        weights: κ and α of M branches.
        activation: what stands between the layers of FFN_i.
        activation_dropout: dropout of its inner vectors: the probability, or a module.
        shared: whether one network, of the width ``ffn_embed_dim``, is that of all branches.

    Attributes:
        adds_residual: whether it takes the input of the attention, too, and adds that itself.

    Raises:
        ValueError: ``ffn_embed_dim`` is not a multiple of M, and not of a shared network.
    """

    adds_residual = False

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        weights: BranchWeights,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float | nn.Module = 0.0,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.branches = weights.branches
        self.shared = shared
        if not shared and ffn_embed_dim % self.branches:
            raise ValueError(
                f"`ffn_embed_dim` is {ffn_embed_dim}: the {self.branches} branches share it, so "
                "it must be a multiple of `branches`"
            )
        self.weights = weights
        self.activation = activation
        if not isinstance(activation_dropout, nn.Module):
            activation_dropout = nn.Dropout(activation_dropout)
        self.activation_dropout = activation_dropout
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)
        self.fc1 = nn.Linear(embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self._folded: InferenceCache[tuple[Tensor, ...]] = InferenceCache()

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side, (…, M·h), to the weighted sum of the branches, (…, d)."""
        into, bias, alpha, out, out_bias = self._folded_matrices()
        # (…, M·h) -> (N, M·h) -> (N, M·f)
        inner = self.activation(branch_linear(heads.flatten(0, -2), into, bias))
        inner = self.activation_dropout(inner)
        if self.shared:
            inner = weighted_sum(inner.unflatten(1, (self.branches, -1)), alpha)
        return F.linear(inner, out, out_bias).view(*heads.shape[:-1], len(out))

    def _folded_matrices(self) -> tuple[Tensor, ...]:
        """Return what :meth:`_fold` does, computed once for all of inference."""
        if self.training or torch.is_grad_enabled():
            return self._fold()
        return self._folded.get(self.parameters(), self._fold_for_all_precisions)

    def _fold(self) -> tuple[Tensor, ...]:
        """Fold κ, α and the output projection into the layers of the networks.

        Returns:
            Matrices (M, h, f) and biases (M, f) of the first layers, from heads to inner vectors;
            α (M,); matrix (d, M·f) and bias (d,) of the second ones, α included, or the matrix
            (d, f) of a shared one without α.
        """
        kappa, alpha = self.weights()
        return *self._fold_first(kappa), self._cast(alpha), *self._fold_second(alpha)

    def _fold_first(self, kappa: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices (M, h, f) and biases (M, f) from heads to inner vectors."""
        first, bias = self._first_layers()
        into = (torch.bmm(first, self._projections()) * kappa[:, None, None]).mT
        shared_bias = (kappa[:, None] / self.weights.applied_sum).to(bias.dtype)
        return self._cast(into), torch.addcmul(bias, shared_bias, first @ self.out_proj.bias)

    def _fold_second(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrix (d, M·f), or (d, f) of a shared network, and bias (d,)."""
        out = self.fc2.weight
        if not self.shared:
            out = out * alpha.repeat_interleave(out.size(1) // self.branches)
        # not all of it where only some branches contribute
        bias = self.fc2.bias * (alpha.sum() / self.weights.applied_sum)
        return self._cast(out), self._cast(bias)

    def _first_layers(self) -> tuple[Tensor, Tensor]:
        """Return matrices (M, f, d) and biases (M, f) of the first layers."""
        if self.shared:
            shape = self.branches, *self.fc1.weight.shape
            return self.fc1.weight.expand(shape), self.fc1.bias.expand(shape[:2])
        shape = self.branches, -1
        return self.fc1.weight.unflatten(0, shape), self.fc1.bias.unflatten(0, shape)

    def _projections(self) -> Tensor:
        """Return W^{O_i} of all branches, (M, d, h)."""
        return self.out_proj.weight.unflatten(1, (self.branches, -1)).transpose(0, 1)

    def _cast(self, x: Tensor) -> Tensor:
        # κ and α are in single precision, whatever the matrices are in
        return x.to(self.fc1.weight.dtype)

    def _fold_for_all_precisions(self) -> tuple[Tensor, ...]:
        # the next pass may be under another autocast than this one
        with torch.autocast(self.fc1.weight.device.type, enabled=False):
            return self._fold()

    def train(self, mode: bool = True) -> BranchedFeedForward:
        """Set the module in training mode or out of it."""
        if mode:
            # an optimizer is about to change the weights, behind autograd's back
            self._folded.clear()
        return super().train(mode)


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``Σ_i weights_i x_i``, (N, w), of ``x`` (N, M, w) and ``weights`` (M,)."""
    # on a CPU faster than a product of such a thin matrix
    return (x * weights[:, None]).sum(1)


def branch_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the first layers of all branches at once, ``x_i weight_i + bias_i`` of each branch i.

    A batched product whose results lie one after the other would have to be copied between the
    layouts forward and backward: this one reads and writes each branch's columns in place. On a CPU
    a whole model trains about a seventh faster for it.

    Under autocast the product has its dtype, like that of any linear layer. Gradients have no
    gradients of their own, and ``torch.func`` has none.

    Args:
        x: heads side by side, (N, M·h), or other vectors.
        weight: (M, h, f).
        bias: (M, f).

    Returns:
        Inner vectors side by side, (N, M·f).
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.double:
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return _BranchLinear.apply(x, weight, bias)


def _by_branch(x: Tensor, branches: int) -> Tensor:
    """Return a view (M, N, w) of ``x`` (N, M·w)."""
    return x.unflatten(1, (branches, -1)).transpose(0, 1)


class _BranchLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        branches = len(weight)
        result = x.new_empty(len(x), bias.numel())
        torch.baddbmm(
            bias.unsqueeze(1), _by_branch(x, branches), weight, out=_by_branch(result, branches)
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        branches = len(weight)
        grads = _by_branch(grad, branches)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            torch.bmm(grads, weight.mT, out=_by_branch(grad_x, branches))
        if ctx.needs_input_grad[1]:
            # (M, h, N), (M, N, f) -> (M, h, f)
            grad_weight = torch.bmm(_by_branch(x, branches).mT, grads)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).unflatten(0, (branches, -1))
        return grad_x, grad_weight, grad_bias
