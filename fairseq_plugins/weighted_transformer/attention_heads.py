"""Attention without output projection: the heads side by side.

Shapes: B sentences, T queries, S keys, M heads, d model width, h head width (d/M).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionHeads(nn.Module):
    """Multi-head attention without output projection.

    Args:
        embed_dim: d, a multiple of M.
        num_heads: M.
        dropout: probability of dropping an attention weight.
        kdim: width of the keys; None for d.
        vdim: width of the values; None for d.
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
        """Return the heads, (T, B, d), and the weights averaged over them, (B, T, S), or None.

        Args:
            query: (T, B, d).
            key: (S, B, kdim).
            value: (S, B, vdim).
            key_padding_mask: (B, S), true for padding; None for none.
            need_weights: whether to return the weights; without them it is faster.
            attn_mask: (T, S), added to the scores, or true where a query does not see a key.
        """
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        dropout = self.dropout if self.training else 0.0
        heads = attention_heads(*projected, self.num_heads, key_padding_mask, attn_mask, dropout)
        if not need_weights:
            return heads, None
        queries, keys, _ = (_split_heads(x, self.num_heads) for x in projected)
        scores = queries @ keys.mT * queries.size(-1) ** -0.5
        mask = _merge_masks(key_padding_mask, attn_mask, scores.dtype)
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
    """Return heads (T, B, d) of projected queries (T, B, d), and keys and values (S, B, d).

    torch's fused attention forms no matrix of weights. The masks are those of
    :class:`AttentionHeads`.
    """
    queries, keys, values = (_split_heads(x, num_heads) for x in (queries, keys, values))
    mask = _merge_masks(key_padding_mask, attn_mask, queries.dtype)
    heads = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    # (B, M, T, h) -> (T, B, d)
    return heads.permute(2, 0, 1, 3).flatten(2)


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Map (T, B, d) to (B, M, T, h), a view."""
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def _merge_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return what both masks add to scores (B, M, T, S); None for nothing."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    if key_padding_mask is not None:
        # (B, S) -> (B, 1, 1, S)
        padding = key_padding_mask[:, None, None].bool()
        mask = torch.zeros_like(padding, dtype=dtype) if mask is None else mask
        mask = mask.masked_fill(padding, float("-inf"))
    return None if mask is None else mask.to(dtype)
