"""The fast attention of a segment to a window of earlier tokens, with a hand-written gradient.

It computes the same as :func:`.attention.plain_attention` (Transformer-XL, section 3.3 and appendix
B; all-attention, equations 12 and 13), one block of queries at a time, with only the keys that the
block sees. The scores are by far the largest tensors, and autograd would copy them several times.

Shapes: H heads, B streams, T queries (the segment), S keys (earlier tokens and segment), D
distances, G sets of relative keys (1 for all heads, or H), W distances with a bias, d_h head width;
in a block: C queries that see at most K keys, F distances beyond a clamp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.segment_language_model.attention_blocks import (
    EVERY_KEY,
    Block,
    Clamped,
    Window,
    hidden_by_window,
    rel_shift,
    rows_by_distance,
    split_into_blocks,
    undo_rel_shift,
)

# PyTorch's softmax attention for CPUs. It takes (B, H, C, d_h) and a bias for each score, and gives
# values and log Σ exp(score) without storing scores. Its public wrapper does not return that sum.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class _Workspace:
    """Buffers that all blocks share: allocating memory would take as long as filling it."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}
        self._limits: dict[tuple[int, int, int], Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer ``name`` in this shape, uninitialised."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)

    def product(self, name: str, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply (H·B, m, k) with (H·B, k, n) into the buffer ``name``, (H·B, m, n)."""
        out = self.take(name, *left.shape[:2], right.size(2))
        if bias is None:
            return torch.bmm(left, right, out=out)
        return torch.baddbmm(bias.flatten(0, 1), left, right, out=out)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of (H·B, m, k) and (H·B, k, n) to ``total`` (H, B, m, n)."""
        if total.is_contiguous():
            total.flatten(0, 1).baddbmm_(left, right)
        else:
            # `total` is part of a larger tensor, and baddbmm_ would loop over its heads
            total.flatten(0, 1).add_(self.product("sum", left, right))

    def bias(
        self,
        block: Block,
        query: Tensor,
        rel_keys: Tensor,
        distance_bias: Tensor | None,
        window: Window,
    ) -> Tensor:
        """Return what to add to the products of queries and keys, (H, B, C, K).

        It sums the score and the bias of each distance, and caps both outside the window.
        """
        block_query = block.select_queries(query)
        shape = (*block_query.shape[:3], block.keys + 1)
        by_distance = self.take("by distance", *shape)
        if rel_keys.size(1) > 0:
            rows = block.select_distances(rel_keys)
            far = shape[3] - rows.size(1)
            # (H, B, C, d_h) -> (G, H/G·B·C, d_h) x (G, d_h, K + 1 - F) -> (H, B, C, K + 1 - F)
            grouped = block_query.reshape(rows.size(0), -1, rows.size(2))
            out = by_distance.view(*grouped.shape[:2], shape[3])[..., far:]
            torch.bmm(grouped, rows.transpose(1, 2), out=out)
            if far > 0:
                # distances beyond the clamp use the first row's score
                by_distance[..., :far] = by_distance[..., far : far + 1]
            if distance_bias is not None:
                biased, bias_part = block.biased(by_distance, distance_bias, window.farthest)
                # (H, W) -> (H, 1, 1, W)
                biased += bias_part[:, None, None].to(biased.dtype)
        else:
            by_distance.zero_()
        bias = rel_shift(by_distance, block.keys)
        self._hide(bias, block, window)
        return bias

    def _hide(self, bias: Tensor, block: Block, window: Window) -> None:
        """Make scores (H, B, C, K) outside the window negligible, at both ends of the keys."""
        near = max(0, block.offset - window.nearest + 1)
        far = min(near, max(0, block.offset + block.queries - 1 - window.farthest))
        for first, end in ((0, far), (near, block.keys)):
            if first < end:
                # most blocks share the same corner
                corner = (block.offset - first, block.queries, end - first)
                if corner not in self._limits:
                    hidden = hidden_by_window(*corner, window, bias)
                    limits = bias.new_full(hidden.shape, torch.inf)
                    self._limits[corner] = limits.masked_fill_(hidden, torch.finfo(bias.dtype).min)
                # faster than masked_fill_ on a CPU; NaN stays and reaches earlier queries, as it
                # does anyway through the values: weight 0 does not remove NaN
                bias[..., first:end].clamp_max_(self._limits[corner])


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        content_query: Tensor,
        position_query: Tensor | None,
        keys: Tensor,
        values: Tensor,
        rel_keys: Tensor,
        distance_bias: Tensor | None,
        window: Window,
        dropout: float,
        return_lse: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor | None]:
        heads, streams, queries, width = content_query.shape
        # heads lie side by side in memory, as the output projection reads them
        out = content_query.new_empty(streams, queries, heads, width).permute(2, 0, 1, 3)
        lse = out.new_empty(out.shape[:3], dtype=_precise(out)) if return_lse else None
        stored: list[Tensor | None] = []
        work = _Workspace(out)
        fused = _FUSED is not None and out.device.type == "cpu" and dropout == 0
        # the fused kernel ignores NaN, fails without streams, and float16 may overflow in it
        fused = fused and not differentiable and streams > 0 and out.dtype != torch.float16
        by_distance = content_query if position_query is None else position_query
        for block in split_into_blocks(content_query, keys, window, fused):
            query, key, value = (
                part.flatten(0, 1)
                for part in (
                    block.select_queries(content_query),
                    block.select_keys(keys),
                    block.select_keys(values),
                )
            )
            bias = None
            if window != EVERY_KEY:
                bias = work.bias(block, by_distance, rel_keys, distance_bias, window)
            # the first tokens of a stream may see no key: their output is zero
            blind = max(0, window.nearest - block.offset) if block.keys > 0 else block.queries
            if fused and block.keys > 0:
                # (H·B, C, d_h) -> (1, H·B, C, d_h)
                block_values, block_lse = _FUSED(
                    query[None],
                    key[None],
                    value[None],
                    attn_mask=None if bias is None else bias.flatten(0, 1)[None],
                    scale=1.0,
                )
                attended = block_values[0]
                if lse is not None:
                    block.select_queries(lse).flatten(0, 1).copy_(block_lse[0])
            else:
                scores = work.product("scores", query, key.transpose(1, 2), bias)
                weights = torch.empty_like(scores)
                if block.keys > 0:
                    torch.softmax(scores, dim=-1, out=weights)
                    weights[:, :blind] = 0.0
                    if lse is not None:
                        block.select_queries(lse).flatten(0, 1).copy_(_log_sum_exp(scores, weights))
                keep = None
                if dropout > 0:
                    keep = torch.rand_like(weights, dtype=torch.float32) >= dropout
                dropped = weights if keep is None else weights * keep / (1 - dropout)
                attended = work.product("values", dropped, value)
                if differentiable:
                    stored += [weights, keep]
            # (H·B, C, d_h) -> (H, B, C, d_h)
            block.select_queries(out).copy_(attended.unflatten(0, (heads, streams)))
            if blind > 0:
                block.select_queries(out)[..., :blind, :] = 0.0
                if lse is not None:
                    block.select_queries(lse)[..., :blind] = -torch.inf
        if differentiable:
            inputs = (content_query, position_query, keys, values, rel_keys, distance_bias)
            ctx.save_for_backward(*inputs, out, *stored)
            ctx.window, ctx.dropout = window, dropout
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise _no_higher_derivatives("create_graph=True")
        saved = ctx.saved_tensors  # read once: activation checkpointing forbids a second read
        inputs, out, stored = saved[:6], saved[6], saved[7:]
        content_query, position_query, keys, values, rel_keys, distance_bias = inputs
        grad_content_query = content_query.new_empty(content_query.shape)
        grad_position_query = None
        if position_query is not None:
            grad_position_query = position_query.new_zeros(position_query.shape)
        grad_keys, grad_values, grad_rel_keys = (
            tensor.new_zeros(tensor.shape) for tensor in (keys, values, rel_keys)
        )
        grad_distance_bias = None
        if distance_bias is not None:
            grad_distance_bias = distance_bias.new_zeros(distance_bias.shape)
        grad_out, work = grad_out.contiguous(), _Workspace(out)
        # the softmax subtracts this from every weight's gradient: Σ w·(dL/dw) = y·(dL/dy)
        common = (grad_out * out).sum(dim=-1, keepdim=True).contiguous()
        if grad_lse is not None:
            common -= grad_lse.unsqueeze(-1).to(common.dtype)
        blocks = split_into_blocks(content_query, keys, ctx.window)
        for block, weights, keep in zip(blocks, stored[::2], stored[1::2], strict=True):
            query, grad, common_part, key, value = (
                part.flatten(0, 1)
                for part in (
                    *map(block.select_queries, (content_query, grad_out, common)),
                    *map(block.select_keys, (keys, values)),
                )
            )
            dropped = weights if keep is None else weights * keep / (1 - ctx.dropout)
            # (H·B, K, C) x (H·B, C, d_h) -> (H·B, K, d_h)
            work.add_product(block.select_keys(grad_values), dropped.transpose(1, 2), grad)
            # (H·B, C, d_h) x (H·B, d_h, K) -> (H·B, C, K)
            grad_weights = work.product("scores", grad, value.transpose(1, 2))
            if keep is not None:
                grad_weights.mul_(keep).div_(1 - ctx.dropout)
            # hidden keys have weight 0, so their scores' gradient is 0
            grad_scores = grad_weights.sub_(common_part).mul_(weights)
            work.add_product(block.select_keys(grad_keys), grad_scores.transpose(1, 2), query)
            grad_query = work.product("queries", grad_scores, key)
            if block.keys > 0 and rel_keys.size(1) > 0:
                shape = block.select_queries(content_query).shape[:3]
                by_distance = work.take("by distance", *shape, block.keys + 1)
                undo_rel_shift(grad_scores.view(*shape, block.keys), by_distance)
                if distance_bias is not None:
                    biased, grad_bias_part = block.biased(
                        by_distance, grad_distance_bias, ctx.window.farthest
                    )
                    grad_bias_part += biased.sum(dim=(1, 2), dtype=distance_bias.dtype)
                rows = block.select_distances(rel_keys)
                far = block.keys + 1 - rows.size(1)
                if far > 0:
                    # the first row collects the gradients of all distances that use it
                    by_distance[..., far] += by_distance[..., :far].sum(dim=-1)
                # (H, B, C, K + 1) -> (G, H/G·B·C, K + 1 - F) x (G, K + 1 - F, d_h)
                grouped = by_distance.view(rows.size(0), -1, block.keys + 1)[..., far:]
                queries = content_query if position_query is None else position_query
                queries = block.select_queries(queries).reshape(rows.size(0), -1, rows.size(2))
                block.select_distances(grad_rel_keys).add_(grouped.transpose(1, 2) @ queries)
                if position_query is None:
                    grad_query.view(queries.shape).baddbmm_(grouped, rows)
                else:
                    by_rows = (grouped @ rows).view(*shape, rows.size(2))
                    block.select_queries(grad_position_query).copy_(by_rows)
            block.select_queries(grad_content_query).flatten(0, 1).copy_(grad_query)
        return (
            grad_content_query,
            grad_position_query,
            grad_keys,
            grad_values,
            grad_rel_keys,
            grad_distance_bias,
            None,
            None,
            None,
            None,
        )


def _log_sum_exp(scores: Tensor, weights: Tensor) -> Tensor:
    """Return log Σ exp(score), (H·B, C), given scores and their softmax, (H·B, C, K)."""
    # exp(s) / w equals the sum for any key
    largest, largest_weight = (t.amax(-1).to(_precise(t)) for t in (scores, weights))
    return largest - largest_weight.log_()


def _no_higher_derivatives(asked_for: str) -> ValueError:
    return ValueError(
        f"{asked_for} with `kernel` 'fast', whose gradient is written by hand and has no "
        "derivatives of its own: build the block or network with kernel='plain'"
    )


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def window_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rel_keys: Tensor | Clamped | None,
    window: Window,
    dropout: float = 0.0,
    position_query: Tensor | None = None,
    distance_bias: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`.attention.plain_attention` without second derivatives."""
    if torch._C._are_functorch_transforms_active():
        raise _no_higher_derivatives("torch.func")
    rows = rows_by_distance(keys, rel_keys, distance_bias)
    if rows is None:
        rows = query.new_empty(1, 0, query.size(-1))
    if position_query is not None:
        position_query = position_query.to(query.dtype)
    with torch.autocast(query.device.type, enabled=False):
        return _WindowAttention.apply(
            query,
            position_query,
            *(tensor.to(query.dtype) for tensor in (keys, values, rows)),
            distance_bias,
            window,
            dropout,
            return_lse,
            torch.is_grad_enabled(),
        )
