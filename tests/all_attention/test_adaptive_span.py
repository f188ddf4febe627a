"""Learned spans: groups of heads, cost, precision, loading."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from fairseq_plugins.all_attention import attention as attention_file
from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan, HeadGroup
from fairseq_plugins.all_attention.network import AllAttentionNetwork, AllAttentionSettings
from fairseq_plugins.segment_language_model.attention import KERNELS
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from tests.tiny import VARIANTS, scores_by_segment, spread_spans, tiny_model, tokens

PLACES = [*VARIANTS, "ff-attn"]


def long_model(values):
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "attention_span": 1024}
    return set_spans(tiny_model(**sizes, adaptive_span=True, span_ramp=8), values)


def set_spans(model, values):
    for span in model.learned_spans():
        span.value.data = torch.tensor(values) / 1024
    return model


def read_segments(model, past, segments):
    for segment in segments:
        _, past = model.decoder.extract_features(tokens(1, 64, seed=segment), past=past)
    return past


@pytest.mark.parametrize("values", [[1016, 20, 100, 20], [20] * 4])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_each_head_reads_and_keeps_what_it_sees(monkeypatch, mode, values):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    read, model, training = [], long_model(values), mode is torch.enable_grad

    def recorded(query, keys, *rest, **options):
        read.append(keys.size(0) * keys.size(2))
        return window_attention(query, keys, *rest, **options)

    model.train(training)
    with mode():
        past = read_segments(model, None, range(17))
        monkeypatch.setattr(attention_file, "choose_kernel", lambda *_: recorded)
        read_segments(model, past, [17])
    widths = [value + 8 for value in values]
    # in each of two layers, segments of 64 tokens
    assert sum(read) == 2 * sum(width + 64 for width in widths)
    if training:
        # hidden states as far as the widest head sees, or may see after the next updates
        tensors, numbers = [layer.hidden for layer in past.layers], min(1024, max(widths) + 64) * 16
    else:
        # keys and values of each head, only as far as it sees
        groups = [group for layer in past.layers for group in layer.groups]
        tensors = [x for group in groups for x in (group.keys, group.values)]
        numbers = sum(widths) * 2 * 4
    assert sum(x.nbytes for x in tensors) == 2 * 4 * numbers


def test_the_past_follows_the_span_in_training():
    model, past = long_model([20.0] * 4), None
    lengths = []
    for segment in range(20):
        if segment in (6, 16):
            set_spans(model, [500.0 if segment == 6 else 20.0] * 4)
        past = read_segments(model, past, [segment])
        lengths.append([layer.length for layer in past.layers])
    # the tokens that the heads see, and a segment more, as far as they were kept
    assert lengths[5] == lengths[16] == [28 + 64] * 2
    assert lengths[6] == [28 + 2 * 64] * 2
    assert lengths[7] == [28 + 3 * 64] * 2
    assert lengths[15] == [508 + 64] * 2


def test_a_closed_span_has_a_finite_gradient_beside_an_open_one():
    span = AdaptiveSpan(2, 100, ramp=4)
    span.value.data = torch.tensor([0.0, 0.5])
    # the mask of the first head reaches 0 exactly at a distance that the second one sees
    (gradient,) = torch.autograd.grad(span.log_mask(HeadGroup(None, 54, 0)).exp().sum(), span.value)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_spans_that_nobody_clamped_do_not_see_the_future(kernel):
    options = AllAttentionSettings(span_ramp=8)
    network = AllAttentionNetwork(1, 16, 2, 0, 256, kernel=kernel, settings=options).double()
    torch.nn.init.constant_(network.layers[0].self_attn.span.value, -0.05)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, -1] += 1
    y, others = network(x)[0], network(changed)[0]
    torch.testing.assert_close(others[:, :-1], y[:, :-1])
    assert (
        torch.autograd.grad(y.sum(), network.layers[0].self_attn.q_proj.weight)[0].isfinite().all()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", PLACES)
def test_half_precision_is_near_and_gives_spans_a_gradient(dtype, variant):
    options = {"attention_span": 16, "adaptive_span": True, "span_ramp": 4}
    model = tiny_model(**options, persistent_variant=variant)
    spread_spans(model)
    stream, weight = tokens(2, 40), torch.randn(2, 40, 20)
    spans, results = [span.value for span in model.learned_spans()], []
    before = [span.detach().clone() for span in spans]
    for kind in (torch.float32, dtype):
        model.to(kind)
        scores = scores_by_segment(model, stream, 8, torch.enable_grad).float()
        results.append((scores, torch.cat(torch.autograd.grad((scores * weight).sum(), spans))))
    # spans and their gradients stay in single precision
    torch.testing.assert_close([span.detach() for span in spans], before, rtol=0, atol=0)
    (plain, exact), (mixed, rough) = results
    torch.testing.assert_close(mixed, plain, atol=0.15, rtol=0.05)
    assert rough.dtype == torch.float32
    bits = 8 if dtype == torch.bfloat16 else 11
    # relative to the largest, since the sums over queries partly cancel
    assert (rough - exact).abs().max() < 0.08 * 2.0 ** (8 - bits) * exact.abs().max()


def test_loaded_spans_are_brought_back_into_their_interval():
    model = tiny_model(adaptive_span=True, attention_span=16)
    state = model.state_dict()
    state["decoder.network.layers.0.self_attn.span.value"] = torch.tensor([-0.5, 1.5])
    model.load_state_dict(state)
    assert model.learned_spans()[0].value.tolist() == [0.0, 1.0]
