"""Loops over numpy arrays that numba compiles for the CPU.

They are for what torch can only say in many operations, each of which reads and writes all of the
memory again. numba takes half a second to import: what uses this module is imported when needed.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import numba
import torch

# fairseq lets every library log what it debugs
logging.getLogger("numba").setLevel(logging.WARNING)


def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """Compile ``loop``, whose outermost loop is over ``numba.prange``, for torch's thread number.

    It is compiled at its first call, and kept in a file beside it or in the user's cache, where
    either can be written. With one thread no others are started, which would outlive a fork.
    """

    @functools.cache
    def version(parallel: bool) -> Callable[..., None]:
        # numba tells what it keeps in files apart by the function's name alone
        named = types.FunctionType(loop.__code__, loop.__globals__, loop.__name__)
        named.__qualname__ = f"{loop.__name__}_{'parallel' if parallel else 'serial'}"
        named.__module__ = loop.__module__
        options = {"parallel": parallel, "nogil": True}
        try:
            return numba.njit(cache=True, **options)(named)
        except RuntimeError:
            # no folder to keep it in
            return numba.njit(**options)(named)

    @functools.wraps(loop)
    def run(*arguments: Any) -> None:
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        if threads > 1:
            numba.set_num_threads(threads)
        version(threads > 1)(*arguments)

    return run
