"""Attention to context and persistent vectors against the equations, in float64."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from fairseq_plugins.segment_language_model import attention_blocks
from tests.all_attention.layer import (
    EACH_VARIANT,
    STREAMS,
    VALUES,
    WIDTH,
    assert_equals_the_equations,
    attend,
    make,
)


@pytest.mark.parametrize(("kernel", "block"), [("fast", 2), ("fast", 128), ("plain", None)])
@pytest.mark.parametrize("persistent", [0, 5])
@pytest.mark.parametrize(
    ("remembered", "length", "span", "nearest", "clamp_len"),
    [
        (0, 1, 4, 1, None),
        (0, 7, 4, 1, None),
        (0, 7, 20, 1, None),
        (6, 5, 4, 1, None),
        (3, 5, 6, 1, None),
        (6, 1, 4, 1, None),
        (4, 5, 4, 0, None),
        (6, 5, 8, 1, 3),
    ],
)
def test_attention_equals_the_equations(
    monkeypatch, kernel, block, persistent, remembered, length, span, nearest, clamp_len
):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    attention, positions = make(None, "all", persistent, span, nearest, clamp_len, kernel=kernel)
    assert_equals_the_equations(attention, positions, length, remembered)


@pytest.mark.parametrize(("block", "group_cost"), [(2, 0), (128, 1000)])
@pytest.mark.parametrize("values", [None, *VALUES])
@EACH_VARIANT
@pytest.mark.parametrize(("remembered", "length", "clamp_len"), [(4, 3, None), (16, 5, 4)])
def test_attention_with_spans_equals_the_equations(
    monkeypatch, block, group_cost, values, variant, persistent, remembered, length, clamp_len
):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    attention, positions = make(values, variant, persistent, clamp_len=clamp_len)
    assert_equals_the_equations(attention, positions, length, remembered)


# heads that all see near: the published code, which has epsilon, computes 16 of 80 distances
NEAR = [0.013, 0.093, 0.05, 0.007]


@pytest.mark.parametrize("kernel", ["fast", "plain"])
@pytest.mark.parametrize(
    ("span", "values", "remembered"), [(12, VALUES[4], 0), (12, VALUES[4], 16), (80, NEAR, 80)]
)
@EACH_VARIANT
def test_spans_with_epsilon_equal_the_equations(
    kernel, span, values, remembered, variant, persistent
):
    options = {"span": span, "kernel": kernel, "epsilon": 0.1}
    attention, positions = make(values, variant, persistent, **options)
    assert_equals_the_equations(attention, positions, 5, remembered)


@EACH_VARIANT
def test_dropout_acts_on_all_weights_in_training_only(variant, persistent):
    attention, positions = make(variant=variant, persistent=persistent)
    # the first token sees only persistent vectors
    x = torch.randn(STREAMS, 1 if persistent else 5, WIDTH, dtype=torch.float64)
    plain, _ = attend(attention, positions, x)
    attention.dropout = 0.5
    assert not torch.allclose(attend(attention, positions, x)[0], plain)
    torch.testing.assert_close(attend(attention.eval(), positions, x)[0], plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_where_a_query_sees_nothing(dtype):
    attention, positions = (part.to(dtype) for part in make(span=4, persistent=0))
    out, _ = attend(attention, positions, (100 * torch.randn(STREAMS, 5, WIDTH)).to(dtype))
    assert out.isfinite().all()
    assert not out[:, 0].any()
