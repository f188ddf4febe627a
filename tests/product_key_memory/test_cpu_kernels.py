"""Compiled loops: any number of threads gives the same; they work where nothing can be written."""

import numba
import numpy as np
import pytest
import torch

from fairseq_plugins.product_key_memory import cpu_kernels
from tests.product_key_memory.standalone import WIDTH, adam_with_memory, learn, make_memory

assert cpu_kernels.use_numba(torch.ones(1))


def test_two_threads_compute_what_one_does():
    """Selection, sums, gradients and updates; a step divided by 0 raises nothing."""
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            memory = make_memory(slots=81, knn=5)
            learn(memory, adam_with_memory(memory), tokens=40)
            tables = [torch.zeros(2, WIDTH) for _ in range(3)]
            numbers = (0.9, 0.98), torch.tensor(1.0), 0.01, 1e-3, 0.0
            cpu_kernels.update_rows(*tables, torch.arange(2), torch.zeros(2, WIDTH), *numbers)
            assert tables[0].isnan().all()
            found.append(dict(memory.state_dict()))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*found)


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
