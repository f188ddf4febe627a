"""The search for keys: exactly the best of all, in a fixed order; candidates; faiss; precision."""

import pytest
import torch

from fairseq_plugins.product_key_memory import search as fast_search
from fairseq_plugins.product_key_memory.search import SEARCHES, FlatKeys, ProductKeys
from tests.gradients import assert_same
from tests.reference.product_key_memory import best_keys, best_pairs

SUBKEYS, TOKENS, HALF = 6, 5, 3
SLOTS = SUBKEYS**2


def integers(limit, *shape):
    """Whole numbers up to a limit: all their products and sums are exact in single precision."""
    return torch.randint(-limit, limit + 1, shape).float()


def draw(kind, heads):
    """Queries (N, H, 2·HALF) and sub-keys (H, 2, n, HALF) of which every sub-score is exact."""
    torch.manual_seed(heads)
    queries = integers(500, TOKENS, heads, 2 * HALF)
    subkeys = integers(500, heads, 2, SUBKEYS, HALF)
    if kind == "few values":
        queries, subkeys = queries.sign(), subkeys.sign()
    elif kind == "all alike":
        queries.zero_()
    elif kind == "one half alike":
        subkeys[:, 0] = subkeys[:, 0, :1]
    elif kind in ("equal sums only", "sums that round alike"):
        # sub-score i is i in a shuffled order, in both halves
        queries.fill_(0)
        queries[..., [0, HALF]] = 1
        for of_head in subkeys:
            for half in of_head:
                half[:, 0] = torch.randperm(SUBKEYS).float()
        if kind == "sums that round alike":
            # singles as large as 2^24 leave out the last bit of what is added
            subkeys[:, 0, :, 0] = 2.0**24 + 4 * (subkeys[:, 0, :, 0] // 2)
            subkeys[:, 1] /= 8
    return queries, subkeys


def product_keys(subkeys, **options):
    heads, _, n, half = subkeys.shape
    keys = ProductKeys(heads, n * n, 2 * half, **options)
    keys.subkeys.data = subkeys
    return keys


def sub_scores(queries, subkeys):
    """(N, H, halves, n) in float64, rounded to single precision."""
    halves = queries.unflatten(-1, (2, -1)).double()
    return torch.einsum("nhsd,hsid->nhsi", halves, subkeys.double()).float()


KINDS = [
    "many values",
    "few values",
    "all alike",
    "one half alike",
    "equal sums only",
    "sums that round alike",
]


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("k", [1, 4, SUBKEYS, SUBKEYS + 1, 17, SLOTS - 1, SLOTS])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_product_keys_give_the_best_of_all_slots_in_order(kind, heads, k, search):
    queries, subkeys = draw(kind, heads)
    scores, slots = product_keys(subkeys, search=search)(queries, k)
    assert scores.shape == slots.shape == (TOKENS, heads, k)
    parts = sub_scores(queries, subkeys)
    for token in range(TOKENS):
        for head in range(heads):
            first, second = parts[token, head]
            expected = best_pairs(first, second, k)
            assert slots[token, head].tolist() == expected
            sums = [(first[s // SUBKEYS] + second[s % SUBKEYS]).item() for s in expected]
            assert scores[token, head].tolist() == sums


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("k", [1, 7, 64, 100, 4096])
def test_many_product_keys_give_the_slots_of_a_search_through_all(search, k):
    torch.manual_seed(k)
    keys = ProductKeys(2, 64**2, 8, search)
    queries = torch.randn(3, 2, 8)
    scores, slots = keys(queries, k)
    one, other = keys.subkeys.unbind(1)
    whole = torch.cat([one.repeat_interleave(64, 1), other.repeat(1, 64, 1)], dim=-1)
    everything = torch.einsum("nhd,hkd->nhk", queries, whole)
    expected = everything.sort(dim=-1, descending=True)
    torch.testing.assert_close(scores, expected.values[..., :k])
    torch.testing.assert_close(everything.gather(-1, slots), scores)
    assert (scores[..., 1:] <= scores[..., :-1]).all()
    # no slot is taken twice
    assert (slots.sort(dim=-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("k", [1, 4, SLOTS - 1, SLOTS])
@pytest.mark.parametrize("limit", [0, 1, 500])
@pytest.mark.parametrize("scores_at_a_time", [1, 2 * SLOTS, 1 << 24])
def test_flat_keys_give_the_best_of_all_in_order_in_chunks_of_any_size(
    monkeypatch, scores_at_a_time, limit, k
):
    monkeypatch.setattr(fast_search, "FLAT_SCORES", scores_at_a_time)
    torch.manual_seed(1)
    keys = FlatKeys(2, SLOTS, HALF)
    keys.keys.data = integers(limit, 2, SLOTS, HALF)
    queries = integers(limit, TOKENS, 2, HALF)
    scores, slots = keys(queries, k)
    everything = torch.einsum("nhd,hkd->nhk", queries, keys.keys)
    for token in range(TOKENS):
        for head in range(2):
            assert slots[token, head].tolist() == best_keys(everything[token, head], k)
    assert torch.equal(scores, everything.gather(-1, slots))


@pytest.mark.parametrize("k", [1, 4, SUBKEYS, 17, SLOTS])
@pytest.mark.parametrize("kind", KINDS)
def test_product_keys_are_searched_as_plainly_with_the_same_gradients(kind, k):
    """Ties are ranked by the same rule, so that slots agree too, and gradients with them."""
    queries, subkeys = (x.double() for x in draw(kind, 2))
    keys = product_keys(subkeys)
    queries.requires_grad_()
    scores, slots = keys(queries, k)
    keys.search = "plain"
    plain_scores, plain_slots = keys(queries, k)
    assert torch.equal(slots, plain_slots)
    assert_same(scores, plain_scores, [queries, keys.subkeys])


@pytest.mark.parametrize("k", [1, 4, SLOTS - 1, SLOTS])
@pytest.mark.parametrize("limit", [0, 1, 500])
def test_flat_keys_are_searched_as_plainly_with_the_same_gradients(limit, k):
    torch.manual_seed(1)
    keys = FlatKeys(2, SLOTS, HALF).double()
    keys.keys.data = integers(limit, 2, SLOTS, HALF).double()
    queries = integers(limit, TOKENS, 2, HALF).double().requires_grad_()
    scores, slots = keys(queries, k)
    keys.search = "plain"
    plain_scores, plain_slots = keys(queries, k)
    assert torch.equal(slots, plain_slots)
    assert_same(scores, plain_scores, [queries, keys.keys])


@pytest.mark.parametrize("k", [1, 5, SUBKEYS, 20, SLOTS])
@pytest.mark.parametrize("flat", [False, True])
def test_faiss_finds_what_torch_finds_where_nothing_is_equal(flat, k):
    torch.manual_seed(1)
    make = FlatKeys if flat else ProductKeys
    keys = make(3, SLOTS, 8)
    queries = torch.randn(TOKENS, 3, 8)
    scores, slots = keys(queries, k)
    assert (scores.diff(dim=-1) < -1e-6).all()
    keys.search = "faiss"
    found_scores, found = keys(queries, k)
    assert torch.equal(found, slots)
    assert torch.equal(found_scores, scores)


@pytest.mark.parametrize("k", [1, 4, SUBKEYS, 17, SLOTS])
@pytest.mark.parametrize("kind", KINDS)
def test_faiss_finds_the_best_scores_where_some_are_equal(kind, k):
    queries, subkeys = draw(kind, 2)
    scores, _ = product_keys(subkeys)(queries, k)
    found, slots = product_keys(subkeys, search="faiss")(queries, k)
    assert torch.equal(found, scores)
    assert (slots.sort(dim=-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("keys", [ProductKeys, FlatKeys])
def test_no_queries_find_nothing(keys, search):
    scores, slots = keys(2, SLOTS, 4, search)(torch.randn(0, 2, 4), 3)
    assert scores.shape == slots.shape == (0, 2, 3)
    assert slots.dtype == torch.long


@pytest.mark.parametrize(("kind", "width"), [(ProductKeys, 16), (FlatKeys, 32)])
def test_keys_start_uniform_within_one_over_the_root_of_their_width(kind, width):
    """Sub-keys of product keys have half the width of a query."""
    torch.manual_seed(1)
    (drawn,) = kind(4, 64**2, 32).parameters()
    bound = width**-0.5
    assert drawn.abs().max() <= bound
    # of 8,192 draws or more, a tenth in each tenth of the range: standard error 0.0033 or less
    shares = torch.histc(drawn.detach(), bins=10, min=-bound, max=bound) / drawn.numel()
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.02)


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_multiplied_added_and_ranked_in_single_precision(autocast, search):
    torch.manual_seed(1)
    n, k = 16, 40
    # of one number each: a sub-score is one product
    subkeys = torch.randn(1, 2, n, 1).bfloat16()
    queries = torch.randn(8, 1, 2).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores, slots = product_keys(subkeys, search=search)(queries, k)
    assert scores.dtype == torch.float32
    halves = queries.float().unflatten(-1, (2, 1)) * subkeys.float().squeeze(-1)
    others = 0
    for token in range(8):
        first, second = halves[token, 0]
        expected = best_pairs(first, second, k)
        assert slots[token, 0].tolist() == expected
        sums = [first[slot // n] + second[slot % n] for slot in expected]
        assert torch.equal(scores[token, 0], torch.stack(sums))
        others += expected != best_pairs(first.bfloat16(), second.bfloat16(), k)
    # with products in half precision the slots would be others
    assert others > 0
