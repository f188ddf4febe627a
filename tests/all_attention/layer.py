"""An attention layer with random weights, and its comparison with the equations."""

import pytest
import torch

from fairseq_plugins.all_attention.adaptive_span import ALL_HEADS, AdaptiveSpan, read_head_groups
from fairseq_plugins.all_attention.attention import AllAttention
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
        spans = AdaptiveSpan(len(values), span, RAMP, epsilon)
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


def assert_equals_the_equations(attention, positions, length, remembered):
    """Compare values and gradients with the equations, also the values under no_grad."""
    x, past = draw(length), draw(remembered)
    inputs = [x, past, *attention.parameters(), positions.weight]
    state = HiddenStates((past,)) if remembered else None
    context = torch.cat([past, x], dim=1)

    def u(distance):
        return positions.weight[min(max(distance, 1), positions.farthest) - 1]

    span = attention.window.farthest
    rows = [multi_head(attention, x[b], context[b], u, span) for b in range(STREAMS)]
    expected = torch.stack(rows)
    assert_same(attend(attention, positions, x, state)[0], expected, inputs)
    with torch.no_grad():
        torch.testing.assert_close(attend(attention, positions, x, state)[0], expected.detach())
