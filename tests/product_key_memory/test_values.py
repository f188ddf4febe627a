"""Weighted sums of rows: values, gradients of all kinds, spare buffers."""

import pytest
import torch

from fairseq_plugins.product_key_memory.values import (
    SpareRows,
    plain_weighted_sum,
    row_gradients,
    weighted_sum,
)
from tests.gradients import assert_same

TABLE, WIDTH, TOKENS, READS = 12, 4, 5, 6


def draw(tokens=TOKENS, reads=READS, dtype=torch.float64):
    """Values, rows, some of them read twice by a token and some by none, and weights."""
    torch.manual_seed(1)
    values = torch.randn(TABLE, WIDTH, dtype=dtype, requires_grad=True)
    rows = torch.randint(0, TABLE - 4, (tokens, reads)) + 2
    rows[:, 1:2] = rows[:, :1]
    return values, rows, torch.randn(tokens, reads, dtype=dtype, requires_grad=True)


def by_hand(values, rows, weights):
    sums = []
    for of_token, with_weights in zip(rows.tolist(), weights, strict=True):
        pairs = zip(of_token, with_weights, strict=True)
        sums.append(sum(weight * values[row] for row, weight in pairs))
    return torch.stack(sums)


@pytest.mark.parametrize("read", [weighted_sum, plain_weighted_sum])
@pytest.mark.parametrize(("tokens", "reads"), [(1, 1), (1, 6), (5, 1), (5, 6), (30, 40)])
def test_sums_and_gradients_are_the_formula(tokens, reads, read):
    values, rows, weights = draw(tokens, reads)
    found = read(values, rows, weights, sparse=False)
    assert_same(found, by_hand(values, rows, weights), [values, weights])


def gradient(sparse, rows=None, dtype=torch.float64, **size):
    """The gradients of values and weights."""
    values, drawn, weights = draw(dtype=dtype, **size)
    rows = drawn if rows is None else rows
    summed = weighted_sum(values, rows, weights, sparse)
    (summed * torch.randn_like(summed)).sum().backward()
    return values.grad, weights.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sparse_and_dense_gradients_are_equal(dtype):
    (sparse, of_weights), (dense, of_same) = (gradient(how, dtype=dtype) for how in (True, False))
    assert sparse.is_sparse
    assert not dense.is_sparse
    assert sparse.dtype == dense.dtype == dtype
    assert torch.equal(sparse.to_dense(), dense)
    assert torch.equal(of_weights, of_same)


@pytest.mark.parametrize(
    ("rows", "read"),
    [
        ([[3, 3], [3, 3]], [3]),
        ([[11, 0], [0, 11]], [0, 11]),
        ([[5, 4], [1, 5]], [1, 4, 5]),
        ([[9, 8], [7, 6]], [6, 7, 8, 9]),
    ],
)
def test_a_sparse_gradient_is_coalesced_and_lists_exactly_the_rows_read(rows, read):
    values, _, weights = draw(tokens=2, reads=2)
    summed = weighted_sum(values, torch.tensor(rows), weights)
    (grad,) = torch.autograd.grad(summed.sum(), values, retain_graph=True)
    assert grad.is_coalesced()
    assert grad.shape == (TABLE, WIDTH)
    assert grad.indices().tolist() == [read]
    assert grad.values().shape == (len(read), WIDTH)
    # values.grad lists them once, too, though torch forgets that they are coalesced
    summed.sum().backward()
    assert values.grad._indices().tolist() == [read]
    assert torch.equal(values.grad._values(), grad.values())


def test_values_that_need_no_gradient_get_none():
    values, rows, weights = draw()
    values.requires_grad_(False)
    weighted_sum(values, rows, weights).sum().backward()
    assert values.grad is None
    assert weights.grad is not None
    assert not weighted_sum(values, rows, weights.detach()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_in_spare_memory_are_the_same(dtype):
    _, rows, weights = draw(dtype=dtype)
    grad = torch.randn(TOKENS, WIDTH, dtype=dtype)
    expected = row_gradients(rows, weights.detach(), grad)
    found = row_gradients(rows, weights.detach(), grad, SpareRows(TABLE))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_spare_memory_is_taken_again_when_it_was_given_back_and_is_large_enough():
    spare, like = SpareRows(100), torch.empty(1, WIDTH)
    first = spare.take(16, like)
    assert first.shape == (16, WIDTH)
    # it was not given back
    other = spare.take(16, like)
    assert other.data_ptr() != first.data_ptr()
    # only what was taken last is taken back
    foreign = torch.empty(16, WIDTH)
    spare.give_back(first)
    spare.give_back(foreign)
    used = [x.data_ptr() for x in (first, other, foreign)]
    assert spare.take(4, like).data_ptr() not in used
    last = spare.take(16, like)
    spare.give_back(last)
    # an eighth more than was asked for was there
    again = spare.take(18, like)
    assert again.data_ptr() == last.data_ptr()
    spare.give_back(again)
    larger = spare.take(19, like)
    assert larger.data_ptr() != last.data_ptr()
    spare.give_back(larger)
    for unlike in (torch.empty(1, WIDTH + 1), torch.empty(1, WIDTH).double()):
        taken = spare.take(2, unlike)
        assert taken.dtype == unlike.dtype
        assert taken.shape == (2, unlike.size(1))
        spare.give_back(taken)


@pytest.mark.parametrize("read", [weighted_sum, plain_weighted_sum])
@pytest.mark.parametrize("sparse", [True, False])
def test_frozen_rows_are_read_and_get_no_gradient(read, sparse):
    values, rows, weights = draw()
    out = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    frozen = torch.arange(len(values)) % 2 == 0
    free, fixed = (values.detach().clone().requires_grad_() for _ in range(2))
    for of_values, how in [(free, {}), (fixed, {"frozen": frozen})]:
        summed = read(of_values, rows, weights, sparse=sparse, **how)
        torch.testing.assert_close(summed, plain_weighted_sum(values, rows, weights))
        summed.backward(out, inputs=[of_values])
    expected = free.grad.to_dense() * ~frozen.unsqueeze(1)
    assert expected.any()
    torch.testing.assert_close(fixed.grad.to_dense(), expected)
