"""--span-epsilon: weights that are normalised twice, as those of the published code."""

import math

import pytest
import torch

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan, read_head_groups
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedRelativeKeys,
)
from tests.gradients import assert_same
from tests.reference.all_attention import multi_head, network
from tests.tiny import VARIANTS, scores_by_segment, tiny_model, tokens

STREAMS, HEADS, WIDTH, SPAN, RAMP = 2, 4, 8, 12, 3
# beyond 64 distances the published code leaves some out
LONG = 80
# a head that sees far beside one that does not; none is where a mask is 0 or 1 exactly
MIXED, NEAR = [0.05, 0.93, 0.41, 0.07], [0.013, 0.093, 0.05, 0.007]


def make(values, variant="all", persistent=3, epsilon=1e-8, span=SPAN, far=0.0):
    """An attention of random weights; ``far`` makes scores beyond distance 6 large."""
    torch.manual_seed(1)
    heads = HEADS // 2 if variant == "head-split" else HEADS
    spans = AdaptiveSpan(heads, span, RAMP, epsilon=epsilon)
    spans.value.data = torch.tensor(values[:heads])
    attention = AllAttention(
        WIDTH,
        HEADS,
        Window(1, span),
        SharedRelativeKeys(),
        num_persistent=persistent,
        variant=variant,
        span=spans,
    )
    positions = LearnedRelativePositions(span, WIDTH // HEADS)
    positions.weight.data[6:] += far * torch.randn(span - 6, WIDTH // HEADS)
    return attention.double(), positions.double()


def attend(attention, positions, x, state=None):
    remembered = 0 if state is None else state.length
    (groups,) = read_head_groups([attention.span])
    terms = attention.project_positions(positions(remembered + x.size(1) - 1), groups)
    return attention(x, terms, state)[0]


def by_equations(attention, positions, x, context):
    span = attention.span.max_span
    return torch.stack(
        [
            multi_head(attention, x[b], context[b], lambda d: positions.weight[d - 1], span)
            for b in range(STREAMS)
        ]
    )


@pytest.mark.parametrize(
    ("variant", "persistent"), [*((variant, 3) for variant in VARIANTS), ("all", 0)]
)
@pytest.mark.parametrize(
    ("epsilon", "far", "remembered"),
    [(1e-8, 25.0, 0), (1e-8, 25.0, 13), (0.3, 1.0, 13)],
    ids=["start", "published", "large"],
)
def test_values_and_gradients_equal_the_equations(variant, persistent, epsilon, far, remembered):
    attention, positions = make(MIXED, variant, persistent, epsilon, far=far)
    x = torch.randn(STREAMS, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    past = torch.randn(STREAMS, remembered, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, past, *attention.parameters(), positions.weight]
    state = HiddenStates(past) if remembered else None
    slow = by_equations(attention, positions, x, torch.cat([past, x], dim=1))
    assert_same(attend(attention, positions, x, state), slow, inputs)
    with torch.no_grad():
        torch.testing.assert_close(attend(attention, positions, x, state), slow.detach())
    if remembered:
        attention.span.epsilon = 0.0
        assert (attend(attention, positions, x, state) - slow).abs().max() > 0.01


@pytest.mark.parametrize(("values", "persistent"), [(MIXED, 0), (NEAR, 0), (NEAR, 3)])
def test_the_published_code_leaves_64_distances_out_at_a_time(values, persistent):
    attention, positions = make(values, persistent=persistent, epsilon=0.1, span=LONG, far=3.0)
    x = torch.randn(STREAMS, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    past = torch.randn(STREAMS, LONG, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, past, *attention.parameters(), positions.weight]
    slow = by_equations(attention, positions, x, torch.cat([past, x], dim=1))
    assert_same(attend(attention, positions, x, HiddenStates(past)), slow, inputs)


def test_what_is_left_is_the_formula():
    span = AdaptiveSpan(1, SPAN, RAMP, epsilon=1e-8)
    masked = torch.tensor([0.0, -30.0, 2.0, -torch.inf, -torch.inf], dtype=torch.float64)
    unmasked = torch.tensor([0.0, 5.0, 20.5, 3.0, -torch.inf], dtype=torch.float64)
    masked.requires_grad_()
    unmasked.requires_grad_()
    found = span.remainder(masked, unmasked)
    expected = [1 / (1 + 1e-8 * math.exp(gap)) for gap in (0.0, 35.0, 18.5)]
    # nothing is seen, then nothing is there
    assert found.tolist() == pytest.approx([*expected, 0.0, 1.0], rel=1e-6)
    found.sum().backward()
    assert masked.grad.isfinite().all()
    assert unmasked.grad.isfinite().all()


def epsilon_model(epsilon=0.2, **options):
    model = tiny_model(
        attention_span=SPAN, adaptive_span=True, span_ramp=RAMP, span_epsilon=epsilon, **options
    ).double()
    for span in model.decoder.spans:
        span.value.data = torch.tensor([0.07, 0.93])[: len(span.value)]
    return model


@pytest.mark.parametrize("variant", [*VARIANTS, "ff-attn"])
def test_scores_of_segments_equal_the_reference(variant):
    model = epsilon_model(persistent_variant=variant)
    stream = tokens(1, 25)
    with torch.no_grad():
        expected = network(model.decoder, stream[0], SPAN)
    for mode in (torch.no_grad, torch.enable_grad):
        for length in (1, 7, 25):
            found = scores_by_segment(model.train(), stream, length, mode)
            torch.testing.assert_close(found[0], expected)
        # training keeps hidden states, evaluation keys and values: with and without its mode
        found = scores_by_segment(model.eval(), stream, 7, mode)
        torch.testing.assert_close(found[0], expected)
