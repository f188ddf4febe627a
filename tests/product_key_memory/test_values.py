"""Sums of values and their gradients, dense, sparse and lazy; shared tables; sizes."""

import copy
import pickle

import pytest
import torch
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory import lazy_adam, values
from fairseq_plugins.product_key_memory.lazy_adam import LazyMemory, LazyValues
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.values import Values
from tests.product_key_memory.layer import BATCH_NORM, TOKENS, WIDTH, D, Pair, draw, exact_memory


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_reads_in_one_graph_add_their_gradients(reentrant):
    """Also if activations are computed again, which batch norm counts once."""
    ordinary, lazy = exact_memory(**BATCH_NORM), exact_memory(kind=LazyMemory, **BATCH_NORM)
    x = draw(TOKENS, D)

    def read_lazily(x):
        if reentrant is None:
            return lazy(x)
        return checkpoint(lazy, x, use_reentrant=reentrant)

    ordinary(ordinary(x)).square().sum().backward()
    read_lazily(read_lazily(x)).square().sum().backward()
    assert not lazy.values.weight.requires_grad
    for one, other in zip(lazy.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad)
    torch.testing.assert_close([*lazy.buffers()], [*ordinary.buffers()])
    lazy.zero_grad()
    assert lazy.values.weight.grad is None


def test_lazy_values_get_no_gradient_in_evaluation():
    memory = exact_memory(kind=LazyMemory)
    x = draw(TOKENS, D)
    with torch.no_grad():
        assert not memory(x).requires_grad
    memory.eval()
    memory(x).sum().backward()
    assert memory.values.weight.grad is None
    assert x.grad.any()


def test_shared_values_stay_one_parameter():
    pair, other = Pair(), Pair(seed=2)
    state = pair.state_dict()
    # as torch saves tied parameters
    tables = [state[f"{name}.values.weight"] for name in ("first", "second")]
    assert tables[0].data_ptr() == tables[1].data_ptr()
    other.load_state_dict(state)
    copies = copy.deepcopy(other), pickle.loads(pickle.dumps(other))
    for each in (other, *copies):
        each.to(torch.bfloat16).to(torch.float32)
        assert each.second.values.weight is each.first.values.weight
        assert len([name for name, _ in each.named_parameters() if "values" in name]) == 1
    for each in copies:
        assert torch.equal(each.values.weight, pair.values.weight.bfloat16().float())


# --- sizes


def largest(slots, kind, sparse=True):
    """Return the size, in 4-byte numbers, of the largest tensor of a forward and backward pass."""
    torch.manual_seed(1)
    memory = kind(32, slots, heads=2, knn=8, query_dim=8, sparse=sparse)
    # 64 tokens, only 2 of them different, read few rows
    x = torch.randn(2, 32).repeat(32, 1).requires_grad_()
    with profile(profile_memory=True) as profiled:
        memory(x).square().sum().backward()
    assert memory.values.weight.grad.is_sparse == sparse
    return max(operation.self_cpu_memory_usage for operation in profiled.events()) / 4


@pytest.mark.parametrize("kind", [ProductKeyMemory, LazyMemory])
def test_no_tensor_grows_with_the_table_or_with_reads_times_width(kind):
    tokens, reads, width = 64, 2 * 8, 32
    # the largest tensor holds the scores of 2·2·n sub-keys, or the outputs
    for n in (16, 60):
        assert largest(n * n, kind) == max(tokens * width, tokens * 2 * 2 * n)
        assert tokens * 2 * 2 * n < min(tokens * reads * width, 60 * 60 * width)
    assert largest(60 * 60, ProductKeyMemory, sparse=False) == 60 * 60 * width


TABLE = 12
# the rows that each token reads
READS = {
    "some twice": [[5, 4, 5], [1, 5, 2]],
    "one alone": [[7, 7, 7], [7, 7, 7]],
    "each once": [[9, 8], [7, 6]],
    "first and last": [[11, 0], [0, 11]],
    "more than rows": torch.randint(TABLE, (9, 7), generator=torch.Generator().manual_seed(1)),
    "every row": torch.arange(TABLE).repeat(3, 2),
    "none": torch.empty(0, 3, dtype=torch.long),
}


@pytest.mark.parametrize(("sparse", "lazy"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kernel", ["plain", "fast", "without numba"])
@pytest.mark.parametrize("reads", READS)
def test_sums_and_gradients_equal_the_formula(monkeypatch, reads, kernel, sparse, lazy):
    if kernel == "without numba":
        monkeypatch.setattr(lazy_adam, "cpu_loops", lambda x: None)
    rows = torch.as_tensor(READS[reads])
    table, weights, out_grad = (
        draw(TABLE, WIDTH),
        draw(*rows.shape),
        draw(len(rows), WIDTH).detach(),
    )
    # a token without a gradient
    out_grad[1:2] = 0
    # (N, R, 1), (N, R, d) -> (N, d)
    expected = (weights.unsqueeze(-1) * table[rows]).sum(1)
    kernel = "plain" if kernel == "plain" else "fast"
    memory = (LazyValues if lazy else Values)(*table.shape, kernel, sparse)
    memory.weight.data = table.detach().clone()
    summed = memory(rows, weights)
    torch.testing.assert_close(summed, expected)
    summed.backward(out_grad)
    grad, memory_grad = weights.grad, memory.weight.grad
    weights.grad = None
    expected.backward(out_grad)
    torch.testing.assert_close(grad, weights.grad)
    torch.testing.assert_close(memory_grad.to_dense(), table.grad)
    assert memory_grad.is_sparse == sparse
    if lazy or (sparse and kernel != "plain"):
        # exactly the rows that have a gradient, in rising order
        listed = memory_grad._indices()[0].tolist()
        assert listed == table.grad.any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("reads", READS)
def test_gradients_in_pieces_equal_the_formula(monkeypatch, reads):
    """So they are computed in bfloat16 on an accelerator."""
    monkeypatch.setattr(values, "TOKENS_AT_A_TIME", 2)
    rows = torch.as_tensor(READS[reads])
    table, weights, out_grad = (
        draw(TABLE, WIDTH),
        draw(*rows.shape),
        draw(len(rows), WIDTH).detach(),
    )
    values._WeightedSumInPieces.apply(table.detach(), rows, weights).backward(out_grad)
    (expected,) = torch.autograd.grad(
        (weights.unsqueeze(-1) * table[rows]).sum(1), weights, out_grad
    )
    torch.testing.assert_close(weights.grad, expected)
