"""Compiled loops: any number of threads gives the same; where nothing is kept they work too."""

import numba
import numpy as np
import pytest
import torch

from fairseq_plugins.modules import compiled_loops
from fairseq_plugins.modules.row_sums_loop import sum_rows
from fairseq_plugins.modules.selection_loops import select, select_pairs
from fairseq_plugins.optim.lazy_adam_loop import update_rows

ROWS, WIDTH = 40, 8


def draw(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def sums():
    found = np.empty((10, WIDTH), np.float32)
    places, starts = np.arange(30) % ROWS, np.arange(0, 31, 3)
    sum_rows(draw(ROWS, WIDTH), places, draw(30), starts, found)
    return found


def selected():
    found = np.empty((ROWS, 3), np.int64)
    select(draw(ROWS, 20), found)
    return found


def pairs():
    found, slots = np.empty((9, 2, 5), np.float32), np.empty((9, 2, 5), np.int64)
    select_pairs(draw(2, 2, 9, 20), found, slots)
    return np.stack([found, slots])


def updated():
    tables = [draw(ROWS, WIDTH), draw(ROWS, WIDTH), np.square(draw(ROWS, WIDTH))]
    numbers = np.float32((0.9, 0.1, 0.98, 0.02, 1.0, 0.01, 1e-3, 1e-8))
    update_rows(*tables, np.arange(0, ROWS, 2), draw(ROWS // 2, WIDTH), numbers)
    return np.stack(tables)


@pytest.mark.parametrize("loop", [sums, selected, pairs, updated])
def test_two_threads_compute_what_one_does(loop):
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(loop())
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


def fill(numbers, value):
    for i in numba.prange(len(numbers)):
        numbers[i] = value


def test_where_nothing_can_be_written_it_is_compiled_all_the_same(monkeypatch):
    compile_loop, refused = numba.njit, []

    def njit(**options):
        if options.pop("cache", False):
            refused.append(options)
            raise RuntimeError("cannot cache function 'fill': no locator available for file")
        return compile_loop(**options)

    monkeypatch.setattr(compiled_loops.numba, "njit", njit)
    numbers = np.zeros(5)
    compiled_loops.compiled(fill)(numbers, 2.0)
    assert numbers.tolist() == [2.0] * 5
    assert len(refused) == 1
