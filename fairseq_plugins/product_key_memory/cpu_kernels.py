"""Selections, sums and updates in one pass on a CPU, by loops that numba compiles.

torch needs several operations for each, which read and write all the numbers again. Importing numba
takes half a second, so its loops, in :mod:`.numba_loops`, are imported at the first call.

Shapes: R rows, n scores of a row, k wanted, N queries, H heads, n also sub-keys of each half, M
rows to sum, P places, U sums or rows that were read, K rows of a table, d width.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def use_numba(x: Tensor) -> bool:
    """Return whether the loops can work on ``x``: on a CPU, in single or double precision.

    Without numba they never can.
    """
    on_cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return on_cpu and _has_numba()


@functools.cache
def _has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError as error:
        # not installed, or for another version of numpy
        logger.warning("memories on this CPU go without compiled loops, slowly: %s", error)
        return False
    return True


def _loops() -> ModuleType:
    from fairseq_plugins.product_key_memory import numba_loops

    return numba_loops


def select(rows: Tensor, k: int) -> Tensor:
    """Return the numbers (R, k) of the largest of ``rows`` (R, n), largest first."""
    best = torch.empty(len(rows), k, dtype=torch.long)
    _loops().select(rows.contiguous().numpy(), best.numpy())
    return best


def select_pairs(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest sums of two scores, best first, and the slots of those pairs.

    Args:
        scores: of the sub-keys of both halves, (H, 2, N, n).
        k: at most n².

    Returns:
        Sums and slots, (N, H, k) each.
    """
    heads, _, queries, _ = scores.shape
    sums = scores.new_empty(queries, heads, k)
    slots = torch.empty(queries, heads, k, dtype=torch.long)
    _loops().select_pairs(scores.numpy(), sums.numpy(), slots.numpy())
    return sums, slots


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor, starts: Tensor, sums: Tensor) -> None:
    """Write the weighted sums of ``rows`` (M, d) to ``sums`` (U, d).

    Args:
        rows: (M, d), contiguous.
        places: numbers of rows (P,), those of the first sum first.
        weights: of each place, (P,).
        starts: first place of each sum, and P at the end: (U + 1,). No sum is empty.
        sums: the result.
    """
    _loops().sum_rows(*(x.detach().numpy() for x in (rows, places, weights, starts, sums)))


def update_rows(
    values: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    betas: tuple[float, float],
    scale: Tensor,
    decay: float,
    step_size: float,
    eps: float,
) -> None:
    """Do what :func:`.lazy_adam.update_rows` does."""
    arrays = (x.detach().numpy() for x in (values, exp_avg, exp_avg_sq, rows, grads))
    numbers = betas[0], 1 - betas[0], betas[1], 1 - betas[1], scale.item(), decay, step_size, eps
    _loops().update_rows(*arrays, np.float32(numbers))
