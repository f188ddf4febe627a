"""Learned spans: mask, values and gradients, groups of heads, what shrinks, epsilon."""

import itertools
import math

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from fairseq_plugins.all_attention.adaptive_span import (
    AdaptiveSpan,
    cheapest_parts,
    read_head_groups,
)
from fairseq_plugins.all_attention.attention import GroupedCaches
from fairseq_plugins.segment_language_model import attention_kernel
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.all_attention.layer import (
    HEADS,
    RAMP,
    SPAN,
    STREAMS,
    WIDTH,
    assert_equals_the_equations,
    attend,
    draw,
    make,
)
from tests.operations import multiply_adds_of
from tests.reference.all_attention import network
from tests.tiny import VARIANTS, scores_by_segment, spread_spans, tiny_model, tokens

# all but shut, alike, alike but for a little, open, different, very different; none where a key's
# mask is exactly 0, and which of two gradients it has is a matter of taste
VALUES = [
    [0.001, 0.001, 0.001, 0.001],
    [0.3, 0.3, 0.3, 0.3],
    [0.26, 0.31, 0.44, 0.37],
    [1.0, 1.0, 1.0, 1.0],
    [0.05, 0.93, 0.41, 0.07],
    [0.97, 0.02, 1.0, 0.01],
]


@pytest.mark.parametrize(("block", "group_cost"), [(2, 0), (128, 1000)])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("variant", "persistent"), [*((variant, 3) for variant in VARIANTS), ("all", 0)]
)
@pytest.mark.parametrize(
    ("remembered", "length", "clamp_len"), [(0, 5, None), (4, 3, None), (16, 5, None), (16, 5, 4)]
)
def test_values_and_gradients_equal_the_equations(
    monkeypatch, block, group_cost, values, variant, persistent, remembered, length, clamp_len
):
    monkeypatch.setattr(attention_kernel, "QUERY_BLOCK", block)
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    attention, positions = make(values, variant, persistent, clamp_len=clamp_len)
    assert_equals_the_equations(attention, positions, length, remembered)


@pytest.mark.parametrize("values", [None, [0.05, 0.93, 0.41, 0.07]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_projections_give_the_values_of_remembered_hidden_states(
    variant, values, monkeypatch
):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    attention, positions = make(values, variant)
    x, cached, state = draw(40), [], None
    whole, kept = attend(attention, positions, x)
    assert kept is None  # in training the layer keeps its input
    attention.eval()
    with torch.no_grad():
        for start in range(0, 40, 8):
            out, state = attend(attention, positions, x[:, start : start + 8], state)
            state = state.last(SPAN)
            cached.append(out)
    assert isinstance(state, GroupedCaches)
    torch.testing.assert_close(torch.cat(cached, dim=1), whole.detach())


@pytest.mark.parametrize("variant", [*VARIANTS, "ff-attn"])
@pytest.mark.parametrize("span_init", [0.0, 0.3, 1.0])
def test_scores_equal_the_reference(variant, span_init):
    model = tiny_model(
        attention_span=SPAN,
        adaptive_span=True,
        span_ramp=RAMP,
        span_init=span_init,
        persistent_variant=variant,
    ).double()
    stream = tokens(1, 25)
    torch.testing.assert_close(model(stream)[0][0], network(model.decoder, stream[0], SPAN))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("variant", [*VARIANTS, "ff-attn"])
@pytest.mark.parametrize("group_cost", [0, 1000])
def test_loss_does_not_depend_on_segment_length(monkeypatch, mode, variant, group_cost):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    model = tiny_model(
        attention_span=40, adaptive_span=True, span_ramp=4, persistent_variant=variant
    ).double()
    spread_spans(model)
    stream = tokens(3, 90)
    whole = scores_by_segment(model, stream, 90, mode)
    for length in (1, 7, 64):
        torch.testing.assert_close(scores_by_segment(model, stream, length, mode), whole)


def test_incremental_decoding_equals_one_pass_and_beams_move(monkeypatch):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    model = tiny_model(attention_span=32, adaptive_span=True, span_ramp=4).double().eval()
    spread_spans(model)
    stream = tokens(2, 20)
    state = {}
    order = torch.tensor([1, 0])
    with torch.no_grad():
        steps = [model.decoder(stream[:, : i + 1], incremental_state=state)[0] for i in range(10)]
        model.decoder.reorder_incremental_state(state, order)
        turned = stream[order]
        rest = [
            model.decoder(turned[:, : i + 1], incremental_state=state)[0] for i in range(10, 20)
        ]
        whole = model(stream)[0]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole[:, :10])
    torch.testing.assert_close(torch.cat(rest, dim=1), whole[order][:, 10:])


def test_open_spans_equal_a_fixed_one():
    fixed = tiny_model(attention_span=16)
    adaptive = tiny_model(attention_span=16, adaptive_span=True, span_init=1.0)
    adaptive.load_state_dict(fixed.state_dict())
    stream = tokens(2, 40)
    for mode in (torch.no_grad, torch.enable_grad):
        assert torch.equal(
            scores_by_segment(adaptive, stream, 8, mode), scores_by_segment(fixed, stream, 8, mode)
        )


@pytest.mark.parametrize("values", VALUES)
def test_the_mask_never_touches_persistent_vectors(values):
    """Whatever the span, their weights are those that one softmax over what is seen gives them."""
    attention, positions = make(values, persistent=5)
    # each persistent vector can be told from what comes out, and the context from none
    attention.persistent.values.data.zero_()
    attention.persistent.values.data[:, 0] = 1
    attention.v_proj.weight.data.zero_()
    attention.out_proj.weight.data = torch.eye(WIDTH, dtype=torch.float64)
    x = torch.randn(STREAMS, 20, WIDTH, dtype=torch.float64)
    out, _ = attend(attention, positions, x)

    head_dim = WIDTH // HEADS
    query, key = (
        proj(x).unflatten(-1, (HEADS, head_dim)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj)
    )
    persistent, _ = attention.persistent()
    distance = torch.arange(20).unsqueeze(1) - torch.arange(20)
    z = (SPAN * attention.span.value).view(HEADS, 1, 1)
    mask = ((RAMP + z - (distance - 1)) / RAMP).clamp(0, 1)
    mask = mask * ((distance >= 1) & (distance <= SPAN))
    vectors = positions.weight[distance.clamp(1, SPAN) - 1]
    of_context = torch.einsum("bhtd,bhsd->bhts", query, key)
    of_context = of_context + torch.einsum("bhtd,tsd->bhts", query, vectors)
    of_persistent = torch.einsum("bhtd,hnd->bhtn", query, persistent)
    scale = head_dim**-0.5
    weights = (scale * of_persistent).exp()
    total = ((scale * of_context).exp() * mask).sum(-1) + weights.sum(-1)
    # the first vector's value is √N in each dimension of its head
    expected = (attention.persistent.value_scale * weights[..., 0] / total).transpose(1, 2)
    torch.testing.assert_close(out, expected.repeat_interleave(head_dim, dim=-1))


@pytest.mark.parametrize("z", [0.0, 2.5, 5.0, 11.9, 12.0])
def test_the_mask_is_the_formula(z):
    span = AdaptiveSpan(1, SPAN, RAMP, z / SPAN).double()
    ((group,),) = [groups.groups for groups in read_head_groups([span])]
    x = torch.arange(SPAN, dtype=torch.float64)
    expected = ((RAMP + z - x) / RAMP).clamp(0, 1)
    assert group.width == int((expected > 1e-6).sum())
    from_group = torch.ones(group.width, dtype=torch.float64)
    from_group[group.open :] = span.log_mask(group)[0].exp().flip(0)
    torch.testing.assert_close(from_group, expected[: group.width], atol=1e-6, rtol=0)
    assert span.tokens().tolist() == pytest.approx([min(SPAN, z + RAMP)])


@pytest.mark.parametrize("group_cost", [0, 7, 100])
def test_parts_are_the_cheapest_of_all(monkeypatch, group_cost):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    widths = [3, 3, 9, 10, 40, 41, 200]

    def cost(parts):
        return sum((last - first) * widths[last - 1] + group_cost for first, last in parts)

    every = []
    for number in range(len(widths)):
        for cuts in itertools.combinations(range(1, len(widths)), number):
            every.append(list(itertools.pairwise([0, *cuts, len(widths)])))
    parts = cheapest_parts(widths)
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == len(widths)
    assert cost(parts) == min(map(cost, every))


def test_heads_of_like_spans_are_computed_together_and_others_apart():
    span = AdaptiveSpan(4, 8192)
    span.value.data = torch.tensor([200.0, 8192.0, 180.0, 190.0]) / 8192
    (groups,) = read_head_groups([span])
    assert [group.heads.tolist() for group in groups.groups] == [[2, 3, 0], [1]]
    assert [group.width for group in groups.groups] == [232, 8192]
    assert groups.order.tolist() == [2, 3, 0, 1]
    assert groups.width == 8192


def long_model(values, **options):
    model = tiny_model(
        decoder_layers=2,
        decoder_attention_heads=4,
        attention_span=1024,
        adaptive_span=True,
        span_ramp=8,
        **options,
    )
    for span in model.decoder.spans:
        span.value.data = torch.tensor(values) / 1024
    return model


def read(model, segments, mode=torch.no_grad, length=64):
    """Let a model read so many segments; returns its history."""
    recurrence = Recurrence()
    model.train(mode is torch.enable_grad)
    with mode():
        for segment in range(segments):
            model(tokens(1, length, seed=segment), recurrence=recurrence, start=segment * length)
    return recurrence.histories[model.decoder]


def cached_bytes(history):
    """Bytes of all that is remembered."""
    held = []
    for state in history.layers:
        if isinstance(state, HiddenStates):
            held.append(state.hidden)
        else:
            held += [t for c in state.groups for t in (c.keys, c.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def operations(model, mode):
    """Multiply-adds of a segment after a long history."""
    recurrence = Recurrence()
    model.train(mode is torch.enable_grad)
    with mode():
        for segment in range(17):
            model(tokens(1, 64, seed=segment), recurrence=recurrence, start=segment * 64)

        def last_segment():
            scores = model(tokens(1, 64), recurrence=recurrence, start=17 * 64)[0]
            if scores.requires_grad:
                scores.sum().backward()

        return multiply_adds_of(last_segment)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_shorter_spans_mean_fewer_operations_and_bytes(mode):
    wide, uneven, narrow = [1024.0] * 4, [1024.0, 20.0, 20.0, 20.0], [20.0] * 4
    models = [long_model(values) for values in (wide, uneven, narrow)]
    work = [operations(model, mode) for model in models]
    held = [cached_bytes(read(model, 18, mode)) for model in models]
    assert work[0] > 2 * work[1] > 2 * work[2]
    if mode is torch.no_grad:
        # keys and values of each head only as far as it sees, and the latest segment
        assert held == [2 * 2 * 4 * 4 * n for n in (4 * 1088, 1088 + 3 * 92, 4 * 92)]
    else:
        # hidden states as far as the widest head sees, and may see after the next updates
        assert held == [2 * 16 * 4 * n for n in (1088, 1088, 64 + 28 + 64)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_each_head_costs_what_it_sees(monkeypatch, mode):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    model, recurrence = long_model([1016.0, 20.0, 100.0, 20.0]), Recurrence()
    model.train(mode is torch.enable_grad)
    with mode():
        for segment in range(17):
            model(tokens(1, 64, seed=segment), recurrence=recurrence, start=segment * 64)
        counted = multiply_adds_of(
            lambda: model(tokens(1, 64), recurrence=recurrence, start=17 * 64)
        )
    widths, width, head = (1024, 28, 108, 28), 16, 4
    # the last of 64 queries sees width keys and the first as many before them; scores by distance
    # have a column more
    attention = sum(64 * head * (3 * (width + 63) + 1) for width in widths)
    remembered = sum(widths) * head * width if mode is torch.enable_grad else 0
    projections = 4 * 64 * width**2 + 2 * remembered
    persistent = 2 * 5 * 64 * width
    assert counted == 2 * (attention + projections + persistent) + 64 * width * 20


def test_the_recurrence_follows_the_span_in_training():
    model = long_model([20.0] * 4)
    recurrence = Recurrence()
    lengths = []
    for segment in range(20):
        if segment == 6:
            for span in model.decoder.spans:
                span.value.data.fill_(500 / 1024)
        if segment == 16:
            for span in model.decoder.spans:
                span.value.data.fill_(20 / 1024)
        model(tokens(1, 64, seed=segment), recurrence=recurrence, start=segment * 64)
        lengths.append([layer.length for layer in recurrence.histories[model.decoder].layers])
    # as far as the heads see and 64 tokens more, with the segment of 64
    assert lengths[5] == [28 + 64 + 64] * 2
    assert lengths[6] == [28 + 64 + 64] * 2
    assert lengths[7] == [28 + 64 + 2 * 64] * 2
    assert lengths[15] == [508 + 64 + 64] * 2
    assert lengths[16] == [28 + 64 + 64] * 2


@pytest.mark.parametrize("mem_len", [3, 7, 12])
def test_same_length_cuts_what_spans_would_reach(mem_len):
    model = tiny_model(
        attention_span=SPAN,
        adaptive_span=True,
        span_ramp=RAMP,
        mem_len=mem_len,
        same_length=True,
        decoder_layers=1,
    ).double()
    spread_spans(model)
    stream = tokens(1, 30)
    expected = network(model.decoder, stream[0], mem_len)
    for mode in (torch.no_grad, torch.enable_grad):
        found = scores_by_segment(model, stream, 6, mode)
        torch.testing.assert_close(found[0], expected)


# --span-epsilon: weights that are normalised twice, as in the published code

# a head that sees far beside one that does not; no mask is 0 or 1 exactly
MIXED, NEAR = [0.05, 0.93, 0.41, 0.07], [0.013, 0.093, 0.05, 0.007]


@pytest.mark.parametrize(
    ("variant", "persistent"), [*((variant, 3) for variant in VARIANTS), ("all", 0)]
)
@pytest.mark.parametrize(
    ("epsilon", "far", "remembered"),
    [(1e-8, 25.0, 0), (1e-8, 25.0, 13), (0.3, 1.0, 13)],
    ids=["start", "published", "large"],
)
def test_weights_normalised_twice_equal_the_equations(
    variant, persistent, epsilon, far, remembered
):
    attention, positions = make(MIXED, variant, persistent, epsilon=epsilon)
    # large scores beyond distance 6, so that epsilon counts
    positions.weight.data[6:] += far * torch.randn_like(positions.weight[6:])
    assert_equals_the_equations(attention, positions, 4, remembered)
    if remembered:
        x, past = draw(4), HiddenStates(draw(remembered))
        with_epsilon, _ = attend(attention, positions, x, past)
        attention.span.epsilon = 0.0
        assert (attend(attention, positions, x, past)[0] - with_epsilon).abs().max() > 0.01


@pytest.mark.parametrize(("values", "persistent"), [(MIXED, 0), (NEAR, 0), (NEAR, 3)])
def test_the_published_code_leaves_64_distances_out_at_a_time(values, persistent):
    attention, positions = make(values, persistent=persistent, epsilon=0.1, span=80)
    positions.weight.data[6:] += 3 * torch.randn_like(positions.weight[6:])
    assert_equals_the_equations(attention, positions, 3, 80)


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
