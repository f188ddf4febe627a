"""Branched attention: each head has a feed-forward network of its own, and κ and α weigh them.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), equations 5 to 7: ::

    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
    output = Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O))

FFN_i has 1/M of the inner width. One bias b^O and one bias of the second layers do for all
branches, as Σ κ_i = Σ α_i = 1: the matrices and biases together are a plain transformer's.

Nothing stands between W^{O_i} and the first layer of FFN_i: their product is formed once, and no
branch has a vector of the model's width for each token.

Shapes: B sentences, T queries, S keys, N tokens, M branches, d model width, h head width, f inner
width of a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout, MultiheadAttention
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_linear import branch_linear
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights


class AttentionHeads(MultiheadAttention):
    """fairseq's multi-head attention without output projection: the heads side by side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.out_proj = nn.Identity()
        # fairseq would hand the projection's weights to torch otherwise
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
        """Return heads (T, B, d) and attention weights, for the arguments that fairseq's takes."""
        if incremental_state is None and not (need_weights or need_head_weights or before_softmax):
            return self._attend(query, key, value, key_padding_mask, attn_mask), None
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

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> Tensor:
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        # (T, B, d) -> (B, M, T, h)
        queries, keys, values = (
            x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3) for x in projected
        )
        mask = attn_mask
        if key_padding_mask is not None:
            # (B, S) -> (B, 1, 1, S)
            padding = key_padding_mask[:, None, None].bool()
            mask = torch.zeros_like(padding, dtype=queries.dtype) if mask is None else mask
            mask = mask.masked_fill(padding, float("-inf"))
        module = self.dropout_module
        dropout = module.p if module.training or module.apply_during_inference else 0.0
        heads = F.scaled_dot_product_attention(
            queries, keys, values, None if mask is None else mask.to(queries.dtype), dropout
        )
        # (B, M, T, h) -> (T, B, d)
        return heads.permute(2, 0, 1, 3).flatten(2)


class BranchedFeedForward(nn.Module):
    """``Σ_i α_i FFN_i(κ_i (head_i W^{O_i} + b^O))`` of given heads (equations 6 and 7).

    The matrices are those of a transformer layer: ``out_proj``, whose columns i·h to (i+1)·h are
    W^{O_i}, and ``fc1`` and ``fc2``, whose rows and columns i·f to (i+1)·f belong to FFN_i.

    Args:
        embed_dim: d; a multiple of M.
        ffn_embed_dim: M·f.
        weights: κ and α of M branches.
        activation: between the layers of FFN_i.
        activation_dropout: of its inner vectors.

    Raises:
        ValueError: ``ffn_embed_dim`` is not a multiple of M.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        weights: BranchWeights,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.branches = weights.branches
        if ffn_embed_dim % self.branches:
            raise ValueError(
                f"the feed-forward width is {ffn_embed_dim}: the {self.branches} branches share "
                "it, so it must be a multiple of the number of heads"
            )
        self.weights = weights
        self.activation = activation
        # which --retain-dropout keeps outside of training
        self.activation_dropout = FairseqDropout(activation_dropout, type(self).__name__)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)
        self.fc1 = nn.Linear(embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self._folded: tuple[list[tuple[int, int]], tuple[Tensor, ...]] | None = None

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side (…, M·h) to (…, d)."""
        constant = not (self.training or torch.is_grad_enabled())
        into, bias, out, out_bias = self._fold_once() if constant else self._fold()
        # (…, M·h) -> (N, M·h) -> (N, M·f)
        inner = self.activation(branch_linear(heads.flatten(0, -2), into, bias))
        inner = self.activation_dropout(inner)
        return F.linear(inner, out, out_bias).view(*heads.shape[:-1], len(out))

    def _fold(self) -> tuple[Tensor, ...]:
        """Return matrices and biases: (M, h, f), (M, f); after the activation (d, M·f), (d,).

        κ and α are in them.
        """
        kappa, alpha = self.weights()
        dtype = self.fc1.weight.dtype
        # (M·f, d) -> (M, f, d); (d, M·h) -> (M, d, h)
        first = self.fc1.weight.unflatten(0, (self.branches, -1))
        projection = self.out_proj.weight.unflatten(1, (self.branches, -1)).transpose(0, 1)
        into = (torch.bmm(first, projection) * kappa[:, None, None]).mT
        bias = torch.addcmul(
            self.fc1.bias.unflatten(0, (self.branches, -1)),
            kappa[:, None].to(dtype),
            first @ self.out_proj.bias,
        )
        out = self.fc2.weight * alpha.repeat_interleave(first.size(1))
        # not all of it where only some branches contribute
        out_bias = self.fc2.bias * alpha.sum()
        # κ and α are in single precision, whatever the matrices are in
        return into.to(dtype), bias, out.to(dtype), out_bias.to(dtype)

    def train(self, mode: bool = True) -> BranchedFeedForward:
        """Set the module in training mode or out of it."""
        if mode:
            # an optimizer is about to change the weights, and fairseq's do so behind autograd's
            # back
            self._folded = None
        return super().train(mode)

    def _fold_once(self) -> tuple[Tensor, ...]:
        """Return the same, formed anew only where a weight has changed since the last time."""
        now = [(x.data_ptr(), x._version) for x in self.parameters()]
        if self._folded is None or self._folded[0] != now:
            # what follows may have another precision
            with torch.autocast(self.fc1.weight.device.type, enabled=False):
                self._folded = now, self._fold()
        return self._folded[1]


class BranchedAttention(nn.Module):
    """Heads and the networks behind them, with the arguments and results of fairseq's attention."""

    def __init__(self, heads: AttentionHeads, feed_forward: BranchedFeedForward) -> None:
        super().__init__()
        self.heads = heads
        self.feed_forward = feed_forward

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sum (T, B, d) of the branches (equation 7), and attention weights."""
        heads, weights = self.heads(query, *args, **kwargs)
        return self.feed_forward(heads), weights
