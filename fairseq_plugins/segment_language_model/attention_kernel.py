"""The kernel for CPUs: attention to a window of earlier tokens, with a gradient written by hand.

It computes the same as :func:`.attention.plain_attention` (Transformer-XL, section 3.3 and appendix
B; all-attention, equations 12 and 13), one block of queries at a time, with only the keys that the
block sees. The scores are by far the largest tensors, and autograd would copy them several times.

Shapes: H heads, B streams, T queries (the segment), S keys (earlier tokens and segment), D
distances, G sets of relative keys (1 for all heads, or H), W distances with a bias, N persistent
vectors, d_h head width; in a block: C queries that see at most K keys, F distances beyond a clamp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.precision import without_autocast
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


def window_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rel_keys: Tensor | Clamped | None,
    window: Window,
    dropout: float = 0.0,
    position_query: Tensor | None = None,
    distance_bias: Tensor | None = None,
    persistent: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Compute :func:`.attention.plain_attention` without second derivatives."""
    if torch._C._are_functorch_transforms_active():
        raise _no_higher_derivatives("torch.func")
    rows = rows_by_distance(keys, rel_keys, distance_bias)
    position_query = query if position_query is None else position_query
    position_query, keys, values = (x.to(query.dtype) for x in (position_query, keys, values))
    rows = None if rows is None else rows.to(query.dtype)
    grad = torch.is_grad_enabled()
    inputs = query, position_query, keys, values, rows
    merged = persistent is not None or epsilon > 0
    with without_autocast(query):
        attended, lse = _WindowAttention.apply(
            *inputs, distance_bias, window, dropout, merged, grad
        )
        if epsilon:
            _, whole_lse = _WindowAttention.apply(*inputs, None, window, 0.0, True, grad)
            attended, lse = _add_epsilon(attended, lse, whole_lse, epsilon)
        if persistent is None:
            return attended
        # streams share the vectors: (H, B, T, d_h) -> (H, 1, B·T, d_h), (H, N, d_h) -> (H, 1, N, …)
        queries = query.flatten(1, 2).unsqueeze(1)
        vectors = (x.unsqueeze(1).to(query.dtype) for x in persistent)
        by_vectors, vectors_lse = _WindowAttention.apply(
            queries, queries, *vectors, None, None, EVERY_KEY, dropout, True, grad
        )
        by_vectors, vectors_lse = by_vectors.view(query.shape), vectors_lse.view(query.shape[:3])
        if epsilon:
            by_vectors, vectors_lse = _add_epsilon(by_vectors, vectors_lse, vectors_lse, epsilon)
        # the vectors' part of the one sum over all keys (equation 13)
        share = torch.sigmoid(vectors_lse - lse).unsqueeze(-1).to(attended.dtype)
        return torch.lerp(attended, by_vectors, share)


def _add_epsilon(
    attended: Tensor, masked: Tensor, whole: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add ε Σ exp(s) to the sum by which ``attended`` (H, B, T, d_h) was divided.

    ``masked`` and ``whole`` (H, B, T) are log Σ m·exp(s) and log Σ exp(s). Returns the values, and
    the log of the new sum.
    """
    # both sums are 0 where a token sees nothing, and its output is 0, too
    ratio = (masked - whole).nan_to_num(nan=0.0) - math.log(epsilon)
    factor = torch.sigmoid(ratio).unsqueeze(-1)
    return attended * factor.to(attended.dtype), masked - F.logsigmoid(ratio)


class _WindowAttention(torch.autograd.Function):
    """Values y and log-sum-exps z of each query's keys, and the gradient.

    For one query: content query c, position query q, keys k and values v as rows, relative keys p
    and bias b by distance, dropout's factors m (0 or 1 / (1 - rate)); ``shift`` goes from distances
    to keys (appendix B)::

        s = k c + shift(p q + b)      w = softmax(s)      y = vᵀ (m∘w)      z = log Σ exp(s)

    The gradients, given g of y and h of z::

        dv = (m∘w) gᵀ      ds = w ∘ (m∘(v g) - δ)      δ = Σ w∘m∘(v g) - h = y·g - h
        dc = kᵀ ds         dk = ds cᵀ
        e = unshift(ds)    dq = pᵀ e      dp = e qᵀ      db = e
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        position_query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor | None,
        distance_bias: Tensor | None,
        window: Window,
        dropout: float,
        return_lse: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor | None]:
        heads, streams, queries, width = query.shape
        # heads lie side by side in memory, as the output projection reads them; the first tokens of
        # a stream, which may see no key, are in no block
        out = query.new_zeros(streams, queries, heads, width).permute(2, 0, 1, 3)
        lse = None
        if return_lse:
            lse = out.new_full(out.shape[:3], -torch.inf, dtype=_precise(out))
        fused = _FUSED is not None and out.device.type == "cpu" and dropout == 0
        # the fused kernel ignores NaN, fails without streams, and float16 may overflow in it
        fused = fused and not differentiable and streams > 0 and out.dtype != torch.float16
        work, stored = _Workspace(out), []
        for block in split_into_blocks(query, keys, window, fused):
            bias = None
            if window != EVERY_KEY:
                bias = work.bias(block, position_query, rows, distance_bias, window)
                bias = bias.flatten(0, 1)
            # (H, B, C or K, d_h) -> (H·B, C or K, d_h)
            c, k, v = block.select_rows((query,), (keys, values))
            if fused:
                bias = None if bias is None else bias[None]
                y, block_lse = _FUSED(c[None], k[None], v[None], attn_mask=bias, scale=1.0)
                y, block_lse = y[0], block_lse[0]
            else:
                s = work.product("scores", c, k.mT, bias)
                w = torch.softmax(s, dim=-1)
                block_lse = _log_sum_exp(s, w) if return_lse else None
                mask = torch.rand_like(w, dtype=torch.float32) >= dropout if dropout > 0 else None
                y = work.product("values", _drop(w, mask, dropout), v)
                if differentiable:
                    stored += [w, mask]
            block.select_queries(out).copy_(y.unflatten(0, (heads, streams)))
            if lse is not None:
                block.select_queries(lse).flatten(0, 1).copy_(block_lse)
        if differentiable:
            inputs = (query, position_query, keys, values, rows, distance_bias)
            ctx.save_for_backward(*inputs, out, *stored)
            ctx.window, ctx.dropout = window, dropout
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise _no_higher_derivatives("create_graph=True")
        saved = ctx.saved_tensors  # read once: activation checkpointing forbids a second read
        inputs, out, stored = saved[:6], saved[6], saved[7:]
        query, position_query, keys, values, rows, _ = inputs
        grads = [None if x is None else x.new_zeros(x.shape) for x in inputs]
        grad_query, grad_position_query, grad_keys, grad_values, grad_rows, grad_bias = grads
        grad_out, work = grad_out.contiguous(), _Workspace(out)
        delta = (grad_out * out).sum(dim=-1, keepdim=True).contiguous()
        if grad_lse is not None:
            delta -= grad_lse.unsqueeze(-1).to(delta.dtype)
        blocks = split_into_blocks(query, keys, ctx.window)
        for block, w, mask in zip(blocks, stored[::2], stored[1::2], strict=True):
            c, g, block_delta, k, v = block.select_rows((query, grad_out, delta), (keys, values))
            work.add_product(block.select_keys(grad_values), _drop(w, mask, ctx.dropout).mT, g)
            ds = work.product("scores", g, v.mT)
            if mask is not None:
                ds.mul_(mask).div_(1 - ctx.dropout)
            ds.sub_(block_delta).mul_(w)
            work.add_product(block.select_keys(grad_keys), ds.mT, c)
            grad_part = block.select_queries(grad_query).flatten(0, 1)
            grad_part.copy_(work.product("queries", ds, k))
            if rows is not None:
                e = work.by_distance(block, ds, heads=len(query))
                if grad_bias is not None:
                    biased, part = block.biased(e, grad_bias, ctx.window.farthest)
                    part += biased.sum(dim=(1, 2), dtype=part.dtype)
                p = block.select_distances(rows)
                far = e.size(3) - p.size(1)
                if far > 0:
                    # the first row collects the gradients of all distances that use it
                    e[..., far] += e[..., :far].sum(dim=-1)
                # (H, B, C, K + 1) -> (G, H/G·B·C, K + 1 - F)
                e = e.view(len(p), -1, e.size(3))[..., far:]
                q = block.select_queries(position_query).reshape(len(p), -1, p.size(2))
                block.select_distances(grad_rows).add_(e.mT @ q)
                part = block.select_queries(grad_position_query)
                part.copy_((e @ p).view(part.shape))
        return *grads, None, None, None, None


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
        return torch.baddbmm(bias, left, right, out=out)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of (H·B, m, k) and (H·B, k, n) to ``total`` (H, B, m, n)."""
        if total.is_contiguous():
            total.flatten(0, 1).baddbmm_(left, right)
        else:
            # `total` is part of a larger tensor, and baddbmm_ would loop over its heads
            total.flatten(0, 1).add_(self.product("sum", left, right))

    def by_distance(self, block: Block, grad_scores: Tensor, heads: int) -> Tensor:
        """Return gradients by key (H·B, C, K) as gradients by distance (H, B, C, K + 1)."""
        grad_scores = grad_scores.unflatten(0, (heads, -1))
        out = self.take("by distance", *grad_scores.shape[:3], block.keys + 1)
        undo_rel_shift(grad_scores, out)
        return out

    def bias(
        self,
        block: Block,
        query: Tensor,
        rows: Tensor | None,
        distance_bias: Tensor | None,
        window: Window,
    ) -> Tensor:
        """Return what to add to the products of queries and keys, (H, B, C, K).

        It sums the score and the bias of each distance, and caps both outside the window.
        """
        block_query = block.select_queries(query)
        shape = (*block_query.shape[:3], block.keys + 1)
        by_distance = self.take("by distance", *shape)
        if rows is None:
            by_distance.zero_()
        else:
            p = block.select_distances(rows)
            far = shape[3] - p.size(1)
            # (H, B, C, d_h) -> (G, H/G·B·C, d_h) x (G, d_h, K + 1 - F) -> (H, B, C, K + 1 - F)
            q = block_query.reshape(len(p), -1, p.size(2))
            out = by_distance.view(*q.shape[:2], shape[3])[..., far:]
            torch.bmm(q, p.mT, out=out)
            if far > 0:
                # distances beyond the clamp use the first row's score
                by_distance[..., :far] = by_distance[..., far : far + 1]
            if distance_bias is not None:
                biased, part = block.biased(by_distance, distance_bias, window.farthest)
                # (H, W) -> (H, 1, 1, W)
                biased += part[:, None, None].to(biased.dtype)
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


def _drop(weights: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return weights if mask is None else weights * mask / (1 - dropout)


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
