"""The table of a memory's values on several workers: whole on each, or sharded by columns.

With whole tables (as in Lample et al. 2019) workers exchange the gradients of rows that any of them
read. A table that does not fit on one device is sharded: each worker holds some columns, reads them
for all workers' tokens, and gets back whole vectors for its own tokens. Values, gradients and
updates are those of one worker that has the whole table and all the tokens.

All workers must run the same passes in the same order, as fairseq's trainer does, and
fairseq-eval-lm does not; they may have different numbers of tokens, also none.

Shapes: N tokens of a worker, M of all workers, R rows read by a token, K rows, d width, c columns
of a worker, U rows that have a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.optimizers import UpdateRule
from fairseq_plugins.product_key_memory.values import (
    SpareRows,
    merge_rows,
    rows_as_gradient,
    weighted_sum,
)

# Numbers of a table that worker 0 gathers at a time on its device, to move them to the CPU.
GATHERED_AT_ONCE = 1 << 24


class ColumnShard(NamedTuple):
    """Columns ``start`` to ``stop`` of a table of ``width`` columns."""

    start: int
    stop: int
    width: int

    def of(self, table: Tensor) -> Tensor:
        """Return the columns (K, c) of ``table`` (K, d)."""
        return table[:, self.start : self.stop]


class MemoryTable(UpdateRule):
    """The values of a memory, with what optimizers and checkpoints need to know of them.

    Args:
        values: the memory's parameter, (K, d), or (K, c) of a shard.
        shard: which columns these are; None for all.
        rounded: they stay in bfloat16, and an update rounds them at random.

    Attributes:
        readers: the keys of the memories that read it, several where layers share it.
        spare: has a buffer for the gradients of rows; None for a new one in each pass.
        gathered: all columns (K, d) on worker 0, from :meth:`gather` to the next ``state_dict()``.
    """

    def __init__(
        self, values: nn.Parameter, shard: ColumnShard | None = None, rounded: bool = False
    ) -> None:
        self.values = values
        self.shard = shard
        self.rounded = rounded
        self.readers: list[nn.Module] = []
        self.spare: SpareRows | None = None
        self.gathered: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole table, (K, d)."""
        width = self.values.size(1) if self.shard is None else self.shard.width
        return len(self.values), width

    def gather(self) -> None:
        """Gather all columns of a shard on worker 0; all workers must call it."""
        if self.shard is not None:
            self.gathered = gather_columns(self.values)

    def average_gradient(self) -> None:
        """Average the gradient over the workers, all of which must call it."""
        grad = self.values.grad
        if self.shard is None:
            self.values.grad = average_over_workers(self.values, grad)
        elif grad is not None:
            # that of a shard is the sum over all workers' tokens already
            mean = grad._values() / dist.get_world_size()
            self.values.grad = rows_as_gradient(
                grad._indices()[0], mean, grad.shape, padded=not grad.is_coalesced()
            )

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradient of all columns, in single precision.

        All workers must call it.
        """
        norm = torch.linalg.vector_norm(self.values.grad._values(), dtype=torch.float32)
        if self.shard is not None:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = squares.sqrt()
        return norm


def average_over_workers(values: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the mean over the workers of the gradients of ``values`` (K, d).

    They exchange the rows that any worker has, not the table.

    Args:
        values: the table; a worker that read nothing has no gradient to take its shape from.
        grad: this worker's gradient, sparse, or None.

    Returns:
        A coalesced sparse tensor (K, d); None if no worker has a row.
    """
    if grad is None:
        rows = torch.empty(0, dtype=torch.long, device=values.device)
        grads = values.new_empty(0, values.size(1))
    else:
        if not grad.is_coalesced():
            grad = merge_rows(grad)
        rows, grads = grad.indices()[0], grad.values()
    union = _gather_rows(rows, _lengths(rows)).unique()
    if len(union) == 0:
        return None
    shared = grads.new_zeros(len(union), grads.size(1))
    shared.index_copy_(0, torch.searchsorted(union, rows), grads)
    shared /= dist.get_world_size()
    dist.all_reduce(shared)
    return rows_as_gradient(union, shared, values.shape)


def own_columns(width: int) -> ColumnShard | None:
    """Return this worker's columns of a table of ``width``; None if there is only one worker.

    Raises:
        ValueError: the number of workers does not divide ``width``.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    workers = dist.get_world_size()
    if width % workers:
        raise ValueError(
            f"`shard_values` with {workers} workers and values of width {width}: each takes as "
            "many columns, so the number of workers must divide `value_dim`"
        )
    columns = width // workers
    return ColumnShard(columns * dist.get_rank(), columns * (dist.get_rank() + 1), width)


def draw_values(
    slots: int, width: int, std: float, shard_values: bool, dtype: torch.dtype | None
) -> MemoryTable:
    """Return values (K, d) from N(0, std²), or this worker's columns of them.

    Args:
        slots: K.
        width: d.
        std: 0 for zeros.
        shard_values: take some of the columns if there are several workers.
        dtype: ``torch.bfloat16`` for values that stay in it; None for torch's default.

    Raises:
        ValueError: the number of workers does not divide ``width``.
    """
    shard = own_columns(width) if shard_values else None
    columns = shard or ColumnShard(0, width, width)
    values = nn.Parameter(torch.empty(slots, columns.stop - columns.start, dtype=dtype))
    if shard is None and dtype is None:
        nn.init.normal_(values, std=std)
    else:
        draw_columns(values, columns, std)
    return MemoryTable(values, shard, rounded=dtype is not None)


def draw_columns(values: nn.Parameter, shard: ColumnShard, std: float) -> None:
    """Fill ``values`` (K, c) with its columns of the table that one worker draws from N(0, std²).

    The whole table never exists: it is drawn part by part.
    """
    # torch draws parts of a multiple of 16 numbers as it would all at once
    rows = max(16, GATHERED_AT_ONCE // shard.width // 16 * 16)
    with torch.no_grad():
        for part in values.split(rows):
            part.copy_(shard.of(torch.empty(len(part), shard.width).normal_(std=std)))


def gather_columns(columns: Tensor) -> Tensor | None:
    """Return all workers' ``columns`` (K, c) side by side, (K, d), on the CPU of worker 0.

    All workers must call it; the others get None.
    """
    first = dist.get_rank() == 0
    parts = []
    for part in columns.detach().split(max(1, GATHERED_AT_ONCE // columns.size(1))):
        received = [torch.empty_like(part) for _ in range(dist.get_world_size())] if first else None
        dist.gather(part.contiguous(), received)
        if first:
            parts.append(torch.cat(received, dim=1).cpu())
    return torch.cat(parts) if first else None


def rows_of_any_worker(chosen: Tensor) -> Tensor:
    """Return which rows any worker has ``chosen``, (K,); all workers must call it."""
    counts = chosen.int()
    dist.all_reduce(counts)
    return counts > 0


def sharded_weighted_sum(
    values: Tensor,
    rows: Tensor,
    weights: Tensor,
    sparse: bool = True,
    spare: SpareRows | None = None,
    frozen: Tensor | None = None,
) -> Tensor:
    """Return what :func:`.values.weighted_sum` does of the whole table.

    Args:
        values: this worker's columns, (K, c). Their gradient is that of all workers' losses summed.
        rows: of this worker's tokens, (N, R).
        weights: (N, R).
        sparse: as of ``weighted_sum``.
        spare: as of ``weighted_sum``.
        frozen: as of ``weighted_sum``, the same on all workers.

    Returns:
        (N, d).
    """
    tokens = _lengths(rows)
    # (N, R) -> (M, R)
    rows = _gather_rows(rows, tokens)
    weights = _GatherTokens.apply(weights, tokens)
    # (M, c) -> (N, d)
    summed = weighted_sum(values, rows, weights, sparse, spare, frozen)
    return _ColumnsToTokens.apply(summed, tokens)


def _lengths(x: Tensor) -> list[int]:
    """Return the number of rows of each worker's ``x`` (N, …)."""
    lengths = [
        torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(lengths, torch.tensor([len(x)], device=x.device))
    return [int(length) for length in lengths]


def _gather_rows(x: Tensor, lengths: list[int]) -> Tensor:
    """Return all workers' ``x`` (N, …), of ``lengths`` rows, one after the other: (M, …)."""
    # gloo gathers only tensors of one size
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])


def _exchange(parts: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Send the w-th of ``parts`` to worker w; return what each worker sent, of ``lengths`` rows."""
    received = parts[0].new_empty(sum(lengths), parts[0].size(1))
    dist.all_to_all_single(
        received, torch.cat(parts).contiguous(), lengths, [len(part) for part in parts]
    )
    return list(received.split(lengths))


class _GatherTokens(torch.autograd.Function):
    """Gathers all workers' rows; backward, each gets the sum of their gradients on all workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[int]) -> Tensor:
        ctx.tokens = tokens
        return _gather_rows(x, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = ctx.tokens[dist.get_rank()]
        received = _exchange(list(grad.split(ctx.tokens)), [own] * len(ctx.tokens))
        return torch.stack(received).sum(0), None


class _ColumnsToTokens(torch.autograd.Function):
    """Exchanges some columns for all tokens (M, c) for all columns of the own tokens (N, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[int]) -> Tensor:
        ctx.tokens = tokens
        own = tokens[dist.get_rank()]
        return torch.cat(_exchange(list(x.split(tokens)), [own] * len(tokens)), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat(_exchange(list(grad.chunk(len(ctx.tokens), dim=1)), ctx.tokens)), None
