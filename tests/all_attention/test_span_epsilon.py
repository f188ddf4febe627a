"""The epsilon of the published adaptive-span code, against its equation token by token."""

import pytest
import torch

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan, read_head_groups
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.past import HiddenStates
from fairseq_plugins.segment_language_model.positions import LearnedRelativePositions
from tests.reference.all_attention import multi_head

WIDTH, HEADS, SEGMENT = 16, 4, 5
# heads that see far and near, and heads that all see near; no mask is exactly 0 or 1
MIXED, NEAR = [0.05, 0.93, 0.41, 0.07], [0.013, 0.093, 0.05, 0.007]


@pytest.mark.parametrize("kernel", ["fast", "plain"])
@pytest.mark.parametrize(
    ("variant", "vectors", "span", "values", "past"),
    [
        ("all", 0, 20, MIXED, 0),
        ("all", 0, 20, MIXED, 13),
        # the published code computes 16 of 80 distances
        ("all", 0, 80, NEAR, 80),
        ("all", 3, 20, MIXED, 13),
        ("attn-split", 3, 20, MIXED, 13),
        ("head-split", 3, 20, MIXED, 13),
        ("single-head", 3, 20, MIXED, 13),
    ],
)
def test_epsilon_is_added_to_the_sum_of_masked_weights(
    kernel, variant, vectors, span, values, past
):
    """Values and gradients are those of the equation where far keys have nearly all the weight."""
    values = torch.tensor(values[: HEADS // 2 if variant == "head-split" else HEADS])
    spans = AdaptiveSpan(len(values), span, ramp=4, epsilon=1e-8)
    options = {"num_persistent": vectors, "variant": variant, "span": spans, "kernel": kernel}
    attention = AllAttention(WIDTH, HEADS, Window(1, span), **options).double()
    # the module's own cast leaves spans in single precision
    spans.value.data = values.double()
    positions = LearnedRelativePositions(span, WIDTH // HEADS).double()
    torch.nn.init.normal_(positions.weight)
    positions.weight.data[6:] *= 25
    x = torch.randn(1, SEGMENT, WIDTH, dtype=torch.float64, requires_grad=True)
    before = torch.randn(1, past, WIDTH, dtype=torch.float64)
    states = HiddenStates((before,)) if past else None

    def attend():
        (groups,) = read_head_groups([spans])
        encoding = positions(past + SEGMENT - 1, x)
        return attention(x, attention.project_positions(encoding, groups), states)[0][0]

    def encode(distance):
        return positions.weight[min(distance, span) - 1]

    attended = attend()
    expected = multi_head(attention, x[0], torch.cat([before[0], x[0]]), encode, span)
    torch.testing.assert_close(attended, expected, atol=1e-7, rtol=0)
    leaves = [x, positions.weight, *attention.parameters()]
    weight = torch.randn_like(expected)
    gradients, expected_gradients = (
        torch.autograd.grad((y * weight).sum(), leaves) for y in (attended, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=1e-6)
    if past:
        spans.epsilon = 0.0
        assert (attend() - expected).abs().max() > 0.01
