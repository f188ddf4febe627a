"""Gradients of some rows of a table, the same on every worker.

A gradient is a coalesced sparse tensor of shape (K, d) with one sparse dimension, of U rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_plugins.product_key_memory.values import rows_as_gradient


def average_over_workers(table: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the mean over the workers of the gradients of ``table`` (K, d).

    What travels is the union of the rows that any worker has, not the table.

    Args:
        table: says shape, dtype and device, which a worker that read nothing has no gradient for.
        grad: this worker's, or None.
    """
    if grad is None:
        rows = torch.empty(0, dtype=torch.long, device=table.device)
        grads = table.new_empty(0, table.size(1))
    else:
        rows, grads = grad.indices()[0], grad.values()
    union = torch.cat(_gather(rows)).unique()
    if len(union) == 0:
        return None
    shared = grads.new_zeros(len(union), grads.size(1))
    shared.index_copy_(0, torch.searchsorted(union, rows), grads)
    shared /= dist.get_world_size()
    dist.all_reduce(shared)
    return rows_as_gradient(union, shared, table.shape)


def _gather(rows: Tensor) -> list[Tensor]:
    """Return all workers' ``rows`` (U,), of which each has its own number."""
    workers = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(workers)]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(lengths))
    padded = rows.new_zeros(longest)
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(workers)]
    dist.all_gather(gathered, padded)
    return [part[: int(length)] for part, length in zip(gathered, lengths, strict=True)]
