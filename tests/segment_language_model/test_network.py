"""Networks of both papers read a text alike in any segments, and nothing of it stays on them."""

import copy
from dataclasses import replace

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span
from fairseq_plugins.segment_language_model import attention_blocks
from fairseq_plugins.segment_language_model.attention import RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.network import FeedForward, SegmentLayer, SegmentNetwork
from tests.segment_language_model.networks import (
    BUILDERS,
    STREAMS,
    TOKENS,
    WIDTH,
    build,
    draw,
    read_segments,
)

each_network = pytest.mark.parametrize("name", BUILDERS)
MODES = [(True, torch.enable_grad), (False, torch.enable_grad), (False, torch.no_grad)]
each_mode = pytest.mark.parametrize(("training", "grad"), MODES)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let long segments have several blocks, and heads with different spans be computed apart."""
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", 5)
    monkeypatch.setattr(adaptive_span, "GROUP_COST", 0)


@each_network
@each_mode
@pytest.mark.parametrize("kernel", ["fast", "sdpa", "plain"])
def test_a_network_gives_the_same_in_any_segments(name, training, grad, kernel):
    network = build(name, kernel=kernel).train(training)
    with grad():
        whole, _ = network(draw())
        for sizes in ([4, 4, 4], [5, 6, 1], [1] * TOKENS):
            y, past = read_segments(network, draw().split(sizes, dim=1))
            torch.testing.assert_close(y, whole, rtol=0, atol=1e-5)
            assert past.num_tokens == TOKENS


@each_network
@each_mode
def test_a_network_keeps_nothing_of_a_text(name, training, grad):
    network = build(name).train(training)
    before = [{**vars(module)} for module in network.modules()]
    state = copy.deepcopy(network.state_dict())
    with grad():
        _, past = network(draw())
        network(draw(STREAMS + 1, 3))
        network(draw(seed=5), past)
    for module, attributes in zip(network.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(value is attributes[name] for name, value in vars(module).items())
    torch.testing.assert_close(network.state_dict(), state, rtol=0, atol=0)


@each_network
def test_a_network_projects_positions_rarely(name):
    network, projected = build(name).eval(), []
    network.positions.register_forward_hook(lambda _, args, out: projected.append(args[0]))
    with torch.no_grad():
        _, past = read_segments(network, draw(STREAMS, 60).split(1, dim=1))
    # the past doubles until it is full
    assert len(projected) <= 6
    assert past.farthest == projected[-1] == network.mem_len


@each_network
@pytest.mark.parametrize("keep", [0, 2])
def test_a_network_keeps_as_many_tokens_as_asked_for(name, keep):
    for training, grad in MODES:
        network = build(name).train(training)
        with grad():
            y, longer = network(draw())
            kept, past = network(draw(), None, keep)
            torch.testing.assert_close(kept, y)
            # an old past longer than that is cut, too
            _, cut = network(draw(STREAMS, 1), longer, keep)
            assert past.length == cut.length == keep


class Memory(torch.nn.Linear):
    """A sublayer that reads tokens except padding."""

    def forward(self, x, padding_mask=None):
        y = super().forward(x)
        return y if padding_mask is None else y.masked_fill(padding_mask.unsqueeze(-1), 0.0)


def test_a_memory_is_a_residual_sublayer_and_sees_padding():
    layer = SegmentLayer(
        WIDTH,
        RelativeAttention(WIDTH, 2, Window(0)),
        FeedForward(WIDTH, 24, torch.nn.Dropout(0.0)),
        torch.nn.Dropout(0.0),
        memory=Memory(WIDTH, WIDTH),
        memory_interleave=True,
    )
    network, seen = SegmentNetwork([layer], TOKENS).double(), []
    layer.feed_forward.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    padding_mask = torch.zeros(STREAMS, TOKENS, dtype=torch.bool)
    padding_mask[0, -3:] = True
    y, _ = network(draw(), padding_mask=padding_mask)
    ((x, mapped),) = seen
    x = layer.final_layer_norm(x + mapped)
    torch.testing.assert_close(y, layer.memory_layer_norm(x + layer.memory(x, padding_mask)))


@each_network
@pytest.mark.parametrize("training", [True, False])
def test_a_network_refuses_the_past_of_another_network(name, training):
    network, x = build(name).train(training), draw()
    with torch.set_grad_enabled(training):
        _, past = network(x)
        part = past.map_layers(lambda layer: layer.map_tensors(lambda each: each[..., :-1]))
        with pytest.raises(ValueError, match="`past` has widths"):
            network(x, part)
        other = {"layers": past.layers * 2}, {"kind": "another.network"}
        for change in other:
            with pytest.raises(ValueError, match=r"`past` comes from \d layers of .* has \d of"):
                network(x, replace(past, **change))


@each_network
def test_a_network_refuses_other_streams_or_shapes(name):
    network = build(name)
    _, past = network(draw())
    for shape, message in (
        ((3, 4, WIDTH), "`past` has 2 streams and `x` has 3"),
        ((2, 0, WIDTH), r"`x` is \(2, 0, 16\): give a segment"),
        ((2, WIDTH), r"`x` is \(2, 16\): give a segment"),
    ):
        with pytest.raises(ValueError, match=message):
            network(torch.zeros(shape, dtype=torch.float64), past)
