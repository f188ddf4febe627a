"""Sums of values and their gradients, dense, sparse and beside autograd; shared tables; sizes."""

import copy
import pickle

import pytest
import torch
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.values import Values
from tests.product_key_memory.layer import BATCH_NORM, TOKENS, WIDTH, D, Pair, draw, exact_memory


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_reads_in_one_graph_add_their_gradients(reentrant):
    """Also if activations are computed again, which batch norm counts once."""
    ordinary = exact_memory(**BATCH_NORM)
    beside = copy.deepcopy(ordinary)
    beside.values.keep_gradient_beside_autograd()
    x = draw(TOKENS, D)

    def read_beside(x):
        if reentrant is None:
            return beside(x)
        return checkpoint(beside, x, use_reentrant=reentrant)

    ordinary(ordinary(x)).square().sum().backward()
    read_beside(read_beside(x)).square().sum().backward()
    assert not beside.values.weight.requires_grad
    for one, other in zip(beside.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad)
    torch.testing.assert_close([*beside.buffers()], [*ordinary.buffers()])
    beside.zero_grad()
    assert beside.values.weight.grad is None


def test_values_beside_autograd_get_no_gradient_in_evaluation():
    memory = exact_memory()
    memory.values.keep_gradient_beside_autograd()
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


def largest(slots, beside, sparse=True):
    """Return the size, in 4-byte numbers, of the largest tensor of a forward and backward pass."""
    torch.manual_seed(1)
    memory = ProductKeyMemory(32, slots, heads=2, knn=8, query_dim=8, sparse=sparse)
    if beside:
        memory.values.keep_gradient_beside_autograd()
    # 64 tokens, only 2 of them different, read_beside few rows
    x = torch.randn(2, 32).repeat(32, 1).requires_grad_()
    with profile(profile_memory=True) as profiled:
        memory(x).square().sum().backward()
    assert memory.values.weight.grad.is_sparse == sparse
    return max(operation.self_cpu_memory_usage for operation in profiled.events()) / 4


@pytest.mark.parametrize("beside", [False, True])
def test_no_tensor_grows_with_the_table_or_with_reads_times_width(beside):
    tokens, reads, width = 64, 2 * 8, 32
    # the largest tensor holds the scores of 2·2·n sub-keys, or the outputs
    for n in (16, 60):
        assert largest(n * n, beside) == max(tokens * width, tokens * 2 * 2 * n)
        assert tokens * 2 * 2 * n < min(tokens * reads * width, 60 * 60 * width)
    assert largest(60 * 60, False, sparse=False) == 60 * 60 * width


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


@pytest.mark.parametrize(("sparse", "beside"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kernel", ["plain", "fast", "without numba"])
@pytest.mark.parametrize("reads", READS)
def test_sums_and_gradients_equal_the_formula(monkeypatch, reads, kernel, sparse, beside):
    if kernel == "without numba":
        monkeypatch.setattr(values, "use_numba", lambda x: False)
    rows = torch.as_tensor(READS[reads])
    table, weights, slope = draw(TABLE, WIDTH), draw(*rows.shape), draw(len(rows), WIDTH).detach()
    # a token without a gradient
    slope[1:2] = 0
    # (N, R, 1), (N, R, d) -> (N, d)
    expected = (weights.unsqueeze(-1) * table[rows]).sum(1)
    memory = Values(*table.shape, "plain" if kernel == "plain" else "fast", sparse)
    memory.weight.data = table.detach().clone()
    if beside:
        memory.keep_gradient_beside_autograd()
    summed = memory(rows, weights)
    torch.testing.assert_close(summed, expected)
    summed.backward(slope)
    grad, memory_grad = weights.grad, memory.weight.grad
    weights.grad = None
    expected.backward(slope)
    torch.testing.assert_close(grad, weights.grad)
    torch.testing.assert_close(memory_grad.to_dense(), table.grad)
    assert memory_grad.is_sparse == sparse
    if beside or (sparse and kernel != "plain"):
        # exactly the rows that have a gradient, in rising order
        listed = memory_grad._indices()[0].tolist()
        assert listed == table.grad.any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("reads", READS)
def test_gradients_in_pieces_equal_the_formula(monkeypatch, reads):
    """So they are computed in bfloat16 on an accelerator."""
    monkeypatch.setattr(values, "TOKENS_AT_A_TIME", 2)
    rows = torch.as_tensor(READS[reads])
    table, weights, slope = draw(TABLE, WIDTH), draw(*rows.shape), draw(len(rows), WIDTH).detach()
    values._SumRows.apply(table.detach(), rows, weights).backward(slope)
    (expected,) = torch.autograd.grad((weights.unsqueeze(-1) * table[rows]).sum(1), weights, slope)
    torch.testing.assert_close(weights.grad, expected)
