"""Attention to context and persistent vectors against the equations, in float64."""

import pytest
import torch

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan, read_head_groups
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.segment_language_model import attention_kernel
from fairseq_plugins.segment_language_model.attention_kernel import Window
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedRelativeKeys,
)
from tests.all_attention.layer import (
    HEADS,
    STREAMS,
    WIDTH,
    assert_equals_the_equations,
    attend,
    make,
)


@pytest.mark.parametrize(
    ("kernel", "block"), [("fast", 2), ("fast", 3), ("fast", 128), ("plain", None)]
)
@pytest.mark.parametrize("persistent", [0, 5])
@pytest.mark.parametrize(
    ("remembered", "length", "span", "nearest", "clamp_len"),
    [
        (0, 1, 4, 1, None),
        (0, 7, 4, 1, None),
        (0, 7, 20, 1, None),
        (4, 5, 4, 1, None),
        (6, 5, 4, 1, None),
        (3, 5, 6, 1, None),
        (6, 1, 4, 1, None),
        (4, 5, 4, 0, None),
        (0, 5, 4, 0, None),
        (6, 5, 8, 1, 3),
    ],
)
def test_values_and_gradients_equal_the_equations(
    monkeypatch, kernel, block, persistent, remembered, length, span, nearest, clamp_len
):
    monkeypatch.setattr(attention_kernel, "QUERY_BLOCK", block)
    attention, positions = make(None, "all", persistent, span, nearest, clamp_len, kernel=kernel)
    assert_equals_the_equations(attention, positions, length, remembered)


def test_projections_learn_from_remembered_hidden_states():
    attention, positions = make(span=4, persistent=0)
    x = torch.randn(STREAMS, 1, WIDTH, dtype=torch.float64)
    past = HiddenStates(torch.randn(STREAMS, 4, WIDTH, dtype=torch.float64))
    out, _ = attend(attention, positions, x, past)
    out.sum().backward()
    # the segment's only token sees nothing but the past, so the gradient comes from there
    assert attention.k_proj.weight.grad.abs().max() > 0
    assert attention.v_proj.weight.grad.abs().max() > 0


def test_dropout_acts_on_attention_weights_in_training_only():
    attention, positions = make(span=4, persistent=3)
    x = torch.randn(STREAMS, 5, WIDTH, dtype=torch.float64)
    plain, _ = attend(attention, positions, x)
    attention.dropout = 0.5
    assert not torch.allclose(attend(attention, positions, x)[0], plain)
    torch.testing.assert_close(attend(attention.eval(), positions, x)[0], plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_where_a_query_sees_nothing(dtype):
    attention, positions = make(span=4, persistent=0)
    attention, positions = attention.to(dtype), positions.to(dtype)
    x = (100 * torch.randn(STREAMS, 5, WIDTH)).to(dtype)
    out, _ = attend(attention, positions, x)
    assert out.isfinite().all()
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "new"},
            "^`variant` is 'new': there are all, attn-split, head-split, sin",
        ),
        ({"num_heads": 1, "variant": "head-split"}, "^`num_heads` is 1: half of them see the cont"),
        ({"span": AdaptiveSpan(3, 4)}, "^`span` is of 3 heads: 4 see the context$"),
        ({"kernel": "new", "num_persistent": 2}, "^`kernel` is 'new': there are fast, plain$"),
    ],
)
def test_an_attention_that_cannot_be_is_refused(options, message):
    options = {"num_heads": HEADS, **options}
    with pytest.raises(ValueError, match=message):
        AllAttention(
            WIDTH, window=Window(1, 4), position_projection=SharedRelativeKeys(), **options
        )


def test_an_attention_by_itself_reads_its_spans():
    span = AdaptiveSpan(HEADS, 6, ramp=2, initial=0.3)
    attention = AllAttention(WIDTH, HEADS, Window(1, 6), SharedRelativeKeys(), span=span)
    encoding, x = LearnedRelativePositions(6, WIDTH // HEADS)(9), torch.randn(STREAMS, 10, WIDTH)
    (groups,) = read_head_groups([span])
    outputs = [
        attention(x, attention.project_positions(encoding, *given))[0] for given in ((), (groups,))
    ]
    assert torch.equal(*outputs)
    span.value.data.fill_(1.0)
    assert not torch.equal(attention(x, attention.project_positions(encoding))[0], outputs[0])
