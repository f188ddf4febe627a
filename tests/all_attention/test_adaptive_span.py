"""Learned spans: groups of heads, scores of texts, cost, epsilon, loading."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from fairseq_plugins.all_attention.adaptive_span import (
    AdaptiveSpan,
    cheapest_parts,
    read_head_groups,
)
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.all_attention.layer import (
    EACH_VARIANT,
    RAMP,
    SPAN,
    assert_equals_the_equations,
    attend,
    draw,
    make,
)
from tests.reference.all_attention import network
from tests.segment_language_model.reading import assert_generates_as, assert_reads_as
from tests.tiny import VARIANTS, scores_by_segment, spread_spans, tiny_model, tokens

FEED_FORWARD = {"decoder_ffn_embed_dim": 24, "persistent_vectors": 0}
LEARNED = {"adaptive_span": True, "span_ramp": RAMP}
OPEN = {"adaptive_span": True, "span_init": 1.0}
PLACES = [*VARIANTS, "ff-attn"]
MODELS = [
    *({"persistent_variant": place, **LEARNED} for place in PLACES),
    *({"persistent_variant": place, **LEARNED, "span_epsilon": 0.2} for place in PLACES),
    *({**options, **spans} for options in ({}, FEED_FORWARD) for spans in ({}, LEARNED, OPEN)),
    {"share_decoder_input_output_embed": True, "output_bias": True},
    {"clamp_len": 3},
    *({**LEARNED, "mem_len": length, "same_length": True} for length in (3, 7, 12)),
    {"mem_len": 4, "same_length": True},
]


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_scores_are_the_references_however_a_text_is_read(monkeypatch, options):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    model = tiny_model(attention_span=SPAN, **options).double()
    if "span_init" not in options:
        spread_spans(model)
    stream = tokens(2, 19)
    span = options["mem_len"] if "same_length" in options else SPAN
    expected = torch.stack([network(model.decoder, row, span) for row in stream])
    assert_reads_as(model, stream, expected)
    assert_generates_as(model, stream, expected)


@pytest.mark.parametrize("group_cost", [0, 7, 100])
def test_parts_are_the_cheapest_of_all(monkeypatch, group_cost):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", group_cost)
    widths = [3, 3, 9, 10, 40, 41, 200]

    def cost(parts):
        return sum((last - first) * widths[last - 1] + group_cost for first, last in parts)

    every = [
        list(itertools.pairwise([0, *cuts, len(widths)]))
        for number in range(len(widths))
        for cuts in itertools.combinations(range(1, len(widths)), number)
    ]
    parts = cheapest_parts(widths)
    assert parts in every
    assert cost(parts) == min(map(cost, every))


def test_heads_of_like_spans_are_computed_together_and_others_apart():
    span = AdaptiveSpan(4, 8192)
    span.value.data = torch.tensor([200.0, 8192.0, 180.0, 190.0]) / 8192
    (groups,) = read_head_groups([span])
    assert [group.heads.tolist() for group in groups.groups] == [[2, 3, 0], [1]]
    assert [group.width for group in groups.groups] == [232, 8192]
    assert groups.order.tolist() == [2, 3, 0, 1]
    assert groups.width == 8192


def long_model(values):
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "attention_span": 1024}
    return set_spans(tiny_model(**sizes, adaptive_span=True, span_ramp=8), values)


def set_spans(model, values):
    for span in model.decoder.spans:
        span.value.data = torch.tensor(values) / 1024
    return model


def read(model, recurrence, segments):
    for segment in segments:
        model(tokens(1, 64, seed=segment), recurrence=recurrence, start=segment * 64)
    return recurrence.histories[model.decoder].layers


def multiply_adds_of(work):
    """Count multiply-adds of the matrix products in ``work``, whichever function computes them."""

    # from the shapes of x.baddbmm_(left, right), or of queries (B, H, C, d_h) and keys
    def in_place(_, left, right, **options):
        return bmm_flop(left, right)

    def fused_attention(query, key, value, *rest, **options):
        streams, heads, queries, width = query
        return 2 * 2 * streams * heads * queries * key[2] * width

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    known = {torch.ops.aten.baddbmm_: in_place, fused: fused_attention}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        work()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("values", [[1016, 20, 100, 20], [20] * 4])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_each_head_costs_what_it_sees(monkeypatch, mode, values):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    model, recurrence, training = long_model(values), Recurrence(), mode is torch.enable_grad
    model.train(training)
    with mode():
        read(model, recurrence, range(17))
        counted = multiply_adds_of(lambda: read(model, recurrence, [17]))
    widths, width, head = [value + 8 for value in values], 16, 4
    # 64 queries that see `seen` keys each cover seen + 63 keys; scores by distance have one column
    # more
    attention = sum(64 * head * (3 * (seen + 63) + 1) for seen in widths)
    remembered = sum(widths) * head * width if training else 0
    projections = 4 * 64 * width**2 + 2 * remembered
    persistent = 2 * 5 * 64 * width
    assert counted == 2 * (attention + projections + persistent) + 64 * width * 20
    states = recurrence.histories[model.decoder].layers
    if training:
        # hidden states as far as the widest head sees, or may see after the next updates
        held, numbers = [state.hidden for state in states], min(1024, max(widths) + 64) + 64
    else:
        # keys and values of each head, only as far as it sees, and of the latest segment
        held = [x for state in states for cut in state.groups for x in (cut.keys, cut.values)]
        numbers = sum(seen + 64 for seen in widths) * 2 * head // width
    # two layers, 4 bytes per number
    assert sum(x.nbytes for x in held) == 2 * 4 * width * numbers


def test_the_recurrence_follows_the_span_in_training():
    model, recurrence = long_model([20.0] * 4), Recurrence()
    lengths = []
    for segment in range(20):
        if segment in (6, 16):
            set_spans(model, [500.0 if segment == 6 else 20.0] * 4)
        lengths.append([layer.length for layer in read(model, recurrence, [segment])])
    # the tokens that the heads see, 64 more, and the segment of 64
    assert lengths[5] == lengths[6] == lengths[16] == [28 + 64 + 64] * 2
    assert lengths[7] == [28 + 64 + 2 * 64] * 2
    assert lengths[15] == [508 + 64 + 64] * 2


# --span-epsilon: weights that are normalised twice, as in the published code

# heads that see far and near, and heads that all see near; no mask is exactly 0 or 1
MIXED, NEAR = [0.05, 0.93, 0.41, 0.07], [0.013, 0.093, 0.05, 0.007]


@EACH_VARIANT
@pytest.mark.parametrize(
    ("epsilon", "far", "remembered"), [(1e-8, 25.0, 0), (1e-8, 25.0, 13), (0.3, 1.0, 13)]
)
def test_weights_normalised_twice_equal_the_equations(
    variant, persistent, epsilon, far, remembered
):
    attention, positions = make(MIXED, variant, persistent, epsilon=epsilon)
    # large scores beyond distance 6, so that epsilon matters
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", PLACES)
def test_half_precision_is_near_and_gives_spans_a_gradient(dtype, variant):
    options = {"attention_span": 16, "adaptive_span": True, "span_ramp": 4}
    model = tiny_model(**options, persistent_variant=variant)
    spread_spans(model)
    stream = tokens(2, 40)
    weight = torch.randn(2, 40, 20)

    def with_gradients():
        scores = scores_by_segment(model, stream, 8, torch.enable_grad).float()
        spans = [span.value for span in model.decoder.spans]
        return scores, torch.cat(torch.autograd.grad((scores * weight).sum(), spans))

    plain, exact = with_gradients()
    before = [span.value.clone() for span in model.decoder.spans]
    model.to(dtype)
    # spans stay in single precision
    torch.testing.assert_close([span.value for span in model.decoder.spans], before, rtol=0, atol=0)
    mixed, rough = with_gradients()
    torch.testing.assert_close(mixed, plain, atol=0.15, rtol=0.05)
    assert rough.dtype == torch.float32
    bits = 8 if dtype == torch.bfloat16 else 11
    # relative to the largest, since the sums over queries partly cancel
    assert (rough - exact).abs().max() < 0.08 * 2.0 ** (8 - bits) * exact.abs().max()


def test_values_outside_the_interval_are_brought_back_when_loaded():
    model = tiny_model(adaptive_span=True, attention_span=16)
    state = model.state_dict()
    state["decoder.layers.0.self_attn.span.value"] = torch.tensor([-0.5, 1.5])
    model.load_state_dict(state)
    assert model.decoder.spans[0].value.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("now", [10, 40])
def test_weights_of_another_largest_span_are_fitted(now, caplog):
    """Heads see as far as before, or as far as the new limit allows."""
    trained = tiny_model(attention_span=20, adaptive_span=True, span_ramp=4).double()
    for span in trained.decoder.spans:
        span.value.data = torch.tensor([0.1, 0.2], dtype=torch.float64)
    model = tiny_model(seed=2, attention_span=now, adaptive_span=True, span_ramp=4).double()
    model.load_state_dict(trained.state_dict())
    assert f"--attention-span 20, and here it is {now}" in caplog.text
    assert "--reset-optimizer" in caplog.text
    for span in model.decoder.spans:
        assert (span.value * now).tolist() == pytest.approx([2, 4])
    stream = tokens(2, 60)
    torch.testing.assert_close(
        scores_by_segment(model, stream, 7), scores_by_segment(trained, stream, 7)
    )


def test_distances_that_had_no_vector_get_the_farthest_ones():
    trained, model = tiny_model(attention_span=6), tiny_model(attention_span=9)
    model.load_state_dict(trained.state_dict())
    before, now = (m.decoder.positions.weight for m in (trained, model))
    assert torch.equal(now, torch.cat([before, before[-1:].expand(3, -1)]))


def test_weights_of_a_fixed_span_see_all_of_it():
    fixed = tiny_model(attention_span=16)
    adaptive = tiny_model(seed=2, attention_span=16, adaptive_span=True)
    adaptive.load_state_dict(fixed.state_dict())
    stream = tokens(2, 40)
    assert torch.equal(scores_by_segment(adaptive, stream, 8), scores_by_segment(fixed, stream, 8))
