"""Pairs of sub-keys: candidates, both ways to select them, gradients in parts."""

import pytest
import torch

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory import search as fast_search
from fairseq_plugins.product_key_memory.search import ProductKeys, candidate_pairs, top_k
from tests.reference import product_key_memory as reference


def integers(limit, *shape):
    """Whole numbers up to a limit, of which many are equal if it is small."""
    return torch.randint(-limit, limit + 1, shape).float()


@pytest.fixture(params=[True, False], ids=["loops", "torch"])
def loops(request, monkeypatch):
    """Compiled loops, or torch's operations."""
    if not request.param:
        monkeypatch.setattr(fast_search, "use_numba", lambda x: False)


@pytest.mark.parametrize("k", [1, 2, 5, 6])
@pytest.mark.parametrize("limit", [0, 1, 3, 500])
def test_top_k_ranks_equal_scores_by_their_number(loops, limit, k):
    torch.manual_seed(1)
    scores = integers(limit, 40, 2, 6)
    found = top_k(scores, k)
    assert found.shape == (40, 2, k)
    for row, numbers in zip(scores.flatten(0, 1), found.flatten(0, 1), strict=True):
        assert numbers.tolist() == reference.best_keys(row, k)


def test_a_tie_just_beyond_the_last_place_is_seen(loops):
    # only the one of lower number is to be found, wherever it stands
    for at in range(1, 300):
        scores = torch.zeros(1, 300)
        scores[0, [at - 1, at]] = 1
        assert top_k(scores, 1).tolist() == [[at - 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_any_size_are_ranked(loops, dtype):
    """The selection halves what is between two scores: infinite ones have no middle."""
    torch.manual_seed(1)
    rows = torch.randn(7, 200, dtype=dtype)
    rows[1] = rows[1].exp() ** 30
    rows[2] = rows[2].sign() * torch.finfo(dtype).max
    rows[3, ::3] = -torch.inf
    rows[4, ::9] = torch.inf
    rows[5, ::2], rows[5, 1::50] = -torch.inf, torch.inf
    rows[6] = torch.where(rows[6] > 1, torch.inf, -torch.inf)
    for row, numbers in zip(rows, top_k(rows, 50), strict=True):
        assert numbers.tolist() == reference.best_keys(row, 50)


def test_what_is_infinite_or_not_a_number_is_selected_first(loops):
    scores = torch.arange(20.0).repeat(3, 1)
    scores[0, 3] = float("inf")
    scores[1, [2, 5]] = float("nan")
    scores[2, :] = float("-inf")
    found = top_k(scores, 3)
    assert found[0].tolist() == [3, 19, 18]
    assert sorted(found[1, :2].tolist()) == [2, 5]
    assert found[1, 2] == 19
    assert found[2].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("k", "n"), [(1, 4), (3, 2), (4, 2), (5, 9), (32, 512), (32, 5), (36, 6)])
def test_candidates_are_the_pairs_that_can_win_and_no_others(k, n):
    candidates = {tuple(pair) for pair in candidate_pairs(k, n).t().tolist()}
    assert len(candidates) == candidate_pairs(k, n).size(1)
    ranks = torch.arange(min(n, k + 1))
    for a in ranks.tolist():
        for b in ranks.tolist():
            # the most favourable scores for this pair: those up to it are all but alike, those
            # after it far below
            first = (ranks <= a).double() - 1e-3 * ranks
            second = (ranks <= b).double() - 1e-3 * ranks
            sums = first[:, None] + second
            ahead = (sums > sums[a, b]).sum().item()
            assert ((a, b) in candidates) == (ahead < k)


@pytest.mark.parametrize("limit", [0, 1, 5, 10**6])
@pytest.mark.parametrize(("k", "n"), [(1, 4), (4, 2), (9, 9), (32, 40), (40, 9), (81, 9)])
def test_pairs_are_those_of_the_reference(loops, k, n, limit):
    """A sub-score is one product, so that it is exact."""
    torch.manual_seed(1)
    keys = ProductKeys(3, n * n, 2)
    keys.subkeys.data = integers(limit, 3, 2, n, 1)
    _, slots = keys(torch.ones(1, 3, 2), k)
    for head in range(3):
        first, second = keys.subkeys[head, :, :, 0]
        assert slots[0, head].tolist() == reference.best_pairs(first, second, k)


def test_scores_that_are_not_numbers_come_out_as_such():
    torch.manual_seed(1)
    scores = torch.randn(2, 2, 5, 30)
    scores[1, 0, 3, 17] = float("nan")
    sums, slots = cpu_kernels.select_pairs(scores, 8)
    assert sums.isnan().any(-1).nonzero().tolist() == [[3, 1]]
    assert (slots[3, 1][sums[3, 1].isnan()] // 30 == 17).all()


QUERIES, HEADS, SUBKEYS, HALF = 7, 2, 5, 3


def draw():
    torch.manual_seed(1)
    queries = torch.randn(QUERIES, HEADS, 2 * HALF, dtype=torch.double, requires_grad=True)
    subkeys = torch.randn(HEADS, 2, SUBKEYS, HALF, dtype=torch.double, requires_grad=True)
    return queries, subkeys


def search_keys(queries, subkeys, search="torch"):
    keys = ProductKeys(HEADS, SUBKEYS**2, 2 * HALF, search)
    del keys.subkeys
    keys.subkeys = subkeys
    return keys(queries, 8)


@pytest.mark.parametrize("search", ["torch", "faiss"])
@pytest.mark.parametrize("queries_at_a_time", [1, 3, QUERIES])
def test_scores_and_gradients_are_those_of_all_pairs_in_parts_of_any_size(
    monkeypatch, queries_at_a_time, search
):
    allowed = 2 * HEADS * SUBKEYS * queries_at_a_time
    monkeypatch.setitem(fast_search.SUBKEY_SCORES, "cpu", allowed)
    queries, subkeys = draw()
    scores, slots = search_keys(queries, subkeys, search)
    # (N, H, halves, n) -> (N, H, n, n)
    halves = torch.einsum("nhsd,hsid->nhsi", queries.unflatten(-1, (2, -1)), subkeys)
    everything = halves[:, :, 0, :, None] + halves[:, :, 1, None, :]
    best = everything.flatten(2).sort(dim=-1, descending=True)
    assert torch.equal(slots, best.indices[..., :8])
    torch.testing.assert_close(scores, best.values[..., :8])
    # scores of one sub-key count several times
    assert (slots // SUBKEYS == slots[..., :1] // SUBKEYS).sum(-1).max() > 1
    grad = torch.randn_like(scores)
    found = torch.autograd.grad(scores, [queries, subkeys], grad)
    expected = torch.autograd.grad(best.values[..., :8], [queries, subkeys], grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_slots_have_no_gradient_and_second_derivatives_are_refused():
    queries, subkeys = draw()
    scores, slots = search_keys(queries, subkeys)
    assert scores.requires_grad
    assert not slots.requires_grad
    (grad,) = torch.autograd.grad(scores.square().sum(), queries, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
