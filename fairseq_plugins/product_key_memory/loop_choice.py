"""Chooses between loops that numba compiles for the CPU and torch's operations."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def in_loops(x: Tensor) -> bool:
    """Return whether ``x`` is for a compiled loop: on a CPU, of single or double precision.

    Where there is no numba nothing is.
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
