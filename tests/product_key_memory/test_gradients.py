"""Gradients of values, beside autograd and in spare buffers; shared tables; sizes."""

import copy
import pickle

import pytest
import torch
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.values import SpareRows, plain_weighted_sum, weighted_sum
from tests.product_key_memory.layer import (
    SLOTS,
    TOKENS,
    WIDTH,
    D,
    adam_with_memory,
    draw,
    exact_memory,
    make_pair,
)
from tests.product_key_memory.tiny import build, memories, padded, score


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
    assert not beside.values.requires_grad
    torch.testing.assert_close(beside.values.grad.to_dense(), ordinary.values.grad)
    beside.zero_grad()
    assert beside.values.grad is None


def test_a_pass_that_leaves_a_memory_out_counts_too():
    plain, apart = make_pair(False), make_pair(True)
    x = torch.randn(2, 5, WIDTH)
    for pair in (plain, apart):
        pair.first(x[0]).square().sum().backward()
        pair(x[1]).square().sum().backward()
    torch.testing.assert_close(apart.values.grad.to_dense(), plain.values.grad)


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


def test_a_state_has_a_shared_table_once():
    pair, other = make_pair(False), make_pair(False, seed=2)
    state = pair.state_dict()
    assert [name for name in state if name.endswith("values")] == ["first.values"]
    other.load_state_dict(state)
    assert other.second.values is other.first.values
    assert torch.equal(other.second.values, pair.values)
    state["second.values"] = torch.zeros(SLOTS, WIDTH)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "second.values"'):
        pair.load_state_dict(state)


CHANGES = {
    "to": lambda memory: memory.to(torch.bfloat16),
    "assign": lambda memory: memory.load_state_dict(
        copy.deepcopy(memory.state_dict()), assign=True
    ),
    "meta": lambda memory: memory.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_table_is_that_of_the_parameter_after_changes_in_place(change):
    memory = exact_memory()
    memory.keep_gradient_beside_autograd()
    CHANGES[change](memory)
    assert list(memory.state_dict()) == list(exact_memory().state_dict())
    assert memory.table.values is memory.values
    assert memory.table.values is memory.get_parameter("values")
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_()
    memory(torch.randn(TOKENS, D).to(memory.values.dtype)).sum().backward()
    assert memory.table.values.grad.is_sparse


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", ["language model", "translation", "transformer_xl"])
def test_a_copy_of_a_model_is_trained_as_the_model_is(kind, copied):
    model = build(kind, memory_optimizer="adam_with_memory", memory_share_values=True)
    twin, batch = copied(model), padded(7, 4)
    for each in (model, twin):
        optimizer = adam_with_memory(each)
        (table,) = optimizer.tables
        for memory in memories(each):
            assert memory.table is table
            assert table.values is memory.values
        optimizer.backward(score(each.train(), batch).square().sum())
        optimizer.step()
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))


# --- sizes


def largest(slots, beside, sparse=True):
    """Return the size, in 4-byte numbers, of the largest tensor of a forward and backward pass."""
    torch.manual_seed(1)
    memory = ProductKeyMemory(32, slots, heads=2, knn=8, query_dim=8, sparse=sparse)
    if beside:
        memory.keep_gradient_beside_autograd()
    # 64 tokens, only 2 of them different, read few rows
    x = torch.randn(2, 32).repeat(32, 1).requires_grad_()
    with profile(profile_memory=True) as made:
        memory(x).square().sum().backward()
    assert memory.values.grad.is_sparse == sparse
    return max(operation.self_cpu_memory_usage for operation in made.events()) / 4


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_grows_with_the_table_nor_with_reads_times_width(beside):
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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", ["plain", "on a CPU", "in spare memory", "padded"])
@pytest.mark.parametrize("reads", READS)
def test_gradients_of_rows_are_those_of_the_formula(monkeypatch, reads, how, sparse, frozen):
    monkeypatch.setattr(values, "pads_rows", lambda x: how == "padded")
    rows = torch.as_tensor(READS[reads])
    table, weights, slope = draw(TABLE, WIDTH), draw(*rows.shape), draw(len(rows), WIDTH).detach()
    # a token without a gradient
    slope[1:2] = 0
    which = torch.arange(TABLE) % 2 == 1 if frozen else None
    if how == "plain":
        summed = plain_weighted_sum(table, rows, weights, sparse, which)
    else:
        spare = None if how == "on a CPU" else SpareRows(TABLE)
        summed = weighted_sum(table, rows, weights.detach(), sparse, spare, which)
    expected = plain_weighted_sum(table, rows, weights)
    torch.testing.assert_close(summed, expected)
    (found,) = torch.autograd.grad(summed, table, slope)
    (expected,) = torch.autograd.grad(expected, table, slope)
    if frozen:
        expected = expected * ~which.unsqueeze(1)
    torch.testing.assert_close(found.to_dense(), expected)
    assert found.is_sparse == sparse
    if not sparse or how == "plain":
        return
    assert found.is_coalesced() == (how != "padded")
    listed = found._indices()[0].tolist()
    if how == "padded":
        read = rows.unique().tolist()
        assert listed == read + read[-1:] * (min(rows.numel(), TABLE) - len(read))
        assert not found._values()[len(read) :].any()
    else:
        # exactly the rows that have a gradient
        assert listed == expected.any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("reads", READS)
def test_gradients_of_weights_in_bfloat16_on_accelerators(monkeypatch, reads):
    monkeypatch.setattr(values, "pads_rows", lambda x: True)
    monkeypatch.setattr(values, "TOKENS_AT_A_TIME", 2)
    # as on a GPU, torch has no gradient
    monkeypatch.setattr(values, "sum_rows", torch.no_grad()(values.sum_rows))
    rows = torch.as_tensor(READS[reads])
    drawn = draw(TABLE, WIDTH), draw(*rows.shape), draw(len(rows), WIDTH)
    table, weights, slope = (tensor.detach().bfloat16() for tensor in drawn)
    gradients = []
    for total, dtype in ((weighted_sum, torch.bfloat16), (plain_weighted_sum, torch.float64)):
        leaf = weights.detach().to(dtype).requires_grad_()
        total(table.to(dtype), rows, leaf).backward(slope.to(dtype))
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1].bfloat16(), rtol=1e-2, atol=1e-2)


def test_spare_memory_is_taken_again_when_it_was_given_back_and_is_large_enough():
    spare, like = SpareRows(100), torch.empty(1, WIDTH)
    first = spare.take(16, like)
    assert first.shape == (16, WIDTH)
    # `first` is still in use; afterwards, only the buffer taken last can be given back
    other, foreign = spare.take(16, like), torch.empty(16, WIDTH)
    spare.give_back(first)
    spare.give_back(foreign)
    used = [x.data_ptr() for x in (first, other, foreign, spare.take(4, like))]
    assert len(set(used)) == 4
    last = spare.take(16, like)
    spare.give_back(last)
    spare.give_back(foreign)
    # a buffer has room for an eighth more rows than were asked for
    again = spare.take(18, like)
    assert again.data_ptr() == last.data_ptr()
    spare.give_back(again)
    larger = spare.take(19, like)
    assert larger.data_ptr() != last.data_ptr()
    spare.give_back(larger)
    for unlike in (torch.empty(1, WIDTH + 1), torch.empty(1, WIDTH).double()):
        taken = spare.take(2, unlike)
        assert (taken.dtype, taken.shape) == (unlike.dtype, (2, unlike.size(1)))
        spare.give_back(taken)
