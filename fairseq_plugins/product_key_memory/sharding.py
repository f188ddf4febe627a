"""The columns of a table of values that a worker holds: all of them, or a shard.

Workers with whole tables exchange the gradients of the rows that were read. A table that does not
fit on one device is sharded: each worker holds some columns, reads them for the tokens of all
workers, and gets whole vectors back for its own tokens. Values, gradients and updates equal those
of one worker with the whole table and all tokens.

All workers must run the same passes in the same order; fairseq's trainer does, fairseq-eval-lm
does not. They may have different numbers of tokens, even none.

Shapes: N tokens of a worker, M of all workers, R rows read by a token, K rows, d width, c columns
of a worker, U rows that have a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_plugins.product_key_memory.values import merge_rows, rows_as_gradient, weighted_sum

# How many numbers of a table worker 0 gathers on its device before it moves them to the CPU.
GATHERED_AT_ONCE = 1 << 24


class AllColumns:
    """All ``width`` columns of a table; each worker holds them."""

    sharded = False

    def __init__(self, width: int) -> None:
        self.width = width
        self.start, self.stop = 0, width

    def own(self, table: Tensor) -> Tensor:
        """Return this worker's columns (K, c) of ``table`` (K, d); other shapes stay the same."""
        return table

    def gather(self, columns: Tensor) -> Tensor | None:
        """Return all columns (K, d); of shards, None except on worker 0. All workers must call."""
        return columns

    def rows_of_any_worker(self, chosen: Tensor) -> Tensor:
        """Return which rows (K,) any worker has ``chosen``; all workers must call this."""
        return chosen

    def weighted_sum(self, values: Tensor, rows: Tensor, weights: Tensor, **how: Any) -> Tensor:
        """Return :func:`.values.weighted_sum` of the whole table, (N, d)."""
        return weighted_sum(values, rows, weights, **how)

    def average(self, values: Tensor, grad: Tensor | None) -> Tensor | None:
        """Return the mean over the workers of the sparse gradients of ``values``; None if empty.

        ``grad`` is None on a worker that read nothing.
        """
        if grad is None:
            rows = torch.empty(0, dtype=torch.long, device=values.device)
            grads = values.new_empty(0, values.size(1))
        else:
            if not grad.is_coalesced():
                grad = merge_rows(grad)
            rows, grads = grad.indices()[0], grad.values()
        union = _gather_rows(rows, _gather_lengths(rows)).unique()
        if len(union) == 0:
            return None
        shared = grads.new_zeros(len(union), grads.size(1))
        shared.index_copy_(0, torch.searchsorted(union, rows), grads)
        shared /= dist.get_world_size()
        dist.all_reduce(shared)
        return rows_as_gradient(union, shared, values.shape)

    def norm(self, of_columns: Tensor) -> Tensor:
        """Return the norm of all columns from the norm of these; all workers must call this."""
        return of_columns


class ColumnShard(AllColumns):
    """This worker's share of the columns; all workers hold equally many."""

    sharded = True

    def __init__(self, width: int) -> None:
        super().__init__(width)
        workers = dist.get_world_size()
        if width % workers:
            raise ValueError(
                f"`shard_values` with {workers} workers and values of width {width}: all hold "
                "equally many columns, so the number of workers must divide `value_dim`"
            )
        columns = width // workers
        self.start, self.stop = columns * dist.get_rank(), columns * (dist.get_rank() + 1)

    def own(self, table: Tensor) -> Tensor:
        """Return this worker's columns (K, c) of ``table`` (K, d)."""
        whole = table.dim() == 2 and table.size(1) == self.width
        return table[:, self.start : self.stop] if whole else table

    def gather(self, columns: Tensor) -> Tensor | None:
        """Return all workers' ``columns`` (K, c) side by side, on the CPU of worker 0."""
        first = dist.get_rank() == 0
        parts = []
        for part in columns.detach().split(max(1, GATHERED_AT_ONCE // columns.size(1))):
            workers = range(dist.get_world_size())
            received = [torch.empty_like(part) for _ in workers] if first else None
            dist.gather(part.contiguous(), received)
            if first:
                parts.append(torch.cat(received, dim=1).cpu())
        return torch.cat(parts) if first else None

    def rows_of_any_worker(self, chosen: Tensor) -> Tensor:
        """Return which rows any worker has ``chosen``, (K,)."""
        counts = chosen.int()
        dist.all_reduce(counts)
        return counts > 0

    def weighted_sum(self, values: Tensor, rows: Tensor, weights: Tensor, **how: Any) -> Tensor:
        """Return the sums (N, d) for this worker's tokens; the gradient covers all workers'."""
        tokens = _gather_lengths(rows)
        # (N, R) -> (M, R)
        rows = _gather_rows(rows, tokens)
        weights = _GatherTokens.apply(weights, tokens)
        # (M, c) -> (N, d)
        return _ColumnsToTokens.apply(weighted_sum(values, rows, weights, **how), tokens)

    def average(self, values: Tensor, grad: Tensor | None) -> Tensor | None:
        """Return the mean; ``grad`` is already the sum over all workers."""
        if grad is None:
            return None
        mean = grad._values() / dist.get_world_size()
        padded = not grad.is_coalesced()
        return rows_as_gradient(grad._indices()[0], mean, grad.shape, padded)

    def norm(self, of_columns: Tensor) -> Tensor:
        """Return the norm of all columns."""
        squares = of_columns.square()
        dist.all_reduce(squares)
        return squares.sqrt()


def choose_columns(width: int, shard: bool) -> AllColumns:
    """Return this worker's columns: a part of them to ``shard`` among several workers, or all."""
    return ColumnShard(width) if shard and several_workers() else AllColumns(width)


def several_workers() -> bool:
    """Return whether several workers train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gather_lengths(x: Tensor) -> list[int]:
    """Return how many rows each worker's ``x`` (N, …) has."""
    lengths = [
        torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(lengths, torch.tensor([len(x)], device=x.device))
    return [int(length) for length in lengths]


def _gather_rows(x: Tensor, lengths: list[int]) -> Tensor:
    """Return all workers' ``x`` (N, …), which have ``lengths`` rows, one after another: (M, …)."""
    # gloo only gathers tensors of equal size
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])


def _exchange(parts: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Send part w to worker w; return what each worker sent, ``lengths`` rows."""
    received = parts[0].new_empty(sum(lengths), parts[0].size(1))
    dist.all_to_all_single(
        received, torch.cat(parts).contiguous(), lengths, [len(part) for part in parts]
    )
    return list(received.split(lengths))


class _GatherTokens(torch.autograd.Function):
    """Gathers all workers' rows; the backward pass sums the gradients of each worker's rows."""

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
    """Trades some columns of all tokens (M, c) for all columns of this worker's tokens (N, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[int]) -> Tensor:
        ctx.tokens = tokens
        own = tokens[dist.get_rank()]
        return torch.cat(_exchange(list(x.split(tokens)), [own] * len(tokens)), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat(_exchange(list(grad.chunk(len(ctx.tokens), dim=1)), ctx.tokens)), None
