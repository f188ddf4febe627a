"""Weights of models with learned spans: limits, gradients, precision, loading those of others."""

import pytest
import torch

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from tests.tiny import VARIANTS, scores_by_segment, spread_spans, tiny_model, tokens


def test_the_penalty_is_the_formula():
    span = AdaptiveSpan(4, 8192)
    span.value.data = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert span.penalty().item() == 8192 * 1.75 / 4
    (gradient,) = torch.autograd.grad(span.penalty(), span.value)
    assert gradient.tolist() == [8192 / 4] * 4


def test_constrained_names_the_spans_and_their_interval():
    span = AdaptiveSpan(3, 16)
    ((parameter, project),) = span.constrained()
    assert parameter is span.value
    master = torch.tensor([-0.1, 0.4, 1.7])
    project(master)
    assert master.tolist() == pytest.approx([0.0, 0.4, 1.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [*VARIANTS, "ff-attn"])
def test_half_precision_is_near_and_gives_spans_a_gradient(dtype, variant):
    model = tiny_model(
        attention_span=16, adaptive_span=True, span_ramp=4, persistent_variant=variant
    )
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
    # of the largest, since the sums over queries cancel in part
    assert (rough - exact).abs().max() < 0.08 * 2.0 ** (8 - bits) * exact.abs().max()


def test_values_outside_the_interval_are_brought_back_when_loaded():
    model = tiny_model(adaptive_span=True, attention_span=16)
    state = model.state_dict()
    state["decoder.layers.0.self_attn.span.value"] = torch.tensor([-0.5, 1.5])
    model.load_state_dict(state)
    assert model.decoder.spans[0].value.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("now", [10, 40])
def test_weights_of_another_largest_span_are_fitted(now, caplog):
    """Heads see as far as before, or as far as they now may."""
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
