"""Compiled loops give the same results on any number of threads, and run without a cache."""

import numba
import pytest
import torch

from fairseq_plugins.product_key_memory import cpu_loops
from tests.product_key_memory.layer import WIDTH, adam_with_memory, learn, make_memory


@pytest.fixture
def compiled_anew():
    """Forget compiled loops before and after a test."""
    cpu_loops.compile_loops.cache_clear()
    yield
    cpu_loops.compile_loops.cache_clear()


def trained():
    memory = make_memory(slots=81, knn=5)
    learn(memory, adam_with_memory(memory), tokens=40)
    return dict(memory.state_dict())


def test_loops_compute_the_same_on_two_threads():
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
    # β, the factor, and no decay, step size or ε
    numbers = torch.tensor([0.9, 0.1, 0.98, 0.02, 1, 0, 1e-3, 0])
    cpu_loops.run("adam_step", *tables, rows, torch.zeros(2, WIDTH), numbers)
    assert tables[0].isnan().any(1).tolist() == [False, True, False, True]


def sum_rows():
    """Sum rows of a table in a loop."""
    rows, sums = torch.randn(4, WIDTH), torch.empty(2, WIDTH)
    places, weights, starts = torch.tensor([3, 0, 1]), torch.ones(3), torch.tensor([0, 2, 3])
    cpu_loops.run("segment_sum", rows, places, weights, starts, sums)
    torch.testing.assert_close(sums, torch.stack([rows[3] + rows[0], rows[1]]))


def test_one_thread_takes_no_parallel_code_from_the_cache(monkeypatch, tmp_path, compiled_anew):
    """Its threads would end a process that forks; numba's index does not know which code it is."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    # on any number of cores
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr(numba, "set_num_threads", lambda threads: None)
    for threads in (2, 1):
        monkeypatch.setattr(cpu_loops.torch, "get_num_threads", lambda threads=threads: threads)
        sum_rows()
        assert not cpu_loops.compile_loops(threads > 1)["segment_sum"].stats.cache_hits
    cpu_loops.compile_loops.cache_clear()
    sum_rows()
    assert cpu_loops.compile_loops(False)["segment_sum"].stats.cache_hits


def test_loops_run_where_no_folder_can_be_written(monkeypatch, compiled_anew):
    compile_loop = numba.njit

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("no locator available")
        return compile_loop(**options)

    monkeypatch.setattr(cpu_loops.numba, "njit", njit)
    sum_rows()
