"""The reading ``as-written``: each attention head has a feed-forward network of its own.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), equations 5 to 7: ::

    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
    output = Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O/S))

FFN_i has 1/M of the inner width. The κ_i, like the α_i, sum to S, which is 1 or M. All branches
share one bias b^O and one bias of the second layers, and each takes 1/S of it, so that matrices and
biases together are those of a plain transformer.

W^{O_i} and the first layer of FFN_i are multiplied in advance, since nothing stands between them:
no branch holds a vector of the model's width for each token.

Shapes: T queries, B sentences, S keys, N tokens, M branches, d model width, h head width (d/M), f
inner width of a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.weighted_transformer.attention import attention_heads, merge_masks, split_heads
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, FoldedLayer


class AttentionHeads(nn.Module):
    """Multi-head attention without output projection; M must divide d.

    ``kdim`` and ``vdim`` are the widths of keys and values; None for d.
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
        # fairseq's initialization
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
        """Return the heads side by side, (T, B, d), and their mean weights, (B, T, S), or None.

        Queries, keys and values are (T, B, d), (S, B, kdim) and (S, B, vdim); for the masks see
        :func:`attention_heads`. ``need_weights`` costs time.
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


class BranchedAttention(nn.Module):
    """Attention heads and the feed-forward networks behind them.

    For 8 branches in a model of width 512: ::

        heads = AttentionHeads(512, 8)
        attention = BranchedAttention(heads, BranchedFeedForward(512, 2048, BranchWeights(8)))
        output, _ = attention(x, x, x, need_weights=False)  # x and output: (T, B, 512)

    :class:`BranchWeights` says what an optimizer must do for κ and α.
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
        """Return the weighted sum of the branches, (T, B, d), and the attention weights."""
        heads, weights = self.heads(query, *args, **kwargs)
        return self.feed_forward(heads), weights


class BranchedFeedForward(FoldedLayer):
    """``Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O/S))`` of given heads (equations 6 and 7).

    The matrices are those of a transformer layer. Columns i·h to (i+1)·h of ``out_proj`` are
    W^{O_i}. Rows i·f to (i+1)·f of ``fc1`` and these columns of ``fc2`` belong to FFN_i;
    ``ffn_embed_dim`` is M·f.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        weights: BranchWeights,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float | nn.Module = 0.0,
    ) -> None:
        super().__init__()
        self.branches = weights.branches
        if ffn_embed_dim % self.branches:
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

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side, (…, M·h), to the weighted sum of branches, (…, d)."""
        into, bias, out, out_bias = self.folded()
        # (…, M·h) -> (N, M·h) -> (N, M·f)
        inner = self.activation(branch_linear(heads.flatten(0, -2), into, bias))
        inner = self.activation_dropout(inner)
        return F.linear(inner, out, out_bias).view(*heads.shape[:-1], len(out))

    def fold(self) -> tuple[Tensor, ...]:
        """Fold κ, α and the output projection into the layers of the networks.

        Returns matrices (M, h, f) and biases (M, f) of the first layers, from heads to inner
        vectors, and matrix (d, M·f) and bias (d,) of the second layers.
        """
        kappa, alpha = self.weights()
        dtype = self.fc1.weight.dtype
        by_branch = self.branches, -1
        # (M, f, d), (M, f), (M, d, h)
        first, bias = self.fc1.weight.unflatten(0, by_branch), self.fc1.bias.unflatten(0, by_branch)
        projections = self.out_proj.weight.unflatten(1, by_branch).transpose(0, 1)
        into = (torch.bmm(first, projections) * kappa[:, None, None]).mT
        share = (kappa[:, None] / self.weights.applied_sum).to(bias.dtype)
        bias = torch.addcmul(bias, share, first @ self.out_proj.bias)
        out = self.fc2.weight * alpha.repeat_interleave(self.fc2.in_features // self.branches)
        # only a part of the bias, if only some branches contribute
        out_bias = self.fc2.bias * (alpha.sum() / self.weights.applied_sum)
        # κ and α are always in single precision
        return into.to(dtype), bias, out.to(dtype), out_bias.to(dtype)


def branch_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x_i weight_i + bias_i`` of all branches i side by side, (N, M·f).

    ``x`` is (N, M·h), ``weight`` (M, h, f), ``bias`` (M, f). Columns are read and written in place:
    a plain batched product copies between the layouts, which makes training a whole model about a
    seventh slower on a CPU. There are no second derivatives.
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
