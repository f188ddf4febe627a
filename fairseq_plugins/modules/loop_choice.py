"""Which of two ways goes: loops that numba compiles for the CPU, or torch's operations."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def in_loops(x: Tensor) -> bool:
    """Return whether ``x`` is for a compiled loop: on a CPU, of single or double precision.

    Where numba is not installed nothing is.
    """
    on_cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return on_cpu and _numba_is_installed()


@functools.cache
def _numba_is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None
