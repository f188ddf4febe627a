"""Selections of the best scores on a CPU, in one pass over the scores.

Equal scores are ranked as :mod:`.product_key_search` says. Scores that are not numbers go first, in
any order.

Shapes: R rows, n scores of a row, k wanted, N queries, H heads, n also sub-keys of each half.
"""

import numba
import numpy as np

from fairseq_plugins.product_key_memory.compiled_loops import compiled


@numba.njit(inline="always")
def _insert(score, number, filled, scores, numbers):
    """Give a score and its number their place among ``filled`` sorted ones; the last drops out.

    It goes behind equal scores.
    """
    place = filled
    if filled == len(scores):
        place -= 1
        if score <= scores[place] or scores[place] != scores[place]:
            return
    while place > 0 and (scores[place - 1] < score or score != score):
        scores[place] = scores[place - 1]
        numbers[place] = numbers[place - 1]
        place -= 1
    scores[place] = score
    numbers[place] = number


@numba.njit(inline="always")
def _select(row, scores, numbers):
    """Write the largest of ``row`` (n,) to ``scores`` (k,), largest first, and their numbers."""
    n, k = len(row), len(scores)
    # the largest of each of k groups: k scores are at least as large as the least of those
    for place in range(k):
        scores[place] = -np.inf
    for start in range(0, n - k + 1, k):
        for place in range(k):
            if row[start + place] > scores[place]:
                scores[place] = row[start + place]
    floor = scores.min()
    candidates = np.empty(n + 1, np.int64)
    count = 0
    for number in range(n):
        # written in any case, which takes less time than to guess wrongly
        candidates[count] = number
        count += not row[number] < floor
    for i in range(count):
        _insert(row[candidates[i]], candidates[i], min(i, k), scores, numbers)


@compiled
def select(rows, numbers):
    """Write the numbers (R, k) of the largest of ``rows`` (R, n), largest first."""
    for r in numba.prange(len(rows)):
        scores = np.empty(numbers.shape[1], rows.dtype)
        _select(rows[r], scores, numbers[r])


@compiled
def select_pairs(scores, sums, slots):
    """Write the largest sums of two scores (N, H, k), best first, and the slots of those pairs.

    Only pairs of ranks that can win are added up: of two lists sorted downwards, pair (a, b), from
    1, has a·b pairs up to its own ahead of it, and those with a larger b are no better.

    Args:
        scores: of the sub-keys of both halves, (H, 2, N, n).
        sums: written to.
        slots: written to.
    """
    heads, _, queries, n = scores.shape
    k = sums.shape[2]
    ranks = min(k, n)
    for place in numba.prange(heads * queries):
        head, query = place // queries, place % queries
        scores_a, numbers_a = np.empty(ranks, scores.dtype), np.empty(ranks, np.int64)
        scores_b, numbers_b = np.empty(ranks, scores.dtype), np.empty(ranks, np.int64)
        _select(scores[head, 0, query], scores_a, numbers_a)
        _select(scores[head, 1, query], scores_b, numbers_b)
        best, pairs = sums[query, head], slots[query, head]
        found = 0
        for a in range(ranks):
            for b in range(min(ranks, k // (a + 1))):
                total = scores_a[a] + scores_b[b]
                if found == k and total <= best[k - 1]:
                    break
                _insert(total, numbers_a[a] * n + numbers_b[b], found, best, pairs)
                found = min(found + 1, k)
