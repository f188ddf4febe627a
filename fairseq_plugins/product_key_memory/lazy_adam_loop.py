"""The update of :mod:`.lazy_adam` on a CPU: one pass over the rows and their state.

Shapes: K rows of a table, d width, U rows that were read.
"""

import math

import numba
import numpy as np

from fairseq_plugins.product_key_memory.compiled_loops import compiled


@compiled
def update_rows(values, exp_avg, exp_avg_sq, rows, grads, numbers):
    """Update ``values``, ``exp_avg`` and ``exp_avg_sq``, all (K, d), in the rows that were read.

    Args:
        values: in single precision, as all are.
        exp_avg: the first moment.
        exp_avg_sq: the second.
        rows: (U,), each once.
        grads: (U, d).
        numbers: β₁, 1 - β₁, β₂, 1 - β₂, by what gradients are multiplied, what part of them values
            lose before the step (weight decay), the step size, and ε.
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
