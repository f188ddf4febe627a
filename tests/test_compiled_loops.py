"""Compiled loops: any number of threads gives the same; where nothing is kept they work too."""

import sys

import numba
import numpy as np
import pytest
import torch

from fairseq_plugins.modules import compiled_loops, loop_choice
from fairseq_plugins.modules.memory_layer import ProductKeyMemory
from fairseq_plugins.modules.row_sums_loop import sum_rows
from fairseq_plugins.modules.selection_loops import select, select_pairs
from fairseq_plugins.optim.adam_with_memory import AdamWithMemory
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


def trained():
    """A memory's outputs while it learns."""
    torch.manual_seed(1)
    memory = ProductKeyMemory(16, slots=81, heads=2, knn=5, query_dim=8)
    memory.keep_gradient_beside_autograd()
    learned = [weight for weight in memory.parameters() if weight.requires_grad]
    optimizer = AdamWithMemory(learned, [memory.values], 0.01, lr=1e-3)
    outputs = []
    for _ in range(4):
        out = memory(torch.randn(7, 16))
        outputs.append(out.detach())
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(outputs)


def test_without_numba_torchs_operations_do_the_same(monkeypatch):
    with_numba = trained()

    def find_spec(name):
        assert name == "numba"

    loop_choice._numba_is_installed.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(loop_choice.importlib.util, "find_spec", find_spec)
        patched.setitem(sys.modules, "fairseq_plugins.modules.selection_loops", None)
        patched.setitem(sys.modules, "fairseq_plugins.modules.row_sums_loop", None)
        patched.setitem(sys.modules, "fairseq_plugins.optim.lazy_adam_loop", None)
        without = trained()
    loop_choice._numba_is_installed.cache_clear()
    torch.testing.assert_close(without, with_numba)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.ones(1), True),
        (torch.ones(1).double(), True),
        (torch.ones(1).bfloat16(), False),
        (torch.ones(1, device="meta"), False),
    ],
)
def test_loops_are_for_what_numpy_knows_on_a_cpu(x, expected):
    assert loop_choice.in_loops(x) == expected
