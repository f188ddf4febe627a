"""The values of a memory: weighted sums of the rows that were selected, and their gradients.

Lample et al. 2019 (arXiv:1907.05242), equation 3 and section 3.1. Neither pass holds a vector for
each selected row of each token: the sums are formed where the rows lie, and the gradient of a row
is the weighted sum of the output gradients of the tokens that read it.

Shapes: N tokens, R rows read by a token, K rows, d width, U rows read at least once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def weighted_sum(values: Tensor, rows: Tensor, weights: Tensor, sparse: bool = True) -> Tensor:
    """Return ``Σ_r weights[t, r] · values[rows[t, r]]`` for each token t: (N, d).

    Args:
        values: (K, d).
        rows: (N, R), numbers of rows; a row may occur more than once.
        weights: (N, R).
        sparse: whether the gradient of ``values`` is a coalesced sparse tensor of the rows that
            were read, or a dense one.
    """
    summed = F.embedding_bag(
        rows, values.detach(), per_sample_weights=weights.to(values.dtype), mode="sum"
    )
    if not values.requires_grad:
        return summed
    return _WriteRows.apply(summed, values, rows, weights.detach(), sparse)


class _WriteRows(torch.autograd.Function):
    """The identity of ``summed``, whose backward pass adds the gradient of ``values``."""

    @staticmethod
    def forward(
        ctx: Any, summed: Tensor, values: Tensor, rows: Tensor, weights: Tensor, sparse: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.shape, ctx.sparse = values.shape, sparse
        return summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        # tokens of which nothing depends, such as those of fairseq's batches for workers that have
        # none left, have read in vain: their rows are to stay as they are
        used = grad.ne(0).any(-1)
        if not used.all():
            rows, weights, of_used = rows[used], weights[used], grad[used]
        else:
            of_used = grad
        touched, grads = row_gradients(rows, weights, of_used)
        if ctx.sparse:
            of_values = rows_as_gradient(touched, grads, ctx.shape)
        else:
            of_values = grads.new_zeros(ctx.shape).index_copy_(0, touched, grads)
        return grad, of_values, None, None, None


def rows_as_gradient(rows: Tensor, grads: Tensor, shape: torch.Size) -> Tensor:
    """Return the sparse gradient of ``shape`` (K, d) that has ``grads`` (U, d) in ``rows`` (U,).

    The rows have to rise; torch then need not sort them again.
    """
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), grads, shape, is_coalesced=True, check_invariants=False
    )


def add_row_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two sparse gradients (K, d), coalesced.

    torch would lay their rows end to end on a GPU, pass after pass, until there are more than the
    table has.
    """
    rows = torch.cat([one._indices()[0], other._indices()[0]])
    grads = torch.cat([one._values(), other._values()])
    touched, summed = row_gradients(rows.unsqueeze(1), grads.new_ones(len(rows), 1), grads)
    return rows_as_gradient(touched, summed, one.shape)


def row_gradients(rows: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that were read, (U,) rising, and their gradients (U, d).

    Args:
        rows: (N, R), which rows each token read.
        weights: (N, R), with which weights.
        grad: (N, d), the gradient of the weighted sums.
    """
    by_row, reads = rows.flatten().sort()
    touched, counts = torch.unique_consecutive(by_row, return_counts=True)
    if len(touched) == 0:
        return touched, grad.new_empty(0, grad.size(-1))
    # a row's gradient is a weighted sum over its readers, as a token's output is one over its rows
    grads = F.embedding_bag(
        reads.div(rows.size(-1), rounding_mode="floor"),
        grad.contiguous(),
        counts.cumsum(0) - counts,
        per_sample_weights=weights.flatten()[reads].to(grad.dtype),
        mode="sum",
    )
    return touched, grads
