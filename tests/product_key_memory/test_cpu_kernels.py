"""Compiled loops: any number of threads gives the same; they work where nothing can be written."""

import numba
import numpy as np
import pytest
import torch

from fairseq_plugins.product_key_memory import cpu_kernels
from tests.product_key_memory.standalone import WIDTH

ROWS = 40
assert cpu_kernels.use_numba(torch.ones(1))


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def sums():
    found = torch.empty(10, WIDTH)
    places, starts = torch.arange(30) % ROWS, torch.arange(0, 31, 3)
    cpu_kernels.sum_rows(draw(ROWS, WIDTH), places, draw(30), starts, found)
    return found


def pairs():
    return torch.stack([x.float() for x in cpu_kernels.select_pairs(draw(2, 2, 9, 20), 5)])


def update(tables, rows, grads, eps=1e-8):
    scale = torch.tensor(1.0)
    cpu_kernels.update_rows(*tables, rows, grads, (0.9, 0.98), scale, 0.01, 1e-3, eps)
    return torch.stack(tables)


def updated():
    tables = [draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(ROWS, WIDTH).square()]
    return update(tables, torch.arange(0, ROWS, 2), draw(ROWS // 2, WIDTH))


@pytest.mark.parametrize("loop", [sums, pairs, updated])
def test_two_threads_compute_what_one_does(loop):
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(loop())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    assert found[0].isfinite().all()


@pytest.mark.parametrize(
    ("threads", "refuse"),
    [(1, None), (2, None), (1, RuntimeError("no locator")), (1, OSError(28, "No space left"))],
)
def test_loops_run_on_torchs_threads_and_where_nothing_can_be_written(monkeypatch, threads, refuse):
    def fill(numbers, value):
        for i in numba.prange(len(numbers)):
            numbers[i] = value

    compile_loop, asked, options = numba.njit, [], []

    def njit(cache, **given):
        options.append((cache, given["parallel"]))
        if cache and refuse is not None:
            raise refuse
        return compile_loop(**given)

    monkeypatch.setattr(cpu_kernels.numba, "njit", njit)
    monkeypatch.setattr(cpu_kernels.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_kernels.numba.config, "NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr(cpu_kernels.numba, "set_num_threads", asked.append)
    numbers = np.zeros(5)
    cpu_kernels.compiled(fill)(numbers, 2.0)
    assert numbers.tolist() == [2.0] * 5
    tried = [True] if refuse is None else [True, False]
    assert options == [(kept, threads > 1) for kept in tried]
    assert asked == ([2] if threads > 1 else [])


def test_a_step_divided_by_nothing_raises_nothing():
    tables = [torch.zeros(2, WIDTH) for _ in range(3)]
    assert update(tables, torch.arange(2), torch.zeros(2, WIDTH), eps=0.0)[0].isnan().all()
