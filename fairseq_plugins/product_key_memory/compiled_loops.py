"""Loops over numpy arrays that numba compiles for the CPU.

They are for what torch can only say in many operations, each of which reads and writes all of the
memory again. numba takes half a second to import: what uses this module is imported when needed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import binding

# fairseq lets every library log what it debugs
logging.getLogger("numba").setLevel(logging.WARNING)

# numbers as numpy has them: 1/0 is infinite and no exception, which would forbid vectors
OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """Compile ``loop``, whose outermost loop is over ``numba.prange``, for torch's thread number.

    That takes seconds at the first call; what it made is kept in a file beside the loop or in the
    user's cache, where either can be written. With one thread no others are started, which would
    outlive a fork.
    """
    digest = hashlib.sha256()
    for path in (loop.__code__.co_filename, __file__):
        digest.update(Path(path).read_bytes())

    @functools.cache
    def version(parallel: bool, dtype: str, kept: bool) -> Callable[..., None]:
        # numba tells files apart by the function's name, and looks at none of this: a name for each
        # keeps old code, other options and processes that write at the same time from mixing
        kind = "parallel" if parallel else "serial"
        name = f"{loop.__name__}_{kind}_{dtype}_{binding.get_host_cpu_name()}"
        named = types.FunctionType(loop.__code__, loop.__globals__, loop.__name__)
        named.__qualname__ = f"{name}_{digest.hexdigest()[:12]}"
        named.__module__ = loop.__module__
        return numba.njit(cache=kept, parallel=parallel, **OPTIONS)(named)

    @functools.wraps(loop)
    def run(*arguments: Any) -> None:
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        if threads > 1:
            numba.set_num_threads(threads)
        kind = threads > 1, arguments[0].dtype.name
        try:
            call = version(*kind, kept=True)
            # compiles and keeps, before anything is computed
            call.compile(tuple(numba.typeof(argument) for argument in arguments))
        except (OSError, RuntimeError):
            # no folder can be written, or it is full
            call = version(*kind, kept=False)
        call(*arguments)

    return run
