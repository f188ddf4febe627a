"""Selection, sum and update, each in one pass on a CPU: loops that numba compiles.

torch would need several operations for each. numba takes half a second to import, so that
:func:`.search.cpu_loops` imports this file when a loop is needed. Equal scores rank as in
:mod:`.search`; NaNs go first, in any order.

Shapes: N queries, H heads, n sub-keys of each half, k selected, M rows to sum, P places, U sums or
rows that were read, K rows of a table, d width.
"""

import functools
import logging
import math
from typing import Any

import numba
import numpy as np
import torch
from numba.core.dispatcher import Dispatcher
from torch import Tensor

# fairseq turns on every library's debugging log
logging.getLogger("numba").setLevel(logging.WARNING)


def run(loop: str, *tensors: Tensor) -> None:
    """Run a loop of :func:`compile_loops` on as many threads as torch has."""
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads > 1:
        numba.set_num_threads(threads)
    compile_loops(threads > 1)[loop](*(tensor.detach().numpy() for tensor in tensors))


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


@functools.cache
def compile_loops(parallel: bool) -> dict[str, Dispatcher]:
    """Return the loops by name, for one thread or several; each is compiled at its first call.

    numba keeps the machine code in files. It knows a function by its code and its closure: without
    ``outermost`` in the closure it would take parallel code for one thread, and OpenMP's threads
    end a process that forks.
    """
    outermost = numba.prange if parallel else range

    def select_pairs(scores, sums, slots):
        """Write the largest sums (N, H, k) of ``scores`` (H, 2, N, n), best first, and their slots.

        Only pairs of ranks that can win are added up, see :func:`.search.candidate_pairs`. If a
        pair loses, so do the pairs of the same a and a larger b.
        """
        heads, _, queries, n = scores.shape
        k = sums.shape[2]
        ranks = min(k, n)
        for row in outermost(heads * queries):
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

    def segment_sum(rows, places, weights, starts, sums):
        """Write sums (U, d) of ``rows`` (M, d); none is empty.

        Sum u adds up the rows ``places[p]`` with ``weights[p]`` for p from ``starts[u]`` up to
        ``starts[u + 1]``. Places and weights are (P,), starts (U + 1,).
        """
        for u in outermost(len(sums)):
            first = starts[u]
            for i in range(rows.shape[1]):
                sums[u, i] = weights[first] * rows[places[first], i]
            for p in range(first + 1, starts[u + 1]):
                for i in range(rows.shape[1]):
                    sums[u, i] += weights[p] * rows[places[p], i]

    def adam_step(values, exp_avg, exp_avg_sq, rows, grads, numbers):
        """Update rows by the rule of :mod:`.lazy_adam`.

        ``numbers`` are β₁, 1 - β₁, β₂, 1 - β₂, the gradients' factor, the weight decay (the part of
        a value that is subtracted before the step), the step size and ε.
        """
        beta1, rest1, beta2, rest2, scale, decay, step_size, eps = numbers
        for u in outermost(len(rows)):
            row = rows[u]
            for i in range(values.shape[1]):
                grad = grads[u, i] * scale
                mean = exp_avg[row, i] * beta1 + grad * rest1
                square = exp_avg_sq[row, i] * beta2 + grad * grad * rest2
                exp_avg[row, i] = mean
                exp_avg_sq[row, i] = square
                step = step_size * mean / (np.float32(math.sqrt(square)) + eps)
                values[row, i] -= decay * values[row, i] + step

    loops = (select_pairs, segment_sum, adam_step)
    # 1/0 is infinite, as in numpy: an exception would prevent vector instructions
    options: Any = {"parallel": parallel, "nogil": True, "error_model": "numpy"}
    try:
        return {loop.__name__: numba.njit(cache=True, **options)(loop) for loop in loops}
    except RuntimeError:
        # no folder can be written
        return {loop.__name__: numba.njit(**options)(loop) for loop in loops}
