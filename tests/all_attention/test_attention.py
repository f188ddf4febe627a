"""Attention to context and persistent vectors against the equations, in float64."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from fairseq_plugins.all_attention.adaptive_span import ALL_HEADS, AdaptiveSpan, read_head_groups
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.segment_language_model import attention_blocks
from fairseq_plugins.segment_language_model.attention import KERNELS
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.past import HiddenStates
from fairseq_plugins.segment_language_model.positions import LearnedRelativePositions
from tests.gradients import assert_same
from tests.reference.all_attention import multi_head
from tests.tiny import VARIANTS

STREAMS, HEADS, WIDTH, SPAN, RAMP = 2, 4, 8, 12, 3
EACH_VARIANT = pytest.mark.parametrize(
    ("variant", "persistent"), [*((variant, 3) for variant in VARIANTS), ("all", 0)]
)
# nearly closed, equal, nearly equal, open, different, very different; no key lies exactly where its
# mask reaches 0, because the gradient is not unique there
VALUES = [
    [0.001, 0.001, 0.001, 0.001],
    [0.3, 0.3, 0.3, 0.3],
    [0.26, 0.31, 0.44, 0.37],
    [1.0, 1.0, 1.0, 1.0],
    [0.05, 0.93, 0.41, 0.07],
    [0.97, 0.02, 1.0, 0.01],
]


def make(
    values=None,
    variant="all",
    persistent=3,
    span=SPAN,
    nearest=1,
    clamp_len=None,
    kernel="fast",
    epsilon=0.0,
):
    """Return an attention and its positions; ``values`` are spans, relative to the largest."""
    torch.manual_seed(1)
    spans = None
    if values is not None:
        values = values[: HEADS // 2 if variant == "head-split" else HEADS]
        spans = AdaptiveSpan(len(values), span, RAMP, epsilon=epsilon)
        spans.value.data = torch.tensor(values)
    options = {"num_persistent": persistent, "variant": variant, "span": spans, "kernel": kernel}
    attention = AllAttention(WIDTH, HEADS, Window(nearest, span), **options)
    positions = LearnedRelativePositions(span, WIDTH // HEADS, clamp_len)
    return attention.double(), positions.double()


def draw(length):
    return torch.randn(STREAMS, length, WIDTH, dtype=torch.float64, requires_grad=True)


def attend(attention, positions, x, past=None):
    """Return the layer's output for a segment, and its past for the next one."""
    farthest = x.size(1) - 1 + (0 if past is None else past.length)
    groups = ALL_HEADS if attention.span is None else read_head_groups([attention.span])[0]
    return attention(x, attention.project_positions(positions(farthest, x), groups), past)


def assert_equals_the_equations(attention, positions, length, remembered, farthest=None):
    """Compare values and gradients with the equations, also the values under no_grad.

    ``farthest`` is the last distance of which the equations take the softmax; by default, the
    window's.
    """
    x, past = draw(length), draw(remembered)
    inputs = [x, past, *attention.parameters(), positions.weight]
    state = HiddenStates((past,)) if remembered else None
    context = torch.cat([past, x], dim=1)

    def u(distance):
        return positions.weight[min(max(distance, 1), positions.farthest) - 1]

    farthest = farthest or attention.window.farthest
    rows = [multi_head(attention, x[b], context[b], u, farthest) for b in range(STREAMS)]
    expected = torch.stack(rows)
    assert_same(attend(attention, positions, x, state)[0], expected, inputs)
    with torch.no_grad():
        torch.testing.assert_close(attend(attention, positions, x, state)[0], expected.detach())


@pytest.mark.parametrize(
    ("kernel", "block"), [("fast", 2), ("fast", 128), ("sdpa", None), ("plain", None)]
)
@pytest.mark.parametrize("persistent", [0, 5])
@pytest.mark.parametrize(
    ("remembered", "length", "options"),
    [
        (0, 1, {"span": 4}),
        (0, 7, {"span": 4}),
        (0, 7, {"span": 20}),
        (6, 5, {"span": 4}),
        (4, 5, {"span": 4, "nearest": 0}),
        (6, 5, {"span": 8, "clamp_len": 3}),
    ],
)
def test_attention_equals_the_equations(
    monkeypatch, kernel, block, persistent, remembered, length, options
):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    attention, positions = make(None, "all", persistent, kernel=kernel, **options)
    assert_equals_the_equations(attention, positions, length, remembered)


@pytest.mark.parametrize(
    ("kernel", "block", "group_cost"),
    [("fast", 2, 0), ("fast", 128, 1000), ("sdpa", None, 0), ("plain", None, 1000)],
)
@pytest.mark.parametrize("values", [None, *VALUES])
@EACH_VARIANT
@pytest.mark.parametrize(("remembered", "length", "clamp_len"), [(4, 3, None), (16, 5, 4)])
def test_attention_with_spans_equals_the_equations(
    monkeypatch,
    kernel,
    block,
    group_cost,
    values,
    variant,
    persistent,
    remembered,
    length,
    clamp_len,
):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    attention, positions = make(values, variant, persistent, clamp_len=clamp_len, kernel=kernel)
    assert_equals_the_equations(attention, positions, length, remembered)


@pytest.mark.parametrize("group_cost", [0, 1000])
def test_a_window_within_the_spans_equals_the_equations(monkeypatch, group_cost):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    attention, positions = make(VALUES[4])
    attention.window = Window(1, 5)
    assert_equals_the_equations(attention, positions, 3, 16)


# heads that all see near: the published code, which has epsilon, computes 16 of 80 distances
NEAR = [0.013, 0.093, 0.05, 0.007]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("span", "values", "remembered", "farthest"),
    [(12, VALUES[4], 0, 12), (12, VALUES[4], 16, 12), (80, NEAR, 80, 16)],
)
@EACH_VARIANT
def test_spans_with_epsilon_equal_the_equations(
    kernel, span, values, remembered, farthest, variant, persistent
):
    options = {"span": span, "kernel": kernel, "epsilon": 0.1}
    attention, positions = make(values, variant, persistent, **options)
    assert_equals_the_equations(attention, positions, 5, remembered, farthest)


@pytest.mark.parametrize("kernel", KERNELS)
@EACH_VARIANT
def test_dropout_acts_on_all_weights_in_training_only(variant, persistent, kernel):
    attention, positions = make(variant=variant, persistent=persistent, kernel=kernel)
    # the first token sees only persistent vectors
    x = torch.randn(STREAMS, 1 if persistent else 5, WIDTH, dtype=torch.float64)
    plain, _ = attend(attention, positions, x)
    attention.dropout = 0.5
    assert not torch.allclose(attend(attention, positions, x)[0], plain)
    torch.testing.assert_close(attend(attention.eval(), positions, x)[0], plain)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_where_a_query_sees_nothing(dtype, kernel):
    options = {"span": 4, "persistent": 0, "kernel": kernel}
    attention, positions = (part.to(dtype) for part in make(**options))
    out, _ = attend(attention, positions, (100 * torch.randn(STREAMS, 5, WIDTH)).to(dtype))
    assert out.isfinite().all()
    assert not out[:, 0].any()
