"""Persistent vectors: how they start, their softmax, joint and apart, and which heads see them."""

import math

import pytest
import torch

from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.all_attention.persistent_vectors import (
    PersistentVectors,
    SoftmaxFeedForward,
    merge_attentions,
)
from fairseq_plugins.segment_language_model import attention_kernel
from fairseq_plugins.segment_language_model.attention_kernel import Window
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedRelativeKeys,
)
from tests.gradients import assert_same
from tests.reference.all_attention import softmax_feed_forward

HEADS, STREAMS, TOKENS, WIDTH, VECTORS = 2, 3, 5, 4, 6


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_vectors_start_with_unit_variance_and_parameters_as_small_as_a_feed_forward():
    torch.manual_seed(1)
    vectors = PersistentVectors(1024, 8, 64)
    keys, values = vectors()
    for of_head in (*keys, *values):
        # 65,536 draws a head: the standard error of the variance is 0.0055
        assert of_head.var().item() == pytest.approx(1, abs=0.03)
        assert of_head.mean().item() == pytest.approx(0, abs=0.02)
    assert vectors.keys.std().item() == pytest.approx(1 / math.sqrt(64), rel=0.01)
    assert vectors.values.std().item() == pytest.approx(1 / math.sqrt(1024), rel=0.01)


@pytest.mark.parametrize("block", [2, 64])
def test_attention_and_its_gradient_are_those_of_a_softmax(monkeypatch, block):
    monkeypatch.setattr(attention_kernel, "QUERY_BLOCK", block)
    torch.manual_seed(1)
    vectors = PersistentVectors(VECTORS, HEADS, WIDTH).double()
    query = draw(HEADS, STREAMS, TOKENS, WIDTH)
    attended, total = vectors.attend(query, return_lse=True)
    keys, values = vectors()
    scores = torch.einsum("hbtd,hnd->hbtn", query, keys)
    expected = torch.einsum("hbtn,hnd->hbtd", scores.softmax(-1), values)
    inputs = [query, vectors.keys, vectors.values]
    assert_same(attended, expected, inputs)
    assert_same(total, scores.logsumexp(-1), inputs)


def test_one_softmax_over_two_sets_comes_from_one_over_each():
    scores, values = draw(HEADS, STREAMS, TOKENS, 7), draw(HEADS, STREAMS, 7, WIDTH)

    def over(first, last):
        some = scores[..., first:last]
        return some.softmax(-1) @ values[..., first:last, :], some.logsumexp(-1)

    joint = merge_attentions(*over(0, 3), *over(3, 7))
    whole, _ = over(0, 7)
    assert_same(joint, whole, [scores, values])


def test_an_empty_context_leaves_the_persistent_vectors_alone():
    nothing = torch.zeros(1, 1, 2, WIDTH)
    total = torch.full((1, 1, 2), -torch.inf)
    values, of_values = torch.randn(1, 1, 2, WIDTH), torch.randn(1, 1, 2)
    assert torch.equal(merge_attentions(nothing, total, values, of_values), values)


def test_the_softmax_feed_forward_is_equation_9():
    torch.manual_seed(1)
    layer = SoftmaxFeedForward(VECTORS, WIDTH).double()
    x = draw(1, TOKENS, WIDTH)
    fast, slow = layer(x)[0], softmax_feed_forward(layer, x[0])
    assert_same(fast, slow, [x, *layer.parameters()])


def test_the_softmax_feed_forward_drops_weights_in_training_only():
    layer = SoftmaxFeedForward(VECTORS, WIDTH, dropout=0.5)
    x = torch.randn(1, TOKENS, WIDTH)
    assert not torch.allclose(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def attention(variant):
    torch.manual_seed(1)
    made = AllAttention(
        HEADS * WIDTH,
        HEADS,
        Window(1, 4),
        SharedRelativeKeys(),
        num_persistent=VECTORS,
        variant=variant,
    )
    positions = LearnedRelativePositions(4, WIDTH)
    # heads side by side, not mixed
    made.out_proj.weight.data = torch.eye(HEADS * WIDTH)
    return made, made.project_positions(positions(TOKENS - 1))


def changed_heads(variant, change):
    """Which heads' results change with what they see, bool (H,)."""
    made, terms = attention(variant)
    x = torch.randn(STREAMS, TOKENS, HEADS * WIDTH)
    before, _ = made(x, terms)
    with torch.no_grad():
        change(made)
    after, _ = made(x, terms)
    # (B, T, d) -> (B, T, H, d_h)
    return (before != after).unflatten(-1, (HEADS, WIDTH)).any(-1).any(0).any(0).tolist()


def test_head_split_heads_see_only_their_half():
    def other_context(made):
        made.k_proj.weight += 1
        made.v_proj.weight += 1

    def other_vectors(made):
        made.persistent.keys += torch.randn_like(made.persistent.keys)

    assert changed_heads("head-split", other_context) == [True, False]
    assert changed_heads("head-split", other_vectors) == [False, True]
    assert changed_heads("attn-split", other_context) == [True, True]
    assert changed_heads("attn-split", other_vectors) == [True, True]


@pytest.mark.parametrize("variant", ["all", "attn-split", "head-split", "single-head"])
def test_dropout_acts_on_the_weights_of_persistent_vectors(variant):
    made, terms = attention(variant)
    made.dropout = 0.5
    first = torch.randn(STREAMS, 1, HEADS * WIDTH)  # sees persistent vectors alone
    assert not torch.allclose(made(first, terms)[0], made(first, terms)[0])
    made.eval()
    assert torch.equal(made(first, terms)[0], made(first, terms)[0])
