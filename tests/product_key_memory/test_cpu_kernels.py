"""Compiled loops: any number of threads gives the same; where nothing is kept they work too."""

import builtins
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch

from fairseq_plugins.product_key_memory import cpu_kernels
from tests.product_key_memory.standalone import WIDTH, adam_with_memory, learn, make_memory

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


def fill(numbers, value):
    for i in numba.prange(len(numbers)):
        numbers[i] = value


def recorded(monkeypatch, refuse=None):
    """Options of each version that is compiled from now on; those kept raise ``refuse``."""
    compile_loop, options = numba.njit, []

    def njit(**given):
        options.append(given)
        if given["cache"] and refuse is not None:
            raise refuse
        return compile_loop(**{**given, "cache": False})

    monkeypatch.setattr(cpu_kernels.numba, "njit", njit)
    return options


@pytest.mark.parametrize(
    "refuse", [RuntimeError("no locator available for file"), OSError(28, "No space left")]
)
def test_where_nothing_can_be_written_it_is_compiled_all_the_same(monkeypatch, refuse):
    options = recorded(monkeypatch, refuse)
    numbers = np.zeros(5)
    cpu_kernels.compiled(fill)(numbers, 2.0)
    assert numbers.tolist() == [2.0] * 5
    assert [given["cache"] for given in options] == [True, False]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_as_many_as_torchs(monkeypatch, threads):
    options, asked = recorded(monkeypatch), []
    monkeypatch.setattr(cpu_kernels.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_kernels.numba.config, "NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr(cpu_kernels.numba, "set_num_threads", asked.append)
    cpu_kernels.compiled(fill)(np.zeros(5), 2.0)
    assert [given["parallel"] for given in options] == [threads > 1]
    assert asked == ([2] if threads > 1 else [])


def test_a_step_divided_by_nothing_raises_nothing():
    tables = [torch.zeros(2, WIDTH) for _ in range(3)]
    assert update(tables, torch.arange(2), torch.zeros(2, WIDTH), eps=0.0)[0].isnan().all()


def trained():
    memory = make_memory(slots=81, knn=5)
    learn(memory, adam_with_memory(memory))
    return dict(memory.state_dict())


def test_without_numba_torchs_operations_do_the_same(monkeypatch, caplog):
    with_numba, message = trained(), "Numba needs NumPy 9 or less"
    imported = builtins.__import__

    def refuse(name, *args):
        if name == "numba":
            raise ImportError(message)
        return imported(name, *args)

    cpu_kernels.import_numba.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", refuse)
        without = trained()
    cpu_kernels.import_numba.cache_clear()
    torch.testing.assert_close(without, with_numba)
    assert [message in record.message for record in caplog.records].count(True) == 1


def test_importing_the_package_does_not_import_numba():
    program = "import sys, fairseq_plugins; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
