"""Attention of a segment to a window of earlier tokens and to persistent vectors, and its gradient.

All-attention, equations 12 and 13, for all heads and streams at once. Queries are taken in blocks,
each with just the keys that its window reaches. The gradient is written out: the scores by far
outnumber everything else, and automatic differentiation would copy them several times over.

Shapes: H heads, B streams, T queries (the segment), S keys (memory and segment), D distances,
N persistent vectors, d_h head width; in a block: C queries that see at most K keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The wider a block, the more masked scores it holds; the narrower, the smaller its products.
QUERY_BLOCK = 64


class Window(NamedTuple):
    """The distances that a query sees: ``nearest`` 0 includes its own token, 1 starts before it."""

    nearest: int
    farthest: int


class _Block(NamedTuple):
    """C queries from ``start`` on, and the K keys from ``first`` on that some of them see."""

    start: int
    queries: int
    first: int
    keys: int
    offset: int  # the distance of the first query to the first key

    def vectors(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        persistent_keys: Tensor,
        persistent_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's queries (H, B, C, d_h), and keys and values (H, B, K + N, d_h)."""
        return (
            query.narrow(2, self.start, self.queries),
            _with_persistent(keys.narrow(2, self.first, self.keys), persistent_keys),
            _with_persistent(values.narrow(2, self.first, self.keys), persistent_values),
        )

    def distances(self, table: Tensor) -> Tensor:
        """Return the rows (K + 1, d_h) of a table of falling distances that ends with -1.

        They begin with the distance of the last query to the first key.
        """
        return table.narrow(0, table.size(0) - 1 - self.offset - self.queries, self.keys + 1)


def _blocks(queries: int, remembered: int, window: Window) -> Iterator[_Block]:
    for start in range(0, queries, QUERY_BLOCK):
        size = min(QUERY_BLOCK, queries - start)
        own = remembered + start
        first = max(0, own - window.farthest)
        keys = max(0, own + size - window.nearest - first)
        yield _Block(start, size, first, keys, own - first)


def align_by_distance(scores: Tensor, num_keys: int) -> Tensor:
    """Turn scores by distance into scores by key, without a copy.

    Args:
        scores: (…, C, K + 1), contiguous; column c of the last query is its score for key c, and
            of each query before for the key one further back.
        num_keys: K.

    Returns:
        (…, C, K), a view: entry (i, j) is entry (i, C - 1 - i + j) of ``scores``. In memory these
        rows lie K apart.
    """
    *batch, queries, columns = scores.shape
    flat = scores.view(*batch, queries * columns)
    return flat.narrow(-1, queries - 1, queries * num_keys).view(*batch, queries, num_keys)


def hidden_by_window(offset: int, queries: int, keys: int, window: Window, like: Tensor) -> Tensor:
    """Return which keys are outside the window: bool (C, K), True where hidden.

    ``offset`` is the distance between the first query and the first key.
    """
    rows = torch.arange(offset, offset + queries, device=like.device).unsqueeze(1)
    distance = rows - torch.arange(keys, device=like.device)
    return (distance < window.nearest) | (distance > window.farthest)


def _with_persistent(context: Tensor, persistent: Tensor) -> Tensor:
    """Append persistent vectors (H, N, d_h) to those of each stream: (H, B, K + N, d_h)."""
    heads, streams, _, _ = context.shape
    return torch.cat([context, persistent.unsqueeze(1).expand(heads, streams, -1, -1)], dim=2)


class _WindowAttention(torch.autograd.Function):
    """The function behind :func:`window_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        persistent_keys: Tensor,
        persistent_values: Tensor,
        window: Window,
        dropout: float,
        differentiable: bool,
    ) -> Tensor:
        inputs = (query, keys, values, table, persistent_keys, persistent_values)
        out = torch.empty_like(query)
        kept: list[Tensor | None] = []
        for block in _blocks(query.size(2), keys.size(2) - query.size(2), window):
            q, k, v = block.vectors(query, keys, values, persistent_keys, persistent_values)
            # (H, B, C, d_h) x (H, B, K + N, d_h) -> (H, B, C, K + N)
            scores = q @ k.transpose(-1, -2)
            if block.keys > 0:
                by_distance = q @ block.distances(table).t()
                of_context = scores[..., : block.keys]
                of_context += align_by_distance(by_distance, block.keys)
                hidden = hidden_by_window(block.offset, block.queries, block.keys, window, query)
                of_context.masked_fill_(hidden, torch.finfo(scores.dtype).min)
            if scores.size(-1) == 0:
                out.narrow(2, block.start, block.queries).zero_()
                kept += [scores, None]
                continue
            weights = torch.softmax(scores, dim=-1)
            if persistent_keys.size(1) == 0 and block.offset < window.nearest:
                # the first tokens of a stream may see nothing at all; they attend to nothing
                weights.masked_fill_(hidden.all(dim=-1, keepdim=True), 0.0)
            keep = None
            if dropout > 0:
                keep = torch.rand_like(weights, dtype=torch.float32) >= dropout
            dropped = weights if keep is None else weights * keep / (1 - dropout)
            out.narrow(2, block.start, block.queries).copy_(dropped @ v)
            if differentiable:
                kept += [weights, keep]
        if differentiable:
            ctx.save_for_backward(*inputs, *kept)
            ctx.window, ctx.dropout = window, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        inputs, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        query, keys, values, table, persistent_keys, persistent_values = inputs
        grad_query, grad_table = torch.empty_like(query), torch.zeros_like(table)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        grad_persistent_keys = torch.zeros_like(persistent_keys)
        grad_persistent_values = torch.zeros_like(persistent_values)
        blocks = _blocks(query.size(2), keys.size(2) - query.size(2), ctx.window)
        for block, weights, keep in zip(blocks, kept[::2], kept[1::2], strict=True):
            q, k, v = block.vectors(query, keys, values, persistent_keys, persistent_values)
            grad = grad_out.narrow(2, block.start, block.queries)

            dropped = weights if keep is None else weights * keep / (1 - ctx.dropout)
            # (H, B, K + N, C) x (H, B, C, d_h) -> (H, B, K + N, d_h)
            grad_v = dropped.transpose(-1, -2) @ grad
            grad_weights = grad @ v.transpose(-1, -2)
            if keep is not None:
                grad_weights = grad_weights * keep / (1 - ctx.dropout)
            # hidden keys have weight 0, so their scores' gradient is 0 without further ado
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_q = grad_scores @ k
            grad_k = grad_scores.transpose(-1, -2) @ q
            if block.keys > 0:
                by_distance = grad_scores.new_zeros(*grad.shape[:3], block.keys + 1)
                align_by_distance(by_distance, block.keys).copy_(grad_scores[..., : block.keys])
                grad_q += by_distance @ block.distances(table)
                # (H·B·C, K + 1) x (H·B·C, d_h) -> (K + 1, d_h)
                block.distances(grad_table).add_(by_distance.flatten(0, 2).t() @ q.flatten(0, 2))
            grad_query.narrow(2, block.start, block.queries).copy_(grad_q)
            grad_keys.narrow(2, block.first, block.keys).add_(grad_k[:, :, : block.keys])
            grad_values.narrow(2, block.first, block.keys).add_(grad_v[:, :, : block.keys])
            grad_persistent_keys += grad_k[:, :, block.keys :].sum(dim=1)
            grad_persistent_values += grad_v[:, :, block.keys :].sum(dim=1)
        return (
            grad_query,
            grad_keys,
            grad_values,
            grad_table,
            grad_persistent_keys,
            grad_persistent_values,
            None,
            None,
            None,
        )


def window_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    persistent_keys: Tensor,
    persistent_values: Tensor,
    window: Window,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from each query to the tokens in its window and to the persistent vectors.

    The score of query t for the token at distance x is ``q_t·(k_{t-x} + p_x)``, for a persistent
    vector ``q_t·m_k``, and one softmax goes over all of them. A query that sees nothing gets zero.

    Args:
        query: (H, B, T, d_h), already divided by √d_h.
        keys: (H, B, S, d_h), the last T of them of the queries' own tokens.
        values: (H, B, S, d_h).
        table: p for the distances S - 1 down to -1, (S + 1, d_h).
        persistent_keys: (H, N, d_h); N may be 0.
        persistent_values: (H, N, d_h).
        window: the distances that a query sees.
        dropout: probability of dropping a weight.

    Returns:
        (H, B, T, d_h).
    """
    others = [
        tensor.to(query.dtype)
        for tensor in (keys, values, table, persistent_keys, persistent_values)
    ]
    with torch.autocast(query.device.type, enabled=False):
        return _WindowAttention.apply(query, *others, window, dropout, torch.is_grad_enabled())
