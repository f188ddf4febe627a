"""Attention of a segment to a window of earlier tokens and to persistent vectors, and its gradient.

Transformer-XL, section 3.3 and appendix B; all-attention, equations 12 and 13; for all heads and
streams at once. Queries are taken in blocks, each with just the keys that its window reaches. The
gradient is written out: the scores by far outnumber everything else, and automatic differentiation
would copy them several times over.

Shapes: H heads, B streams, T queries (the segment), S keys (memory and segment), D distances,
G groups of heads with distance vectors of their own (1 or H), N persistent vectors, d_h head width;
in a block: C queries that see at most K keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The wider a block, the more hidden scores it holds; the narrower, the smaller its products. A
# processor's caches hold the scores of 64 queries; a GPU wants more work in each kernel.
QUERY_BLOCK = 64
QUERY_BLOCK_ON_GPU = 512

UNLIMITED = sys.maxsize


class Window(NamedTuple):
    """The distances that a query sees: ``nearest`` 0 includes its own token, 1 starts before it."""

    nearest: int
    farthest: int = UNLIMITED


class _Block(NamedTuple):
    """C queries from ``start`` on, and the K keys from ``first`` on that some of them see."""

    start: int
    queries: int
    first: int
    keys: int
    offset: int  # the distance of the first query to the first key

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return the block's part (H, B, C, d_h) of one vector a query."""
        return tensor.narrow(2, self.start, self.queries)

    def of_keys(self, tensor: Tensor, persistent: Tensor) -> Tensor:
        """Return its part of one vector a key, then the persistent ones: (H, B, K + N, d_h)."""
        context = tensor.narrow(2, self.first, self.keys)
        if persistent.size(1) == 0:
            return context
        heads, streams = context.shape[:2]
        return torch.cat([context, persistent.unsqueeze(1).expand(heads, streams, -1, -1)], dim=2)

    def of_distances(self, table: Tensor) -> Tensor:
        """Return the rows (G, K + 1, d_h) of a table of falling distances that ends with -1.

        They begin with the distance of the last query to the first key.
        """
        return table.narrow(1, table.size(1) - 1 - self.offset - self.queries, self.keys + 1)


def _blocks(query: Tensor, keys: Tensor, window: Window) -> Iterator[_Block]:
    queries, remembered = query.size(2), keys.size(2) - query.size(2)
    least = QUERY_BLOCK if query.device.type == "cpu" else QUERY_BLOCK_ON_GPU
    # of equal size: a small last block would cost as much time as a full one
    block = -(-queries // max(1, queries // least))
    for start in range(0, queries, block):
        size = min(block, queries - start)
        own = remembered + start
        first = max(0, own - window.farthest)
        seen = max(0, own + size - window.nearest - first)
        yield _Block(start, size, first, seen, own - first)


def align_by_distance(scores: Tensor, num_keys: int) -> Tensor:
    """Turn scores by distance into scores by key, without a copy (Transformer-XL, appendix B).

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


def spread_by_distance(scores: Tensor) -> Tensor:
    """Turn scores by key (…, C, K) into scores by distance (…, C, K + 1), zero where no key is.

    The inverse of :func:`align_by_distance`, which gives the gradient of one from the other's.
    """
    *batch, queries, keys = scores.shape
    spread = scores.new_empty(*batch, queries, keys + 1)
    flat = spread.view(*batch, queries * (keys + 1))
    flat.narrow(-1, 0, queries - 1).zero_()
    flat.narrow(-1, queries * (keys + 1) - 1, 1).zero_()
    align_by_distance(spread, keys).copy_(scores)
    return spread


def hidden_by_window(offset: int, queries: int, keys: int, window: Window, like: Tensor) -> Tensor:
    """Return which keys are outside the window: bool (C, K), True where hidden.

    ``offset`` is the distance between the first query and the first key.
    """
    rows = torch.arange(offset, offset + queries, device=like.device).unsqueeze(1)
    distance = rows - torch.arange(keys, device=like.device)
    return (distance < window.nearest) | (distance > window.farthest)


def _hide(scores: Tensor, block: _Block, window: Window) -> None:
    """Make the scores (H, B, C, K) outside the window negligible; only the two ends have any."""
    near = max(0, block.offset - window.nearest + 1)
    far = min(near, max(0, block.offset + block.queries - 1 - window.farthest))
    for first, end in ((0, far), (near, block.keys)):
        if first < end:
            hidden = hidden_by_window(
                block.offset - first, block.queries, end - first, window, scores
            )
            scores[..., first:end].masked_fill_(hidden, torch.finfo(scores.dtype).min)


def _times_table(query: Tensor, rows: Tensor) -> Tensor:
    """Multiply queries (H, B, C, d_h) with distance vectors (G, K, d_h): (H, B, C, K)."""
    # (H, B, C, d_h) -> (G, H/G·B·C, d_h) x (G, d_h, K) -> (H, B, C, K)
    grouped = query.reshape(rows.size(0), -1, query.size(-1))
    return (grouped @ rows.transpose(1, 2)).view(*query.shape[:3], rows.size(1))


class _WindowAttention(torch.autograd.Function):
    """The function behind :func:`window_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        content_query: Tensor,
        position_query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        persistent_keys: Tensor,
        persistent_values: Tensor,
        window: Window,
        dropout: float,
        differentiable: bool,
    ) -> Tensor:
        out = torch.empty_like(content_query)
        kept: list[Tensor | None] = []
        for block in _blocks(content_query, keys, window):
            # (H, B, C, d_h) x (H, B, d_h, K + N) -> (H, B, C, K + N)
            scores = block.of_queries(content_query) @ block.of_keys(
                keys, persistent_keys
            ).transpose(-1, -2)
            if block.keys > 0:
                of_context = scores[..., : block.keys]
                if table.size(1) > 0:
                    by_distance = _times_table(
                        block.of_queries(position_query), block.of_distances(table)
                    )
                    of_context += align_by_distance(by_distance, block.keys)
                _hide(of_context, block, window)
            if scores.size(-1) == 0:
                block.of_queries(out).zero_()
                kept += [scores, None]
                continue
            weights = torch.softmax(scores, dim=-1)
            if persistent_keys.size(1) == 0 and block.offset < window.nearest:
                # the first tokens of a stream may see nothing at all; they attend to nothing
                weights[..., : window.nearest - block.offset, :] = 0.0
            keep = None
            if dropout > 0:
                keep = torch.rand_like(weights, dtype=torch.float32) >= dropout
            dropped = weights if keep is None else weights * keep / (1 - dropout)
            block.of_queries(out).copy_(dropped @ block.of_keys(values, persistent_values))
            if differentiable:
                kept += [weights, keep]
        if differentiable:
            ctx.save_for_backward(
                content_query,
                position_query,
                keys,
                values,
                table,
                persistent_keys,
                persistent_values,
                *kept,
            )
            ctx.window, ctx.dropout = window, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no second look
        inputs, kept = saved[:7], saved[7:]
        content_query, position_query, keys, values, table = inputs[:5]
        persistent_keys, persistent_values = inputs[5:]
        grads = (
            torch.empty_like(content_query),
            torch.zeros_like(position_query),
            *(torch.zeros_like(tensor) for tensor in inputs[2:]),
        )
        grad_content_query, grad_position_query, grad_keys, grad_values, grad_table = grads[:5]
        grad_persistent_keys, grad_persistent_values = grads[5:]
        blocks = _blocks(content_query, keys, ctx.window)
        for block, weights, keep in zip(blocks, kept[::2], kept[1::2], strict=True):
            grad = block.of_queries(grad_out)
            context = slice(block.first, block.first + block.keys)

            dropped = weights if keep is None else weights * keep / (1 - ctx.dropout)
            # (H, B, K + N, C) x (H, B, C, d_h) -> (H, B, K + N, d_h)
            grad_v = dropped.transpose(-1, -2) @ grad
            grad_weights = grad @ block.of_keys(values, persistent_values).transpose(-1, -2)
            if keep is not None:
                grad_weights = grad_weights * keep / (1 - ctx.dropout)
            # hidden keys have weight 0, so their scores' gradient is 0 without further ado
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            block.of_queries(grad_content_query).copy_(
                grad_scores @ block.of_keys(keys, persistent_keys)
            )
            grad_k = grad_scores.transpose(-1, -2) @ block.of_queries(content_query)
            if block.keys > 0 and table.size(1) > 0:
                rows = block.of_distances(table)
                by_distance = spread_by_distance(grad_scores[..., : block.keys])
                # (G, H/G·B·C, K + 1) x (G, K + 1, d_h) -> (H, B, C, d_h)
                grouped = by_distance.view(rows.size(0), -1, rows.size(1))
                block.of_queries(grad_position_query).copy_((grouped @ rows).view(grad.shape))
                query = block.of_queries(position_query).reshape(rows.size(0), -1, rows.size(2))
                block.of_distances(grad_table).add_(grouped.transpose(1, 2) @ query)
            grad_keys[:, :, context] += grad_k[:, :, : block.keys]
            grad_values[:, :, context] += grad_v[:, :, : block.keys]
            if persistent_keys.size(1) > 0:
                grad_persistent_keys += grad_k[:, :, block.keys :].sum(dim=1)
                grad_persistent_values += grad_v[:, :, block.keys :].sum(dim=1)
        return (*grads, None, None, None)


def window_attention(
    content_query: Tensor,
    position_query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor | None,
    persistent: tuple[Tensor, Tensor] | None,
    window: Window,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from each query to the tokens in its window and to the persistent vectors.

    The score of query t for the token at distance x is ``c_t·k_{t-x} + q_t·p_x``, c the content
    query and q the position query, for a persistent vector ``c_t·m_k``, and one softmax goes over
    all of them. A query that sees nothing gets zero.

    Args:
        content_query: (H, B, T, d_h), already divided by √d_h, as is the next.
        position_query: (H, B, T, d_h).
        keys: (H, B, S, d_h), the last T of them of the queries' own tokens.
        values: (H, B, S, d_h).
        table: p for the distances S - 1, or more, down to -1, (G, D, d_h); None for none.
        persistent: keys and values, each (H, N, d_h); None for none.
        window: the distances that a query sees.
        dropout: probability of dropping a weight.

    Returns:
        (H, B, T, d_h).
    """
    heads, _, _, head_dim = content_query.shape
    if table is None:
        table = content_query.new_empty(1, 0, head_dim)
    if persistent is None:
        none = content_query.new_empty(heads, 0, head_dim)
        persistent = (none, none)
    others = [
        tensor.to(content_query.dtype)
        for tensor in (position_query, keys, values, table, *persistent)
    ]
    with torch.autocast(content_query.device.type, enabled=False):
        return _WindowAttention.apply(
            content_query, *others, window, dropout, torch.is_grad_enabled()
        )
