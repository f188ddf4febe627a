"""Loops over a memory's numbers that numba compiles for a CPU; :mod:`.cpu_kernels` calls them.

Shapes: N queries, H heads, n sub-keys of each half, k selected, M rows to sum, P places, U sums or
rows that were read, K rows of a table, d width.
"""

import functools
import hashlib
import logging
import math
import types
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

# fairseq turns on every library's debugging log
logging.getLogger("numba").setLevel(logging.WARNING)


def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """Compile ``loop``, whose outermost loop is over ``numba.prange``, when it is first called.

    It runs on as many threads as torch does. The version for one thread starts no threads, which
    would not survive a fork. Compiling takes seconds, so numba keeps the machine code in files, if
    it can write any. ``njit(cache=True)`` has one index for all versions of a function: it mistakes
    serial code for parallel code, and two processes that write at once may overwrite each other's
    code. So each version has a name of its own.
    """

    @functools.cache
    def version(parallel: bool, signature: tuple, cached: bool) -> Dispatcher:
        from llvmlite import binding

        processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        known = repr((_source(), parallel, signature, processor)).encode()
        named = types.FunctionType(loop.__code__, loop.__globals__, loop.__name__)
        named.__qualname__ = f"{loop.__name__}_{hashlib.sha256(known).hexdigest()[:16]}"
        named.__module__ = loop.__module__
        # 1/0 is infinite, as in numpy: an exception would prevent vector instructions
        compile_loop = numba.njit(cache=cached, parallel=parallel, nogil=True, error_model="numpy")
        return compile_loop(named)

    @functools.wraps(loop)
    def run(*arguments: np.ndarray) -> None:
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        if threads > 1:
            numba.set_num_threads(threads)
        kind = threads > 1, tuple(numba.typeof(argument) for argument in arguments)
        try:
            call = version(*kind, cached=True)
            # compile and save before computing anything
            call.compile(kind[1])
        except (OSError, RuntimeError):
            # no folder can be written, or the disk is full
            call = version(*kind, cached=False)
        call(*arguments)

    return run


@functools.cache
def _source() -> bytes:
    # numba checks the source too, but its new index names old code for a moment after a change
    return hashlib.sha256(Path(__file__).read_bytes()).digest()


@numba.njit(inline="always")
def _insert(score, number, filled, scores, numbers):
    """Insert a score and its number into ``filled`` sorted ones, after equal scores.

    If all ranks are filled, the last score drops out.
    """
    rank = filled
    if filled == len(scores):
        rank -= 1
        if score <= scores[rank] or scores[rank] != scores[rank]:
            return
    while rank > 0 and (scores[rank - 1] < score or score != score):
        scores[rank] = scores[rank - 1]
        numbers[rank] = numbers[rank - 1]
        rank -= 1
    scores[rank] = score
    numbers[rank] = number


@numba.njit(inline="always")
def _leave_out(scores, numbers, count, k, low, high):
    """Move the k largest of the first ``count`` scores, and a few others, to the front, in order.

    ``scores`` and ``numbers`` are (n + 1,). At least k scores reach ``low``; ``high`` is the
    largest. Returns how many scores stay.
    """
    enough = k + k // 8
    left = count
    # halve the range until hardly more than k scores are left; stop early where that gains nothing
    for _ in range(8):
        if left <= enough:
            break
        middle = scores.dtype.type(low / 2 + high / 2)
        above = 0
        for i in range(count):
            above += not scores[i] < middle
        if above < k:
            high = middle
        else:
            low, left = middle, above
    left = 0
    for i in range(count):
        score = scores[i]
        # always written: this is faster than a branch that the processor guesses wrongly
        scores[left], numbers[left] = score, numbers[i]
        left += not score < low
    return left


@numba.njit(inline="always")
def _select(row, scores, numbers):
    """Write the largest of ``row`` (n,) to ``scores`` (k,), largest first, and their numbers."""
    n, k = len(row), len(scores)
    # the largest of each of k groups; at least k scores reach the smallest of these
    for group in range(k):
        scores[group] = -np.inf
    for start in range(0, n - k + 1, k):
        for group in range(k):
            if row[start + group] > scores[group]:
                scores[group] = row[start + group]
    low, high = scores.min(), scores.max()
    candidates, scored = np.empty(n + 1, np.int64), np.empty(n + 1, row.dtype)
    count = 0
    for number in range(n):
        candidates[count], scored[count] = number, row[number]
        count += not row[number] < low
    count = _leave_out(scored, candidates, count, k, low, high)
    for i in range(count):
        _insert(scored[i], candidates[i], min(i, k), scores, numbers)


@compiled
def select_pairs(scores, sums, slots):
    """Write the largest sums (N, H, k) of ``scores`` (H, 2, N, n), best first, and their slots.

    Only pairs of ranks that can win are added up, see :func:`.search.candidate_pairs`. If a pair
    loses, so do the pairs of the same a and a larger b.
    """
    heads, _, queries, n = scores.shape
    k = sums.shape[2]
    ranks = min(k, n)
    for row in numba.prange(heads * queries):
        head, query = row // queries, row % queries
        scores_a, numbers_a = np.empty(ranks, scores.dtype), np.empty(ranks, np.int64)
        scores_b, numbers_b = np.empty(ranks, scores.dtype), np.empty(ranks, np.int64)
        _select(scores[head, 0, query], scores_a, numbers_a)
        _select(scores[head, 1, query], scores_b, numbers_b)
        best, pairs = sums[query, head], slots[query, head]
        filled = 0
        for a in range(ranks):
            for b in range(min(ranks, k // (a + 1))):
                total = scores_a[a] + scores_b[b]
                if filled == k and total <= best[k - 1]:
                    break
                _insert(total, numbers_a[a] * n + numbers_b[b], filled, best, pairs)
                filled = min(filled + 1, k)


@compiled
def segment_sum(rows, places, weights, starts, sums):
    """Do what :func:`.cpu_kernels.segment_sum` does."""
    for u in numba.prange(len(sums)):
        first = starts[u]
        for i in range(rows.shape[1]):
            sums[u, i] = weights[first] * rows[places[first], i]
        for p in range(first + 1, starts[u + 1]):
            for i in range(rows.shape[1]):
                sums[u, i] += weights[p] * rows[places[p], i]


@compiled
def adam_step(values, exp_avg, exp_avg_sq, rows, grads, numbers):
    """Update rows by the rule of :mod:`.lazy_adam`.

    ``numbers`` are β₁, 1 - β₁, β₂, 1 - β₂, the gradients' factor, the weight decay (the part of a
    value that is subtracted before the step), the step size and ε.
    """
    beta1, rest1, beta2, rest2, scale, decay, step_size, eps = numbers
    for u in numba.prange(len(rows)):
        row = rows[u]
        for i in range(values.shape[1]):
            grad = grads[u, i] * scale
            mean = exp_avg[row, i] * beta1 + grad * rest1
            square = exp_avg_sq[row, i] * beta2 + grad * grad * rest2
            exp_avg[row, i] = mean
            exp_avg_sq[row, i] = square
            step = step_size * mean / (np.float32(math.sqrt(square)) + eps)
            values[row, i] -= decay * values[row, i] + step
