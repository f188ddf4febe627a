"""Weighted sums of rows on a CPU, into memory that is there already.

Shapes: M rows, d width, P places, U sums.
"""

import numba

from fairseq_plugins.product_key_memory.compiled_loops import compiled


@compiled
def sum_rows(rows, places, weights, starts, sums):
    """Write the weighted sums of ``rows`` (M, d) to ``sums`` (U, d).

    Args:
        rows: (M, d).
        places: numbers of rows (P,), those of the first sum first.
        weights: of each, (P,).
        starts: where the sums' places begin, and at last P: (U + 1,). None is empty.
        sums: written to.
    """
    for u in numba.prange(len(sums)):
        first = starts[u]
        for i in range(rows.shape[1]):
            sums[u, i] = weights[first] * rows[places[first], i]
        for p in range(first + 1, starts[u + 1]):
            for i in range(rows.shape[1]):
                sums[u, i] += weights[p] * rows[places[p], i]
