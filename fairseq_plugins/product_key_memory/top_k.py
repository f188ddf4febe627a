"""The largest elements of many rows, exactly, with a fixed rule for equal ones.

Shapes: R rows, n elements of a row, k wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_plugins.product_key_memory.loop_choice import in_loops


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the numbers (…, k) of the largest of ``scores`` (…, n), best first.

    Of equal scores the one with the smaller number goes first, which ``torch.topk`` leaves open.
    """
    n = scores.size(-1)
    if k == n:
        return scores.argsort(dim=-1, descending=True, stable=True)
    rows = scores.detach().reshape(-1, n)
    best = select_in_loop(rows, k) if in_loops(rows) else select_with_topk(rows, k)
    return best.view(*scores.shape[:-1], k)


def select_in_loop(rows: Tensor, k: int) -> Tensor:
    """Return the numbers (R, k) for ``rows`` (R, n) that :func:`in_loops` is true of."""
    from fairseq_plugins.product_key_memory.cpu_kernels import select

    best = torch.empty(len(rows), k, dtype=torch.long)
    select(rows.contiguous().numpy(), best.numpy())
    return best


def select_with_topk(rows: Tensor, k: int) -> Tensor:
    """Return the numbers (R, k) for ``rows`` (R, n) with n > k, on any device."""
    # one more than asked for: it shows whether another has the score of the last
    values, best = rows.topk(k + 1, dim=-1)
    best = best[:, :k]
    tied = (values[:, 1:] >= values[:, :-1]).any(-1)
    if tied.any():
        in_order = rows[tied].argsort(dim=-1, descending=True, stable=True)
        best = best.masked_scatter(tied.unsqueeze(-1), in_order[:, :k])
    return best
