"""Weighted sums of selected rows of a table of values, and their gradients.

Lample et al. 2019 (arXiv:1907.05242), equation 3 and section 3.1. :func:`plain_weighted_sum` is the
equation, with autograd's gradient. :func:`weighted_sum` does not copy all selected rows: it sums
them in place, and the gradient of a row is a weighted sum of the output gradients of its tokens.

An accelerator would make the host wait for the number of rows that were read. There, gradients
beside autograd are padded to a size that is known beforehand (:func:`padded_row_gradients`).

Shapes: N tokens, R rows read by a token, K rows, d width, U rows read at least once, P rows of a
padded gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba

# The row number of a read that does not count; larger than any other.
NO_ROW = torch.iinfo(torch.int64).max
# Tokens whose rows are copied at a time.
TOKENS_AT_A_TIME = 1024


def plain_weighted_sum(
    values: Tensor,
    rows: Tensor,
    weights: Tensor,
    sparse: bool = False,
    frozen: Tensor | None = None,
) -> Tensor:
    """Return ``Σ_r weights[t, r] · values[rows[t, r]]`` for each token t, (N, d) (equation 3).

    ``values`` are (K, d), ``rows`` and ``weights`` (N, R). Rows that are ``frozen`` (K,) get no
    gradient. A ``sparse`` gradient lists a row once for each read.
    """
    # (N, R) -> (N, R, d)
    read = F.embedding(rows, values, sparse=sparse)
    if frozen is not None:
        read = torch.where(frozen[rows].unsqueeze(-1), read.detach(), read)
    # (N, R, 1) · (N, R, d) -> (N, d)
    return (weights.to(values.dtype).unsqueeze(-1) * read).sum(1)


def weighted_sum(
    values: Tensor,
    rows: Tensor,
    weights: Tensor,
    sparse: bool = True,
    spare: SpareRows | None = None,
    frozen: Tensor | None = None,
) -> Tensor:
    """Return what :func:`plain_weighted_sum` does, faster.

    A ``sparse`` gradient is coalesced; with ``spare``, its buffers, it is padded on accelerators.
    """
    # not every torch has the gradient of the weights in bfloat16 on a GPU (its issue 185808)
    in_pieces = values.dtype == torch.bfloat16 and pads_rows(values)
    total = _SumRows.apply if in_pieces else sum_rows
    summed = total(values.detach(), rows, weights.to(values.dtype))
    if not values.requires_grad:
        return summed
    return _WriteRows.apply(summed, values, rows, weights.detach(), frozen, sparse, spare)


def sum_rows(values: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums (N, d) of equation 3."""
    return F.embedding_bag(rows, values, per_sample_weights=weights, mode="sum")


class _SumRows(torch.autograd.Function):
    """Like :func:`sum_rows`; the gradient of the weights copies some tokens' rows at a time."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(values, rows)
        return sum_rows(values, rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, rows = ctx.saved_tensors
        pieces = zip(rows.split(TOKENS_AT_A_TIME), grad.split(TOKENS_AT_A_TIME), strict=True)
        # (n, R, d) · (n, d, 1) -> (n, R, 1)
        products = [values[read] @ slope.unsqueeze(-1) for read, slope in pieces]
        return None, None, torch.cat(products).squeeze(-1)


class _WriteRows(torch.autograd.Function):
    """Returns ``summed`` unchanged; its backward pass computes the gradient of ``values``."""

    @staticmethod
    def forward(
        ctx: Any,
        summed: Tensor,
        values: Tensor,
        rows: Tensor,
        weights: Tensor,
        frozen: Tensor | None,
        sparse: bool,
        spare: SpareRows | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, frozen)
        ctx.shape, ctx.sparse, ctx.spare = values.shape, sparse, spare
        return summed.view_as(summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, frozen = ctx.saved_tensors
        padded = pads_rows(grad) and (ctx.spare is not None or not ctx.sparse)
        if padded:
            if frozen is not None:
                weights = weights.masked_fill(frozen[rows], 0)
            touched, grads = padded_row_gradients(rows, weights, grad, ctx.shape[0])
            if not ctx.sparse:
                grads = repeat_first(touched, grads)
        else:
            # a token without a gradient must not touch its rows: a worker that has run out of data
            # gets a dummy batch
            counted = grad.ne(0).any(-1, keepdim=True)
            if frozen is not None:
                counted = counted & ~frozen[rows]
            rows = rows.masked_fill(~counted, NO_ROW)
            touched, grads = row_gradients(rows, weights, grad, ctx.spare)
        if ctx.sparse:
            grad_values = rows_as_gradient(touched, grads, ctx.shape, padded)
        else:
            grad_values = grads.new_zeros(ctx.shape).index_copy_(0, touched, grads)
        return grad, grad_values, None, None, None, None, None


class SpareRows:
    """Reuses the buffer of row gradients, which has up to ``most`` rows, K.

    A CPU takes longer to get new memory than to compute the gradients. If gradients are added up or
    averaged before the update, their buffer is not given back, and the next one is new.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._free: Tensor | None = None
        self._lent: StorageWeakRef | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the buffer out of copies and files."""
        return SpareRows, (self.most,)

    def take(self, count: int, like: Tensor) -> Tensor:
        """Return an uninitialised tensor (count, d) with the dtype and width of ``like``."""
        rows, self._free = self._free, None
        if rows is not None and (rows.dtype, rows.size(1)) != (like.dtype, like.size(1)):
            rows = None
        if rows is None or len(rows) < count:
            # free the old buffer first; the new one has some room to spare
            rows = None
            rows = like.new_empty(min(count + count // 8, self.most), like.size(1))
        self._lent = StorageWeakRef(rows.untyped_storage())
        return rows[:count]

    def give_back(self, rows: Tensor) -> None:
        """Take back ``rows`` if they were taken last; nobody may use them afterwards."""
        storage = rows.untyped_storage()
        if self._lent is not None and StorageWeakRef(storage) == self._lent:
            length = storage.nbytes() // (rows.element_size() * rows.size(1))
            self._free = rows.detach().as_strided((length, rows.size(1)), (rows.size(1), 1), 0)
            self._lent = None


# --- gradients of rows


def pads_rows(x: Tensor) -> bool:
    """Return whether row gradients on the device of ``x`` are padded: on accelerators."""
    return x.device.type != "cpu"


def rows_as_gradient(
    rows: Tensor, grads: Tensor, shape: torch.Size, padded: bool = False
) -> Tensor:
    """Return a sparse gradient of ``shape`` (K, d) with ``grads`` (U, d) in rising ``rows``."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), grads, shape, is_coalesced=not padded, check_invariants=False
    )


def row_gradients(
    rows: Tensor, weights: Tensor, grad: Tensor, spare: SpareRows | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows that were read, (U,) rising, and their gradients (U, d).

    ``rows`` and ``weights`` are (N, R), with ``NO_ROW`` for reads that do not count; ``grad``
    (N, d) is the gradient of the sums. The host waits once, for U and the number of reads.
    """
    by_row, reads = rows.flatten().sort()
    counted = by_row.ne(NO_ROW)
    changes = _find_changes(by_row) & counted
    count, length = torch.stack([changes.sum(), counted.sum()]).tolist()
    reads = reads[:length]
    starts = _find_starts(changes, count)
    touched = by_row[starts]
    tokens = reads.div(rows.size(-1), rounding_mode="floor")
    weights = weights.flatten()[reads].to(grad.dtype)
    # a row's gradient is a weighted sum over its readers, just as an output is over its rows
    if spare is not None and use_numba(grad):
        grads = spare.take(count, grad)
        ends = F.pad(starts, (0, 1), value=length)
        cpu_kernels.sum_rows(grad.contiguous(), tokens, weights, ends, grads)
    elif count == 0:
        grads = grad.new_empty(0, grad.size(-1))
    else:
        grads = F.embedding_bag(
            tokens, grad.contiguous(), starts, per_sample_weights=weights, mode="sum"
        )
    return touched, grads


def padded_row_gradients(
    rows: Tensor, weights: Tensor, grad: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Return the rows that were read, (P,) rising, and their gradients (P, d).

    P is the number of reads, at most K, ``most``. Entries that are left over repeat the last row
    with gradients of zero. The host waits for nothing.
    """
    by_row, reads = rows.flatten().sort()
    size = min(len(reads), most)
    if size == 0:
        return by_row, grad.new_empty(0, grad.size(-1))
    starts = _find_starts(_find_changes(by_row), size)
    grads = F.embedding_bag(
        reads.div(rows.size(-1), rounding_mode="floor"),
        grad.contiguous(),
        starts,
        per_sample_weights=weights.flatten()[reads].to(grad.dtype),
        mode="sum",
    )
    return _take_rows(by_row, starts), grads


def repeat_first(rows: Tensor, grads: Tensor) -> Tensor:
    """Give all entries of a row in padded ``grads`` (P, d) the first one's gradient.

    Whichever entry is then written last, the result is the same.
    """
    return grads.index_select(0, torch.searchsorted(rows, rows))


def merge_rows(grad: Tensor) -> Tensor:
    """Coalesce ``grad``, sparse (K, d), and drop rows of zeros; the host waits."""
    grad = grad.coalesce()
    used = grad.values().ne(0).any(-1)
    return rows_as_gradient(grad.indices()[0, used], grad.values()[used], grad.shape)


def prepare_gradient(grad: Tensor, plain: bool) -> Tensor:
    """Return the gradient of either weighted sum coalesced, or padded on accelerators."""
    rows, grads, padded = grad._indices()[0], grad._values(), pads_rows(grad)
    if plain and not padded:
        return merge_rows(grad)
    if plain:
        rows = rows.unsqueeze(1)
        rows, grads = padded_row_gradients(rows, grads.new_ones(rows.shape), grads, len(grad))
    # torch forgets that it is coalesced
    return rows_as_gradient(rows, grads, grad.shape, padded)


def add_row_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two sparse gradients (K, d), both coalesced or both padded.

    On a GPU torch would only concatenate them, and soon hold more rows than the table.
    """
    lists = [one._indices()[0], other._indices()[0]]
    rows, grads = torch.cat(lists), torch.cat([one._values(), other._values()])
    if one.is_coalesced():
        touched, summed = row_gradients(rows.unsqueeze(1), grads.new_ones(len(rows), 1), grads)
        return rows_as_gradient(touched, summed, one.shape)
    size = min(len(rows), len(one))
    by_row, order = rows.sort()
    changes = _find_changes(by_row)
    places = torch.empty_like(order).scatter_(0, order, changes.cumsum(0) - 1)
    # Left-over entries are zero. Adding all of them to one row would be slow on a GPU.
    left_over = torch.cat([~_find_changes(part) for part in lists])
    anywhere = torch.arange(len(rows), device=rows.device) % max(1, size)
    places = torch.where(left_over, anywhere, places)
    summed = grads.new_zeros(size, grads.size(1)).index_add_(0, places, grads)
    return rows_as_gradient(
        _take_rows(by_row, _find_starts(changes, size)), summed, one.shape, True
    )


def _find_changes(by_row: Tensor) -> Tensor:
    """Return where a new row begins in ``by_row``, which rises."""
    return by_row.diff(prepend=by_row.new_full((1,), -1)).ne(0)


def _take_rows(by_row: Tensor, starts: Tensor) -> Tensor:
    """Return the rows at ``starts`` in ``by_row``; beyond its end, the last row."""
    return by_row[starts.clamp(max=len(by_row) - 1)]


def _find_starts(changes: Tensor, size: int) -> Tensor:
    """Return where each row's reads start, (size,); beyond the last row, the number of reads.

    ``changes`` is true for the first read of each row, in the order of rows.
    """
    # all other reads are written beyond the end
    places = torch.where(changes, changes.cumsum(0) - 1, size)
    starts = places.new_full((size + 1,), len(places))
    starts.scatter_(0, places, torch.arange(len(places), device=places.device))
    return starts[:size]
