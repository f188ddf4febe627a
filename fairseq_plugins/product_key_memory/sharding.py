"""The table of a memory's values on several workers: whole on each, or each has some columns.

Whole tables (as in Lample et al. 2019) exchange gradients of the rows that any worker read. A table
larger than one device's memory is sharded: each worker holds some of its columns, reads in them for
all workers' tokens, and gets back whole vectors for its own tokens. The values that are read, their
gradients and so the updates are those of one worker that has the whole table and all the tokens.

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
from fairseq_plugins.product_key_memory.values import SpareRows, rows_as_gradient, weighted_sum

# How many numbers of a table worker 0 gathers at a time, to pass them on to the CPU's memory.
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
    """The values of a memory, for the optimizer that trains them and for checkpoints.

    Args:
        values: the memory's parameter, (K, d), or (K, c) of a shard.
        shard: which columns they are; None for all.

    Attributes:
        spare: memory for gradients of rows; None where each pass takes fresh memory.
        gathered: all columns (K, d) on worker 0, from :meth:`gather` to the next ``state_dict()``.
    """

    def __init__(self, values: nn.Parameter, shard: ColumnShard | None = None) -> None:
        self.values = values
        self.shard = shard
        self.spare: SpareRows | None = None
        self.gathered: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the size of the whole table, (K, d)."""
        width = self.values.size(1) if self.shard is None else self.shard.width
        return len(self.values), width

    def gather(self) -> None:
        """Prepare worker 0 for a ``state_dict()`` with all columns; all workers must call it."""
        if self.shard is not None:
            self.gathered = gather_columns(self.values)

    def average_gradient(self) -> None:
        """Make the gradient the mean over the workers, all of which must call it."""
        grad = self.values.grad
        if self.shard is None:
            self.values.grad = average_over_workers(self.values, grad)
        elif grad is not None:
            # the own columns' gradient is the sum over all workers' tokens already
            mean = grad.values() / dist.get_world_size()
            self.values.grad = rows_as_gradient(grad.indices()[0], mean, grad.shape)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradient of all columns, in single precision."""
        norm = torch.linalg.vector_norm(self.values.grad.values(), dtype=torch.float32)
        if self.shard is not None:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = squares.sqrt()
        return norm


def average_over_workers(values: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the mean over the workers of the gradients of ``values`` (K, d).

    What travels is the union of the rows that any worker has, not the table.

    Args:
        values: says shape, dtype and device, which a worker that read nothing has no gradient for.
        grad: this worker's, sparse and coalesced, or None.

    Returns:
        A coalesced sparse tensor (K, d); None if no worker has a row.
    """
    if grad is None:
        rows = torch.empty(0, dtype=torch.long, device=values.device)
        grads = values.new_empty(0, values.size(1))
    else:
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
    """Return this worker's columns of ``width``; None where there is one worker alone.

    Raises:
        ValueError: the workers cannot have equally many.
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


def draw_columns(values: nn.Parameter, shard: ColumnShard, std: float) -> None:
    """Fill ``values`` (K, c) with its columns of a table that one worker draws from N(0, std²).

    That table is never there as a whole: it is drawn in parts.
    """
    # parts of a multiple of 16 numbers are drawn as they would be in one go
    rows = max(16, GATHERED_AT_ONCE // shard.width // 16 * 16)
    with torch.no_grad():
        for part in values.split(rows):
            part.copy_(shard.of(torch.empty(len(part), shard.width).normal_(std=std)))


def gather_columns(columns: Tensor) -> Tensor | None:
    """Return all workers' ``columns`` (K, c) side by side, (K, d), in the CPU's memory of worker 0.

    All workers must call it; it returns None to the others.
    """
    first = dist.get_rank() == 0
    parts = []
    for part in columns.detach().split(max(1, GATHERED_AT_ONCE // columns.size(1))):
        received = [torch.empty_like(part) for _ in range(dist.get_world_size())] if first else None
        dist.gather(part.contiguous(), received)
        if first:
            parts.append(torch.cat(received, dim=1).cpu())
    return torch.cat(parts) if first else None


def sharded_weighted_sum(
    values: Tensor,
    rows: Tensor,
    weights: Tensor,
    sparse: bool = True,
    spare: SpareRows | None = None,
) -> Tensor:
    """Return what :func:`.values.weighted_sum` returns for the whole table.

    Args:
        values: this worker's columns, (K, c).
        rows: (N, R).
        weights: (N, R).
        sparse: see there. The gradient of ``values`` is that of the sum of all workers' losses.
        spare: see there.

    Returns:
        (N, d).
    """
    tokens = _lengths(rows)
    # (N, R) -> (M, R)
    rows = _gather_rows(rows, tokens)
    weights = _GatherTokens.apply(weights, tokens)
    # (M, c) -> (N, d)
    return _ColumnsToTokens.apply(weighted_sum(values, rows, weights, sparse, spare), tokens)


def _lengths(x: Tensor) -> list[int]:
    """Return how many rows each worker's ``x`` (N, …) has."""
    lengths = [
        torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(lengths, torch.tensor([len(x)], device=x.device))
    return [int(length) for length in lengths]


def _gather_rows(x: Tensor, lengths: list[int]) -> Tensor:
    """Return all workers' ``x`` (N, …), of ``lengths`` rows, one after the other: (M, …)."""
    # gloo gathers tensors of one size alone
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])


def _exchange(parts: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Send the w-th of ``parts`` to worker w; return what each sent, of ``lengths`` rows."""
    received = parts[0].new_empty(sum(lengths), parts[0].size(1))
    dist.all_to_all_single(
        received, torch.cat(parts).contiguous(), lengths, [len(part) for part in parts]
    )
    return list(received.split(lengths))


class _GatherTokens(torch.autograd.Function):
    """All workers' rows; each gets back the sum of the gradients that they have in the workers."""

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
    """Some columns for all tokens (M, c), exchanged for all columns of the own tokens (N, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[int]) -> Tensor:
        ctx.tokens = tokens
        own = tokens[dist.get_rank()]
        return torch.cat(_exchange(list(x.split(tokens)), [own] * len(tokens)), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat(_exchange(list(grad.chunk(len(ctx.tokens), dim=1)), ctx.tokens)), None
