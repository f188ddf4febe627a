"""The search for keys: the exact best ones, their order, precision."""

import pytest
import torch

from fairseq_plugins.product_key_memory import search as fast_search
from fairseq_plugins.product_key_memory.search import KERNELS, FlatKeys, ProductKeys
from tests.gradients import assert_same
from tests.reference.product_key_memory import best_pairs

SUBKEYS, TOKENS, HALF, HEADS = 6, 5, 3, 3
SLOTS = SUBKEYS**2


def integers(limit, *shape):
    """Draw integers up to a limit; their products and sums are exact in float32."""
    return torch.randint(-limit, limit + 1, shape).float()


def draw(kind, n):
    """Draw queries (N, H, 2·HALF) and sub-keys (H, 2, n, HALF) whose sub-scores are exact."""
    queries = integers(500, TOKENS, HEADS, 2 * HALF)
    subkeys = integers(500, HEADS, 2, n, HALF)
    if kind == "few values":
        queries, subkeys = queries.sign(), subkeys.sign()
    elif kind == "all alike":
        queries.zero_()
    elif kind == "one half alike":
        subkeys[:, 0] = subkeys[:, 0, :1]
    elif kind in ("equal sums only", "sums that round alike"):
        # in both halves, the sub-scores are 0 to n - 1 in a random order
        queries.fill_(0)
        queries[..., [0, HALF]] = 1
        for head in subkeys:
            for half in head:
                half[:, 0] = torch.randperm(n).float()
        if kind == "sums that round alike":
            # above 2^24, float32 numbers are 2 apart: adding less than 1 changes nothing
            subkeys[:, 0, :, 0] = 2.0**24 + 4 * (subkeys[:, 0, :, 0] // 2)
            subkeys[:, 1] /= n + 2
    return queries, subkeys


@pytest.fixture(params=["loops", "operations"])
def loops_or_torch(request, monkeypatch):
    """Run the test with the compiled loops and with torch operations."""
    if request.param == "operations":
        monkeypatch.setattr(fast_search, "cpu_loops", lambda x: None)


def product_keys(subkeys, kernel="fast"):
    heads, _, n, half = subkeys.shape
    keys = ProductKeys(heads, n * n, 2 * half, kernel)
    keys.subkeys.data = subkeys
    return keys


def sub_scores(queries, subkeys):
    """Return sub-scores (N, H, halves, n), computed in float64 and rounded to float32."""
    halves = queries.unflatten(-1, (2, -1)).double()
    return torch.einsum("nhsd,hsid->nhsi", halves, subkeys.double()).float()


def assert_best_pairs(scores, slots, parts, k):
    """Check that scores and slots (N, H, k) are the best pairs of sub-scores (N, H, halves, n)."""
    assert scores.shape == slots.shape == (*parts.shape[:2], k)
    searches = zip(parts.flatten(0, 1), scores.flatten(0, 1), slots.flatten(0, 1), strict=True)
    for (first, second), sums, pairs in searches:
        assert pairs.tolist() == best_pairs(first, second, k)
        assert torch.equal(sums, first[pairs // len(first)] + second[pairs % len(first)])


KINDS = [
    *("many values", "few values", "all alike", "one half alike"),
    *("equal sums only", "sums that round alike"),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n", "k"), [(6, 1), (6, 4), (6, 7), (6, 36), (40, 100)])
@pytest.mark.parametrize("kind", KINDS)
def test_product_keys_give_the_best_slots_in_order(kind, n, k, kernel, loops_or_torch):
    queries, subkeys = draw(kind, n)
    selected = product_keys(subkeys, kernel)(queries, k)
    assert_best_pairs(*selected, sub_scores(queries, subkeys), k)


@pytest.mark.parametrize("k", [1, 4, SLOTS - 1, SLOTS])
@pytest.mark.parametrize("limit", [0, 1, 500])
@pytest.mark.parametrize("scores_at_a_time", [1, 1 << 24])
def test_flat_keys_give_the_best_slots_in_any_chunks(monkeypatch, scores_at_a_time, limit, k):
    monkeypatch.setattr(fast_search, "FLAT_SCORES", scores_at_a_time)
    torch.manual_seed(1)
    keys = FlatKeys(2, SLOTS, HALF)
    keys.keys.data = integers(limit, 2, SLOTS, HALF)
    queries = integers(limit, TOKENS, 2, HALF)
    scores, slots = keys(queries, k)
    everything = torch.einsum("nhd,hkd->nhk", queries, keys.keys)
    assert torch.equal(scores, everything.sort(dim=-1, descending=True).values[..., :k])
    # of equal scores, any may be selected, but none twice
    assert torch.equal(scores, everything.gather(-1, slots))
    assert (slots.sort(dim=-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize(("kind", "width"), [(ProductKeys, 16), (FlatKeys, 32)])
def test_keys_start_uniform(kind, width):
    """Sub-keys of product keys have half the width of a query."""
    torch.manual_seed(1)
    (drawn,) = kind(4, 64**2, 32).parameters()
    bound = width**-0.5
    assert drawn.abs().max() <= bound
    # each tenth of the range has a tenth of 8,192 draws or more: standard error at most 0.0033
    shares = torch.histc(drawn.detach(), bins=10, min=-bound, max=bound) / drawn.numel()
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.02)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_ranked_in_single_precision(autocast, kernel):
    torch.manual_seed(1)
    n, k = 16, 40
    # sub-keys have width 1, so a sub-score is a single product
    subkeys = torch.randn(1, 2, n, 1).bfloat16()
    queries = torch.randn(8, 1, 2).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores, slots = product_keys(subkeys, kernel)(queries, k)
    assert scores.dtype == torch.float32
    parts = sub_scores(queries, subkeys)
    assert_best_pairs(scores, slots, parts, k)
    # products in half precision would select other slots
    assert slots[:, 0].tolist() != [best_pairs(*both, k) for both in parts[:, 0].bfloat16()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_ranked_at_any_size(dtype, loops_or_torch):
    """The compiled loop bisects between two scores, and infinite scores have no midpoint."""
    torch.manual_seed(1)
    keys = torch.randn(7, 2, 60, 1, dtype=dtype)
    rows = keys[:, 0, :, 0]
    rows[1] = rows[1].exp() ** 30
    rows[2] = rows[2].sign() * torch.finfo(dtype).max / 2
    rows[3, ::3] = -torch.inf
    rows[4, ::9] = torch.inf
    rows[5, ::2], rows[5, 1::20] = -torch.inf, torch.inf
    rows[6] = torch.where(rows[6] > 1, torch.inf, -torch.inf)
    selected = product_keys(keys)(torch.ones(1, 7, 2, dtype=dtype), 20)
    assert_best_pairs(*selected, keys.squeeze(-1).unsqueeze(0), 20)


def test_scores_that_are_not_numbers_stay_so(loops_or_torch):
    torch.manual_seed(1)
    keys = torch.randn(2, 2, 30, 1)
    keys[1, 0, 17] = float("nan")
    scores, slots = product_keys(keys)(torch.ones(1, 2, 2), 8)
    assert scores.isnan().any(-1).tolist() == [[False, True]]
    assert (slots[scores.isnan()] // 30 == 17).all()


@pytest.mark.parametrize("queries_at_a_time", [1, 3, TOKENS])
def test_scores_and_gradients_equal_those_through_all_pairs(monkeypatch, queries_at_a_time):
    allowed = 2 * 2 * SUBKEYS * queries_at_a_time
    monkeypatch.setitem(fast_search.SUBKEY_SCORES, "cpu", allowed)
    torch.manual_seed(1)
    queries = torch.randn(TOKENS, 2, 2 * HALF, dtype=torch.double, requires_grad=True)
    keys = product_keys(torch.randn(2, 2, SUBKEYS, HALF, dtype=torch.double))
    scores, slots = keys(queries, 8)
    assert not slots.requires_grad
    # (N, H, halves, n) -> (N, H, n, n)
    halves = torch.einsum("nhsd,hsid->nhsi", queries.unflatten(-1, (2, -1)), keys.subkeys)
    everything = halves[:, :, 0, :, None] + halves[:, :, 1, None, :]
    best = everything.flatten(2).sort(dim=-1, descending=True)
    assert torch.equal(slots, best.indices[..., :8])
    # a sub-key is part of several selected slots
    assert (slots // SUBKEYS == slots[..., :1] // SUBKEYS).sum(-1).max() > 1
    assert_same(scores, best.values[..., :8], [queries, keys.subkeys])
