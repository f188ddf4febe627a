"""Weighted sums of rows: values, gradients as a CPU and an accelerator have them, spare buffers."""

import pytest
import torch

from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.values import SpareRows, plain_weighted_sum, weighted_sum
from tests.gradients import assert_same
from tests.product_key_memory.standalone import draw

TABLE, WIDTH = 12, 4
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
EVERY_READS = pytest.mark.parametrize("reads", READS)


def by_hand(values, rows, weights):
    sums = []
    for of_token, with_weights in zip(rows.tolist(), weights, strict=True):
        pairs = zip(of_token, with_weights, strict=True)
        sums.append(sum(weight * values[row] for row, weight in pairs))
    return torch.stack(sums)


@pytest.mark.parametrize("read", [weighted_sum, plain_weighted_sum])
@pytest.mark.parametrize(("tokens", "reads"), [(1, 1), (1, 6), (5, 1), (30, 40)])
def test_sums_and_gradients_are_the_formula(tokens, reads, read):
    table, weights, rows = (
        draw(TABLE, WIDTH),
        draw(tokens, reads),
        torch.randint(8, (tokens, reads)),
    )
    rows[:, 1:2] = rows[:, :1]
    found = read(table, rows, weights, sparse=False)
    assert_same(found, by_hand(table, rows, weights), [table, weights])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", ["plain", "on a CPU", "in spare memory", "padded"])
@EVERY_READS
def test_gradients_are_those_of_the_formula(monkeypatch, reads, how, sparse, frozen):
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
    if how != "padded":
        # the rows that have a gradient, and no others
        assert listed == expected.any(1).nonzero().flatten().tolist()
        return
    read = rows.unique().tolist()
    assert listed == read + read[-1:] * (min(rows.numel(), TABLE) - len(read))
    assert not found._values()[len(read) :].any()


def test_values_that_need_no_gradient_get_none():
    table, rows, weights = torch.randn(TABLE, WIDTH), torch.tensor([[1, 2]]), torch.rand(1, 2)
    assert not weighted_sum(table, rows, weights).requires_grad
    weights.requires_grad_()
    weighted_sum(table, rows, weights).sum().backward()
    torch.testing.assert_close(weights.grad, table[rows].sum(-1))


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
