"""Attention to context and persistent vectors against the equations, in float64."""

import pytest
import torch

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan, read_head_groups
from fairseq_plugins.all_attention.attention import AllAttention, GroupedCaches
from fairseq_plugins.segment_language_model import attention_blocks
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.layer import SegmentLayer
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedRelativeKeys,
)
from tests.gradients import assert_same
from tests.reference.all_attention import multi_head

STREAMS, HEADS, WIDTH = 2, 2, 8


def make(span, persistent, nearest=1, clamp_len=None, kernel="fast"):
    torch.manual_seed(1)
    window = Window(nearest, span)
    shared = SharedRelativeKeys()
    attention = AllAttention(WIDTH, HEADS, window, shared, num_persistent=persistent, kernel=kernel)
    positions = LearnedRelativePositions(span, WIDTH // HEADS, clamp_len)
    return attention.double(), positions.double()


def terms(attention, positions, farthest):
    return attention.project_positions(positions(farthest))


def reference(attention, positions, x, past):
    context = x if past is None else torch.cat([past, x], dim=1)
    farthest = positions.farthest

    def u(distance):
        return positions.weight[min(max(distance, 1), farthest) - 1]

    span = attention.window.farthest
    return torch.stack([multi_head(attention, x[b], context[b], u, span) for b in range(x.size(0))])


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
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    attention, positions = make(span, persistent, nearest, clamp_len, kernel)
    x = torch.randn(STREAMS, length, WIDTH, dtype=torch.float64, requires_grad=True)
    past = None
    if remembered:
        past = torch.randn(STREAMS, remembered, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *attention.parameters(), positions.weight]
    if past is not None:
        inputs.append(past)

    state = None if past is None else HiddenStates(past)
    fast, _ = attention(x, terms(attention, positions, remembered + length - 1), state)
    slow = reference(attention, positions, x, past)
    assert_same(fast, slow, inputs)


def test_cached_projections_give_the_values_of_remembered_hidden_states():
    attention, positions = make(span=4, persistent=3)
    x = torch.randn(STREAMS, 9, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        _, state = attention(x[:, :5], terms(attention, positions, 4))
        assert isinstance(state, GroupedCaches)
        cached, _ = attention(x[:, 5:], terms(attention, positions, 8), state)
    hidden, state = attention(x[:, 5:], terms(attention, positions, 8), HiddenStates(x[:, :5]))
    assert state is None  # the layer keeps its input
    torch.testing.assert_close(cached, hidden.detach())


def test_projections_learn_from_remembered_hidden_states():
    attention, positions = make(span=4, persistent=0)
    x = torch.randn(STREAMS, 1, WIDTH, dtype=torch.float64)
    past = HiddenStates(torch.randn(STREAMS, 4, WIDTH, dtype=torch.float64))
    out, _ = attention(x, terms(attention, positions, 4), past)
    out.sum().backward()
    # the segment's only token sees nothing but the past, so the gradient comes from there
    assert attention.k_proj.weight.grad.abs().max() > 0
    assert attention.v_proj.weight.grad.abs().max() > 0


def test_dropout_acts_on_attention_weights_in_training_only():
    attention, positions = make(span=4, persistent=3)
    x = torch.randn(STREAMS, 5, WIDTH, dtype=torch.float64)
    plain, _ = attention(x, terms(attention, positions, 4))
    attention.dropout = 0.5
    assert not torch.allclose(attention(x, terms(attention, positions, 4))[0], plain)
    torch.testing.assert_close(attention.eval()(x, terms(attention, positions, 4))[0], plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_where_a_query_sees_nothing(dtype):
    attention, positions = make(span=4, persistent=0)
    attention, positions = attention.to(dtype), positions.to(dtype)
    x = (100 * torch.randn(STREAMS, 5, WIDTH)).to(dtype)
    out, _ = attention(x, terms(attention, positions, 4))
    assert out.isfinite().all()
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))


def test_dropout_acts_on_the_context_alone_too():
    attention, positions = make(span=4, persistent=0)
    x = torch.randn(STREAMS, 5, WIDTH, dtype=torch.float64)
    attention.dropout = 0.5
    one, other = (attention(x, terms(attention, positions, 4))[0] for _ in range(2))
    assert not torch.allclose(one, other)


def test_a_layer_with_learned_spans_trains_under_torch_compile():
    torch._dynamo.reset()
    torch.manual_seed(1)
    span = AdaptiveSpan(HEADS, 8, ramp=3)
    span.value.data = torch.tensor([0.3, 0.7])
    attention = AllAttention(
        WIDTH,
        HEADS,
        Window(1, 8),
        SharedRelativeKeys(),
        num_persistent=3,
        span=span,
        kernel="plain",
    )
    layer = SegmentLayer(WIDTH, attention, None, torch.nn.Identity())
    encoding = LearnedRelativePositions(8, WIDTH // HEADS)(10).detach()
    (groups,) = read_head_groups([span])
    x, past = torch.randn(STREAMS, 6, WIDTH), HiddenStates(torch.randn(STREAMS, 5, WIDTH))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = [
        model(x, attention.project_positions(encoding, groups), past)[0]
        for model in (layer, compiled)
    ]
    assert_same(*results, list(layer.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "new"},
            "^`variant` is 'new': there are all, attn-split, head-split, sin",
        ),
        ({"num_heads": 1, "variant": "head-split"}, "^`num_heads` is 1: half of them see the cont"),
        ({"span": AdaptiveSpan(3, 4)}, "^`span` is of 3 heads: 2 see the context$"),
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


def test_parameters_stand_in_the_order_of_earlier_checkpoints():
    """Checkpoints hold the optimizer's state by the order of parameters, without their names."""
    attention = AllAttention(
        WIDTH, HEADS, Window(1, 4), SharedRelativeKeys(), num_persistent=2, span=AdaptiveSpan(2, 8)
    )
    assert [name for name, _ in attention.named_parameters()] == [
        "span.value",
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "out_proj.weight",
        "persistent.keys",
        "persistent.values",
    ]
