"""Attention for both readings, by torch's fused attention.

Shapes: B sentences, T queries, S keys, M heads, d model width, h head width (d/M).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_heads(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the heads side by side, (T, B, d), without a matrix of weights.

    Queries (T, B, d), keys and values (S, B, d) are already projected. ``key_padding_mask`` (B, S)
    is true for padding; ``attn_mask`` (T, S) is added to the scores, or true for hidden keys.
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
    """Return what both masks add to the scores (B, M, T, S); None if there are none."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    if key_padding_mask is not None:
        # (B, S) -> (B, 1, 1, S)
        padding = key_padding_mask[:, None, None].bool()
        mask = torch.zeros_like(padding, dtype=dtype) if mask is None else mask
        mask = mask.masked_fill(padding, float("-inf"))
    return None if mask is None else mask.to(dtype)
