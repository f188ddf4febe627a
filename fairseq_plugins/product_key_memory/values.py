"""The values of a memory: weighted sums of selected rows of a table, and their gradients.

Lample et al. 2019 (arXiv:1907.05242), equation 3 and section 3.1. :func:`plain_weighted_sum` is the
equation, with autograd's gradient. :class:`Values` does not copy all selected rows: it sums them in
place, and the gradient of a row is a weighted sum of the output gradients of its tokens.

Shapes: N tokens, R rows read by a token, K rows, d width, U rows read at least once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba
from fairseq_plugins.product_key_memory.search import (
    needs_plain_operations,
    refuse_higher_derivatives,
)

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
        self.beside_autograd = False
        # A buffer for the next gradient of rows: a CPU takes longer to get new memory than to
        # compute the gradient (a fifth of a training step with 512² slots).
        self.spare: Tensor | None = None

    def reset_parameters(self) -> None:
        """Draw new values."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffer out of copies and files."""
        return {**vars(self), "spare": None}

    def keep_gradient_beside_autograd(self) -> None:
        """Hide the values from training code that would hold a dense gradient of all K rows.

        In training, a backward pass still adds a sparse gradient of the rows that were read to
        ``weight.grad``. The next update reuses its memory: copy it to keep it.
        """
        self.weight.requires_grad_(False)
        self.beside_autograd = self.sparse = True

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return ``Σ_r weights[t, r] · weight[rows[t, r]]`` for each token t, (N, d) (equation 3).

        ``rows`` and ``weights`` are (N, R).
        """
        table, weights = self.weight, weights.to(self.weight.dtype)
        plain = needs_plain_operations(self.kernel, weights)
        if self.beside_autograd and self.training and torch.is_grad_enabled():
            # a leaf of autograd that stands for the values in this pass
            table = table.detach().requires_grad_()
            table.register_post_accumulate_grad_hook(partial(self._add_gradient, plain))
        if plain:
            return plain_weighted_sum(table, rows, weights, self.sparse)
        # not every torch has the gradient of the weights in bfloat16 on a GPU (its issue 185808)
        in_pieces = table.dtype == torch.bfloat16 and table.device.type != "cpu"
        summed = (_SumRows.apply if in_pieces else sum_rows)(table.detach(), rows, weights)
        if not table.requires_grad:
            return summed
        return _WriteRows.apply(summed, table, rows, weights.detach(), self)

    def _add_gradient(self, plain: bool, leaf: Tensor) -> None:
        """Add the sparse gradient of ``leaf`` to that of the values."""
        grad, leaf.grad = leaf.grad, None
        if plain and not grad.is_meta:
            grad = merge_rows(grad)
        else:
            # torch forgets that it is coalesced
            grad = rows_as_gradient(grad._indices()[0], grad._values(), grad.shape)
        if self.weight.grad is not None:
            grad = add_row_gradients(self.weight.grad, grad)
        self.weight.grad = grad

    def reuse(self, grad: Tensor) -> None:
        """Take the memory of ``grad``, sparse (K, d), for the next gradient; nobody may use it."""
        rows = grad._values()
        width, numbers = rows.size(1), rows.untyped_storage().nbytes() // rows.element_size()
        self.spare = rows.detach().as_strided((numbers // width, width), (width, 1), 0)

    def buffer(self, count: int, like: Tensor) -> Tensor:
        """Return an uninitialised tensor (count, d) with the dtype and width of ``like``."""
        rows, self.spare = self.spare, None
        kind = (like.dtype, like.size(1))
        if rows is not None and (rows.dtype, rows.size(1)) == kind and len(rows) >= count:
            return rows[:count]
        # free the old buffer first; the new one has some room to spare
        del rows
        room = min(count + count // 8, len(self.weight))
        return like.new_empty(room, like.size(1))[:count]


def plain_weighted_sum(table: Tensor, rows: Tensor, weights: Tensor, sparse: bool) -> Tensor:
    """Return the sums (N, d) of equation 3; a ``sparse`` gradient lists a row for each read."""
    # (N, R) -> (N, R, d)
    selected = F.embedding(rows, table, sparse=sparse)
    # (N, R, 1) · (N, R, d) -> (N, d)
    return (weights.unsqueeze(-1) * selected).sum(1)


def sum_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sums (N, d) of equation 3, without copies of the rows."""
    return F.embedding_bag(rows, table, per_sample_weights=weights, mode="sum")


class _SumRows(torch.autograd.Function):
    """Like :func:`sum_rows`; the gradient of the weights copies some tokens' rows at a time."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(table, rows)
        return sum_rows(table, rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, rows = ctx.saved_tensors
        parts = zip(rows.split(TOKENS_AT_A_TIME), grad.split(TOKENS_AT_A_TIME), strict=True)
        # (n, R, d) · (n, d, 1) -> (n, R, 1)
        products = [table[part] @ slope.unsqueeze(-1) for part, slope in parts]
        return None, None, torch.cat(products).squeeze(-1)


class _WriteRows(torch.autograd.Function):
    """Returns ``summed`` unchanged; its backward pass computes the gradient of the ``table``."""

    @staticmethod
    def forward(
        ctx: Any, summed: Tensor, table: Tensor, rows: Tensor, weights: Tensor, values: Values
    ) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.values = values
        return summed.view_as(summed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_higher_derivatives()
        rows, weights = ctx.saved_tensors
        # a token without a gradient must not touch its rows: a worker that has run out of data
        # gets a dummy batch
        rows = rows.masked_fill(grad.eq(0).all(-1, keepdim=True), NO_ROW)
        values, shape = ctx.values, ctx.values.weight.shape
        touched, grads = row_gradients(rows, weights, grad, values)
        if values.sparse:
            table_grad = rows_as_gradient(touched, grads, shape)
        else:
            table_grad = grads.new_zeros(shape).index_copy_(0, touched, grads)
        return grad, table_grad, None, None, None


# --- gradients of rows


def row_gradients(
    rows: Tensor, weights: Tensor, grad: Tensor, values: Values | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows that were read, (U,) rising, and their gradients (U, d).

    ``rows`` and ``weights`` are (N, R), with ``NO_ROW`` for reads that do not count; ``grad``
    (N, d) is the gradient of the sums. The host waits once, for U and the number of reads. The
    result is in the buffer of ``values``, if they keep their gradient beside autograd.
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
    if values is not None and values.beside_autograd and use_numba(grad):
        grads = values.buffer(count, grad)
        ends = F.pad(starts, (0, 1), value=length)
        cpu_kernels.sum_rows(grad.contiguous(), tokens, weights, ends, grads)
    elif count == 0:
        grads = grad.new_empty(0, grad.size(-1))
    else:
        grads = F.embedding_bag(
            tokens, grad.contiguous(), starts, per_sample_weights=weights, mode="sum"
        )
    return by_row[starts], grads


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


def merge_rows(grad: Tensor) -> Tensor:
    """Coalesce ``grad``, sparse (K, d), and drop rows of zeros; the host waits."""
    grad = grad.coalesce()
    used = grad.values().ne(0).any(-1)
    return rows_as_gradient(grad.indices()[0, used], grad.values()[used], grad.shape)


def add_row_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two sparse gradients (K, d), both coalesced.

    On a GPU torch would only concatenate them, and soon hold more rows than the table.
    """
    rows = torch.cat([one._indices()[0], other._indices()[0]])
    grads = torch.cat([one._values(), other._values()])
    touched, summed = row_gradients(rows.unsqueeze(1), grads.new_ones(len(rows), 1), grads)
    return rows_as_gradient(touched, summed, one.shape)
