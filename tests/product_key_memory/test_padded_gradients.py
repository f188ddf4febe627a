"""Gradients of rows as accelerators have them, of a size that the host knows, beside plain ones."""

import pytest
import torch

from fairseq_plugins.product_key_memory import lazy_adam, values
from fairseq_plugins.product_key_memory.values import SpareRows, plain_weighted_sum, weighted_sum
from tests.product_key_memory.standalone import (
    BETAS,
    SLOTS,
    WIDTH,
    adam_with_memory,
    make_memory,
    make_pair,
)

TABLE = 12
# rows that tokens read
READS = {
    "some twice": [[5, 4, 5], [1, 5, 2]],
    "one alone": [[7, 7, 7], [7, 7, 7]],
    "each once": [[9, 8], [7, 6]],
    "first and last": [[11, 0], [0, 11]],
    "more than rows": torch.randint(TABLE, (9, 7), generator=torch.Generator().manual_seed(1)),
    "every row": torch.arange(TABLE).repeat(3, 2),
    "none": torch.empty(0, 3, dtype=torch.long),
}


@pytest.fixture(autouse=True)
def padded(monkeypatch):
    """Gradients as on an accelerator."""
    monkeypatch.setattr(values, "pads_rows", lambda x: True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("reads", READS)
def test_gradients_are_those_of_the_plain_sum(reads, sparse, frozen):
    torch.manual_seed(1)
    rows = torch.as_tensor(READS[reads])
    table = torch.randn(TABLE, WIDTH, dtype=torch.float64, requires_grad=True)
    weights, slope = torch.randn(rows.shape).double(), torch.randn(len(rows), WIDTH).double()
    # a token without a gradient
    slope[1:2] = 0
    which = torch.arange(TABLE) % 2 == 1 if frozen else None
    found = weighted_sum(table, rows, weights, sparse, SpareRows(TABLE), which)
    expected = plain_weighted_sum(table, rows, weights, frozen=which)
    (found,) = torch.autograd.grad(found, table, slope)
    (expected,) = torch.autograd.grad(expected, table, slope)
    torch.testing.assert_close(found.to_dense(), expected)
    assert found.is_sparse == sparse
    if sparse:
        read = rows.unique().tolist()
        size = min(rows.numel(), TABLE)
        assert found._indices()[0].tolist() == read + read[-1:] * (size - len(read))
        assert not found._values()[len(read) :].any()


def adam_by_hand(state, grad, step, lr, scale, decay):
    """A step of the rows with a gradient, in all rows at once."""
    table, mean, square = state
    read = grad.ne(0).any(-1, keepdim=True)
    grad = grad * scale
    new_mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    new_square = BETAS[1] * square + (1 - BETAS[1]) * grad**2
    corrected = lr * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step)
    new = table * (1 - decay * lr) - corrected * new_mean / (new_square.sqrt() + 1e-8)
    after = (new, new_mean, new_square)
    return [torch.where(read, x, old) for x, old in zip(after, state, strict=True)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("reads", READS)
def test_rows_are_updated_by_the_rule_however_often_they_are_listed(reads, decay):
    torch.manual_seed(1)
    rows = torch.as_tensor(READS[reads])
    state = [torch.randn(TABLE, WIDTH).double() for _ in range(3)]
    state[2] = state[2].abs()
    expected = [x.clone() for x in state]
    for step in range(1, 4):
        slope = torch.randn(len(rows), WIDTH).double()
        slope[step - 1 : step] = 0
        found = values.padded_row_gradients(rows, torch.rand(rows.shape), slope, TABLE)
        corrected = 0.1 * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step)
        lazy_adam.update_rows(
            *state, *found, BETAS, torch.tensor(0.5), decay * 0.1, corrected, 1e-8, padded=True
        )
        of_all = torch.zeros(TABLE, WIDTH).double().index_add_(0, *found)
        expected = adam_by_hand(expected, of_all, step, 0.1, 0.5, decay)
        torch.testing.assert_close(state, expected)


def frozen_memory(apart):
    memory = make_memory(apart)
    memory.train_only(torch.arange(SLOTS) % 3 > 0)
    return memory


def plainly_searched(apart):
    memory = make_memory(apart)
    memory.search = "plain"
    return memory


MODELS = {
    "memory": make_memory,
    "all slots": lambda apart: make_memory(apart, slots=16, knn=16),
    "frozen slots": frozen_memory,
    "shared values": make_pair,
    "plain search": plainly_searched,
}


@pytest.mark.parametrize("at_once", [1 << 22, 3 * WIDTH])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_with_dense_gradients(monkeypatch, model, accumulated, at_once):
    monkeypatch.setitem(lazy_adam.UPDATED_AT_ONCE, "cpu", at_once)
    ours, plain = (MODELS[model](apart) for apart in (True, False))
    optimizer = adam_with_memory(ours, memory_lr=0.02)
    state = [plain.values.detach().double(), *torch.zeros(2, *plain.values.shape).double()]
    torch.manual_seed(2)
    for step in range(1, 5):
        optimizer.zero_grad()
        plain.zero_grad()
        for _ in range(accumulated):
            x = torch.randn(5, WIDTH)
            optimizer.backward(ours(x).square().sum())
            plain(x).square().sum().backward()
        gradient = ours.values.grad
        assert not gradient.is_coalesced()
        assert gradient._nnz() <= len(ours.values)
        changes = gradient._indices()[0].diff()
        assert (changes >= 0).all()
        assert not gradient._values()[1:][changes == 0].any()
        torch.testing.assert_close(gradient.to_dense(), plain.values.grad, rtol=1e-5, atol=1e-5)
        gradients = [x.grad for x in plain.parameters()]
        expected = torch.stack([grad.norm() for grad in gradients if grad is not None]).norm()
        norm = optimizer.clip_grad_norm(0.1)
        torch.testing.assert_close(norm, expected)
        optimizer.step()
        state = adam_by_hand(state, plain.values.grad.double(), step, 0.02, 0.1 / norm, 0.0)
        with torch.no_grad():
            plain.load_state_dict(ours.state_dict())
            plain.values.copy_(state[0])
        torch.testing.assert_close(ours.values, plain.values, rtol=1e-5, atol=1e-6)


def test_what_the_loss_does_not_depend_on_moves_nothing():
    memory = make_memory()
    optimizer = adam_with_memory(memory, memory_weight_decay=0.1)
    x = torch.randn(4, WIDTH)
    for factor in (1, 0):
        before = memory.values.detach().clone()
        optimizer.zero_grad()
        optimizer.backward(memory(x).sum() * factor)
        optimizer.step()
        assert torch.equal(memory.values, before) == (factor == 0)
