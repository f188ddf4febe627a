"""The values of a memory: weighted sums of selected rows of a table, and their gradients.

Lample et al. 2019 (arXiv:1907.05242), equation 3 and section 3.1. :func:`plain_weighted_sum` is the
equation, with autograd's gradient. :class:`Values` does not copy all selected rows: it sums them in
place, and the gradient of a row is a weighted sum of the output gradients of its tokens.

Shapes: N tokens, R rows read by a token, K rows, d width, U rows read at least once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from fairseq_plugins.product_key_memory.search import needs_plain_operations

# The row number of a read that does not count; larger than any other.
NO_ROW = torch.iinfo(torch.int64).max
# Tokens whose rows are copied at a time.
TOKENS_AT_A_TIME = 1024


class Values(nn.EmbeddingBag):
    """A table of K values, drawn from N(0, 1/d), that one or more memories read.

    Its gradient is dense, or ``sparse``: rows that were not read have none. ``kernel`` is one of
    :data:`.search.KERNELS`.
    """

    def __init__(self, slots: int, width: int, kernel: str = "fast", sparse: bool = False) -> None:
        # torch's data parallelism expects sparse gradients only of its own classes
        super().__init__(slots, width, mode="sum", sparse=sparse)
        self.kernel = kernel

    def reset_parameters(self) -> None:
        """Draw new values."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return ``Σ_r weights[t, r] · weight[rows[t, r]]`` for each token t, (N, d) (equation 3).

        ``rows`` and ``weights`` are (N, R).
        """
        return self.weighted_sum(self.weight, rows, weights)

    def weighted_sum(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sums (N, d) of equation 3, of rows of ``table`` (K, d)."""
        weights = weights.to(table.dtype)
        if needs_plain_operations(self.kernel, weights):
            return plain_weighted_sum(table, rows, weights, self.sparse)
        # not every torch has the gradient of the weights in bfloat16 on a GPU (its issue 185808)
        in_pieces = table.dtype == torch.bfloat16 and table.device.type != "cpu"
        fast_sum = _WeightedSumInPieces.apply if in_pieces else fast_weighted_sum
        summed = fast_sum(table.detach(), rows, weights)
        if not table.requires_grad:
            return summed
        return _TableGradient.apply(summed, table, rows, weights.detach(), self)

    def row_gradients(self, rows: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that were read, (U,) rising, and their gradients (U, d).

        ``rows`` and ``weights`` are (N, R), with ``NO_ROW`` for reads that do not count; ``grad``
        (N, d) is the gradient of the sums. The host waits once, for U and the number of reads.
        """
        by_row, reads = rows.flatten().sort()
        counted = by_row.ne(NO_ROW)
        changes = by_row.diff(prepend=by_row.new_full((1,), -1)).ne(0) & counted
        count, length = torch.stack([changes.sum(), counted.sum()]).tolist()
        reads = reads[:length]
        starts = _starts(changes, count)
        tokens = reads.div(rows.size(-1), rounding_mode="floor")
        weights = weights.flatten()[reads].to(grad.dtype)
        # a row's gradient is a weighted sum over its readers, just as an output is over its rows
        return by_row[starts], self.segment_sum(grad.contiguous(), tokens, weights, starts)

    def segment_sum(self, grad: Tensor, tokens: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
        """Return U sums (U, d) of ``weights[p] · grad[tokens[p]]``, from p = ``starts[u]`` on.

        ``tokens`` and ``weights`` are (P,); no sum is empty.
        """
        if len(starts) == 0:
            return grad.new_empty(0, grad.size(-1))
        return F.embedding_bag(tokens, grad, starts, per_sample_weights=weights, mode="sum")


def plain_weighted_sum(table: Tensor, rows: Tensor, weights: Tensor, sparse: bool) -> Tensor:
    """Return the sums (N, d) of equation 3; a ``sparse`` gradient lists a row for each read."""
    # (N, R) -> (N, R, d)
    selected = F.embedding(rows, table, sparse=sparse)
    # (N, R, 1) · (N, R, d) -> (N, d)
    return (weights.unsqueeze(-1) * selected).sum(1)


def fast_weighted_sum(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sums (N, d) of equation 3, without copies of the rows."""
    return F.embedding_bag(rows, table, per_sample_weights=weights, mode="sum")


class _WeightedSumInPieces(torch.autograd.Function):
    """:func:`fast_weighted_sum`; the weights' gradient copies some tokens' rows at a time."""

    @staticmethod
    def forward(ctx: FunctionCtx, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(table, rows)
        return fast_weighted_sum(table, rows, weights)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, rows = ctx.saved_tensors
        parts = zip(rows.split(TOKENS_AT_A_TIME), grad.split(TOKENS_AT_A_TIME), strict=True)
        # (n, R, d) · (n, d, 1) -> (n, R, 1)
        products = [table[part] @ part_grad.unsqueeze(-1) for part, part_grad in parts]
        return None, None, torch.cat(products).squeeze(-1)


class _TableGradient(torch.autograd.Function):
    """Returns ``summed`` unchanged; its backward pass computes the gradient of the ``table``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        summed: Tensor,
        table: Tensor,
        rows: Tensor,
        weights: Tensor,
        values: Values,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.values = values
        return summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        # a token without a gradient must not touch its rows: a worker that has run out of data
        # gets a dummy batch
        rows = rows.masked_fill(grad.eq(0).all(-1, keepdim=True), NO_ROW)
        values, shape = ctx.values, ctx.values.weight.shape
        touched, grads = values.row_gradients(rows, weights, grad)
        if values.sparse:
            table_grad = rows_as_gradient(touched, grads, shape)
        else:
            table_grad = grads.new_zeros(shape).index_copy_(0, touched, grads)
        return grad, table_grad, None, None, None


def _starts(changes: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` true ``changes``; the host does not wait."""
    # all other places are written beyond the end
    targets = torch.where(changes, changes.cumsum(0) - 1, count)
    starts = targets.new_empty(count + 1)
    starts.scatter_(0, targets, torch.arange(len(targets), device=targets.device))
    return starts[:count]


def rows_as_gradient(rows: Tensor, grads: Tensor, shape: torch.Size) -> Tensor:
    """Return a sparse gradient of ``shape`` (K, d) with ``grads`` (U, d) in rising ``rows``."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), grads, shape, is_coalesced=True, check_invariants=False
    )
