"""Gradients of a memory: sparse, beside autograd, plain, compiled; how large tensors get."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory import cpu_kernels, search, values
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from tests.product_key_memory.held import Held
from tests.product_key_memory.standalone import (
    EVERYTHING,
    PADDING,
    TOKENS,
    D,
    K,
    draw,
    exact_memory,
)


def test_sparse_gradients_are_the_dense_ones_of_the_rows_read():
    memory = exact_memory(keys="product")
    x = draw(TOKENS, D)
    memory(x).square().sum().backward()
    dense = memory.values.grad
    memory.values.grad, memory.sparse = None, True
    memory(x).square().sum().backward()
    sparse = memory.values.grad
    assert torch.equal(sparse.to_dense(), dense)
    assert sparse._indices().tolist() == [dense.any(-1).nonzero().flatten().tolist()]
    assert 0 < sparse._nnz() < K


def trained(steps, beside, search):
    """A memory, or a twin of it whose values' gradient stays beside autograd."""
    ordinary = exact_memory(query_batch_norm=True, search=search)
    twin = copy.deepcopy(ordinary)
    twin.keep_gradient_beside_autograd()
    torch.manual_seed(2)
    for _ in range(steps):
        x = draw(TOKENS, D)
        for memory in (ordinary, twin):
            memory(x).square().sum().backward()
    return twin if beside else ordinary


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_gradient_beside_autograd_is_the_ordinary_one_and_accumulates(steps, search):
    ordinary, beside = (trained(steps, how, search) for how in (False, True))
    assert not beside.values.requires_grad
    assert beside.values.grad.is_sparse
    # each row once, rising
    assert (beside.values.grad.indices()[0].diff() > 0).all()
    torch.testing.assert_close(beside.values.grad.to_dense(), ordinary.values.grad)
    for (name, one), other in zip(ordinary.named_parameters(), beside.parameters(), strict=True):
        if name != "values":
            assert torch.equal(one.grad, other.grad)
    beside.zero_grad()
    assert beside.values.grad is None


@pytest.mark.parametrize("recomputed", [False, True])
def test_two_readings_in_one_graph_add_their_gradients(recomputed):
    ordinary = exact_memory()
    beside = copy.deepcopy(ordinary)
    beside.keep_gradient_beside_autograd()
    x = draw(TOKENS, D)
    ordinary(ordinary(x)).square().sum().backward()

    def read(x):
        return checkpoint(beside, x, use_reentrant=False) if recomputed else beside(x)

    read(read(x)).square().sum().backward()
    torch.testing.assert_close(beside.values.grad.to_dense(), ordinary.values.grad)


def test_values_beside_autograd_get_no_gradient_in_evaluation():
    memory = exact_memory()
    memory.keep_gradient_beside_autograd()
    x = draw(TOKENS, D)
    with torch.no_grad():
        assert not memory(x).requires_grad
    memory.eval()
    memory(x).sum().backward()
    assert memory.values.grad is None
    assert x.grad.any()
    memory.train()
    memory(x).sum().backward()
    assert memory.values.grad is not None


def pickled(memory):
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(memory):
    memory.load_state_dict(copy.deepcopy(memory.state_dict()), assign=True)
    return memory


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "half": lambda memory: memory.half(),
    "to": lambda memory: memory.to(torch.bfloat16),
    "assign": assigned,
    "meta": lambda memory: memory.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_table_is_that_of_the_parameter_after_copies_and_casts(change):
    memory = exact_memory()
    memory.keep_gradient_beside_autograd()
    changed = CHANGES[change](memory)
    assert list(changed.state_dict()) == list(exact_memory().state_dict())
    assert changed.table.values is changed.values
    assert changed.table.values is changed.get_parameter("values")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.normal_()
    changed(torch.randn(TOKENS, D).to(changed.values.dtype)).sum().backward()
    assert changed.table.values.grad.is_sparse
    if changed is not memory:
        assert changed.table is not memory.table
        assert memory.values.grad is None


def held_by(slots, beside, sparse=True):
    """The sizes of all that a pass and its backward pass hold; the table's of a token's reads."""
    torch.manual_seed(1)
    memory = ProductKeyMemory(32, slots, heads=2, knn=8, query_dim=8, sparse=sparse)
    if beside:
        memory.keep_gradient_beside_autograd()
    # 64 tokens of 2 kinds: they read few rows
    x = torch.randn(2, 32).repeat(32, 1).requires_grad_()
    with Held() as held:
        memory(x).square().sum().backward()
    assert memory.values.grad.is_sparse == sparse
    return max(held.sizes)


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_grows_with_the_table_nor_with_reads_times_width(beside):
    tokens, reads, width = 64, 2 * 8, 32
    # the largest are the scores of 2·2·n sub-keys, or the outputs
    for n in (16, 60):
        assert held_by(n * n, beside) == max(tokens * width, tokens * 2 * 2 * n)
        assert tokens * 2 * 2 * n < min(tokens * reads * width, 60 * 60 * width)
    assert held_by(60 * 60, False, sparse=False) == 60 * 60 * width


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("options", [{}, {"knn": K}, EVERYTHING])
def test_a_plain_memory_is_the_fast_one(options, keys):
    fast, plain = (
        exact_memory(keys=keys, search=search, **options) for search in ("torch", "plain")
    )
    assert plain.load_state_dict(fast.state_dict())
    x = draw(TOKENS, D)
    results = [memory(x, torch.tensor(PADDING)) for memory in (fast, plain)]
    torch.testing.assert_close(*results)
    weight = torch.randn(TOKENS, D, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(result, [x, *memory.parameters()], weight)
        for memory, result in zip((fast, plain), results, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_a_plain_memory_needs_no_loops(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "use_numba", None)
    for module in (search, values):
        monkeypatch.setattr(module, "use_numba", None)
    memory = exact_memory(search="plain")
    memory.keep_gradient_beside_autograd()
    memory(draw(TOKENS, D)).sum().backward()
    assert memory.values.grad.is_sparse


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_a_plain_memory_has_higher_derivatives(keys):
    memory = exact_memory(search="plain", keys=keys, query_batch_norm=True)
    x = draw(3, D)
    assert torch.autograd.gradgradcheck(memory, x)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"keys": "flat"}, True),
        ({"query_layer_norm": True, "value_dim": 3}, True),
        ({"output_norm": True, "output_gate": True}, True),
        (EVERYTHING, True),
    ],
)
def test_a_compiled_plain_memory_is_the_same(options, whole):
    eager = exact_memory(search="plain", **options)
    twin = copy.deepcopy(eager)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=whole)
    x = draw(TOKENS, D)
    found = []
    for memory, module in ((eager, eager), (compiled, twin)):
        out = memory(x)
        of_all = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        found.append([out.detach(), *of_all])
    torch.testing.assert_close(*found)
