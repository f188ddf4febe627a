"""Selection, sum and update, each in one pass on a CPU: loops that numba compiles.

torch would need several operations for each. numba is imported at the first call, since that takes
half a second. Equal scores rank as in :mod:`.search`; NaNs go first, in any order.

Shapes: N queries, H heads, n sub-keys of each half, k selected, M rows to sum, P places, U sums or
rows that were read, K rows of a table, d width.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def use_numba(x: Tensor) -> bool:
    """Return whether numba is installed and ``x`` is on a CPU in single or double precision."""
    on_cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return on_cpu and import_loops() is not None


@functools.cache
def import_loops() -> Any:
    """Return :mod:`.cpu_loops`, imported once; None without numba."""
    try:
        return importlib.import_module("fairseq_plugins.product_key_memory.cpu_loops")
    except ImportError as error:
        # not installed, or made for another version of numpy
        logger.warning(
            "memories on this CPU go without compiled loops, several times slower (%s): install "
            "them with pip install '.[fast]' in the clone",
            error,
        )
        return None


def select_pairs(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the best sums of two scores and their slots, both (N, H, k), best first.

    ``scores`` (H, 2, N, n) are those of the sub-keys; k is at most n².
    """
    heads, _, queries, _ = scores.shape
    sums = scores.new_empty(queries, heads, k)
    slots = torch.empty(queries, heads, k, dtype=torch.long)
    import_loops().select_pairs(scores.numpy(), sums.numpy(), slots.numpy())
    return sums, slots


def segment_sum(
    rows: Tensor, places: Tensor, weights: Tensor, starts: Tensor, sums: Tensor
) -> None:
    """Write weighted sums of ``rows`` (M, d), which are contiguous, to ``sums`` (U, d).

    Sum u adds up the rows ``places[p]`` with ``weights[p]`` for p from ``starts[u]`` up to
    ``starts[u + 1]``. Places and weights are (P,), starts (U + 1,). No sum is empty.
    """
    import_loops().segment_sum(*(x.detach().numpy() for x in (rows, places, weights, starts, sums)))


def adam_step(
    *tensors: Tensor,
    betas: tuple[float, float],
    scale: Tensor,
    decay: float,
    step_size: float,
    eps: float,
) -> None:
    """Do what :func:`.lazy_adam.adam_step` does."""
    numbers = betas[0], 1 - betas[0], betas[1], 1 - betas[1], scale.item(), decay, step_size, eps
    arrays = (x.detach().numpy() for x in tensors)
    import_loops().adam_step(*arrays, np.array(numbers, dtype=np.float32))
