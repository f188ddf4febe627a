"""The network and the block of all-attention against the equations of section 4."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span
from fairseq_plugins.all_attention.network import (
    AllAttentionBlock,
    AllAttentionNetwork,
    learned_spans,
)
from fairseq_plugins.segment_language_model.stream_pasts import StreamPasts
from tests.reference import all_attention as reference
from tests.segment_language_model.equations import assert_equals_the_equations
from tests.segment_language_model.networks import SPAN, build, draw


@pytest.mark.parametrize("group_cost", [0, 1000])
@pytest.mark.parametrize("kernel", ["fast", "sdpa", "plain"])
@pytest.mark.parametrize("name", ["AllAttentionNetwork", "AllAttentionBlock"])
def test_networks_equal_the_equations(monkeypatch, name, kernel, group_cost):
    monkeypatch.setattr(adaptive_span, "GROUP_COST", group_cost)
    assert_equals_the_equations(build(name, kernel=kernel), reference.run_segment)


def test_layers_share_positions_and_have_no_feed_forward():
    network = AllAttentionNetwork(3, 16, 4, 5, 6)
    # 4 projections, keys and values of 5 persistent vectors, a norm and 4 spans
    layer = 4 * 16 * 16 + 2 * 5 * 16 + 2 * 16 + 4
    assert sum(p.numel() for p in network.parameters()) == 3 * layer + 6 * 4


def test_the_span_penalty_sums_mean_spans_in_tokens():
    network = build("AllAttentionNetwork")
    spans = [span.value for span in learned_spans(network)]
    for number, span in enumerate(spans):
        span.data.fill_(0.1 * (number + 1))
    penalty = network.span_penalty()
    torch.testing.assert_close(penalty.item(), SPAN * (0.1 + 0.2 + 0.3))
    for gradient in torch.autograd.grad(penalty, spans):
        torch.testing.assert_close(gradient, torch.full_like(gradient, SPAN / 4))


@pytest.mark.parametrize(("length", "growth"), [(1, 2), (4, 4), (20, 20)])
def test_a_span_that_grows_in_an_update_sees_its_new_context(length, growth):
    block = AllAttentionBlock(16, 4, 5, 100).double()
    span, text = block.self_attn.span, draw(2, 80)
    span.ramp, before = 2, 80 - length
    past = None
    for segment in text[:, :before].split(length, dim=1):
        _, past = block(segment, past)
    # a segment more than the spans, or 2 % of the largest span
    assert past.length == 2 + max(length, 2)
    span.value.data.fill_(growth / 100)
    y, _ = block(text[:, before:], past)
    torch.testing.assert_close(y, block(text)[0][:, before:])


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize(("tokens", "warns"), [(8, False), (30, True)])
def test_a_span_that_grows_beyond_the_past_warns(tokens, warns, normalize_before, caplog):
    block = AllAttentionBlock(16, 4, 5, 100).double()
    block.normalize_before = normalize_before
    block.self_attn.span.ramp, past = 2, None
    for segment in draw(2, 40).split(8, dim=1):
        _, past = block(segment, past)
    block.self_attn.span.value.data.fill_(tokens / 100)
    # also after a checkpoint
    pasts = StreamPasts()
    pasts.after(past)
    resumed = StreamPasts.from_state_dict(pasts.state_dict(), 0, 1).before(past.num_tokens)
    for known in (past.to(torch.float64), resumed):
        caplog.clear()
        block(draw(2, 8), known)
        assert (f"span grew to {tokens + 2} tokens" in caplog.text) == warns


@pytest.mark.parametrize("part", ["weights", "sublayer"])
def test_dropout_acts_on_weights_and_on_the_sublayer(part):
    network = build("AllAttentionNetwork", dropout=0.5).train()
    assert not torch.allclose(network(draw())[0], network(draw())[0])
    for layer in network.layers:
        if part == "weights":
            layer.dropout.p = 0.0
        else:
            layer.self_attn.dropout = 0.0
    assert not torch.allclose(network(draw())[0], network(draw())[0])
