"""Compiled loops give the same results on any number of threads, and run without a cache."""

import numba
import numpy as np
import pytest
import torch

from fairseq_plugins.product_key_memory import cpu_kernels, cpu_loops
from tests.product_key_memory.layer import WIDTH, adam_with_memory, learn, make_memory

assert cpu_kernels.use_numba(torch.ones(1))


def trained():
    memory = make_memory(slots=81, knn=5)
    learn(memory, adam_with_memory(memory), tokens=40)
    return dict(memory.state_dict())


def test_kernels_compute_the_same_on_two_threads():
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(trained())
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*results)


def test_an_update_that_divides_by_0_raises_nothing():
    tables, rows = torch.zeros(3, 4, WIDTH), torch.tensor([1, 3])
    numbers = {"scale": torch.tensor(1.0), "decay": 0.0, "step_size": 1e-3, "eps": 0.0}
    cpu_kernels.adam_step(*tables, rows, torch.zeros(2, WIDTH), betas=(0.9, 0.98), **numbers)
    assert tables[0].isnan().any(1).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("threads", "refuse"),
    [(1, None), (2, None), (1, RuntimeError("no locator")), (1, OSError(28, "No space left"))],
)
def test_loops_run_on_torchs_threads_and_without_a_cache(monkeypatch, threads, refuse):
    def fill(numbers, value):
        for i in numba.prange(len(numbers)):
            numbers[i] = value

    compile_loop, asked, options = numba.njit, [], []

    def njit(cache, **arguments):
        options.append((cache, arguments["parallel"]))
        if cache and refuse is not None:
            raise refuse
        return compile_loop(**arguments)

    monkeypatch.setattr(cpu_loops.numba, "njit", njit)
    monkeypatch.setattr(cpu_loops.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_loops.numba.config, "NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr(cpu_loops.numba, "set_num_threads", asked.append)
    numbers = np.zeros(5)
    cpu_loops.compiled(fill)(numbers, 2.0)
    assert numbers.tolist() == [2.0] * 5
    tried = [True] if refuse is None else [True, False]
    assert options == [(cached, threads > 1) for cached in tried]
    assert asked == ([2] if threads > 1 else [])
