"""The network and the block of Transformer-XL against the equations of section 3."""

import pytest
import torch

from fairseq_plugins.transformer_xl.network import (
    TransformerXL,
    TransformerXLBlock,
    TransformerXLSettings,
)
from tests.reference import transformer_xl as reference
from tests.segment_language_model.equations import assert_equals_the_equations
from tests.segment_language_model.networks import build, draw


@pytest.mark.parametrize("kernel", ["fast", "sdpa", "plain"])
@pytest.mark.parametrize("name", ["TransformerXL", "TransformerXLBlock"])
def test_networks_equal_the_equations(name, kernel):
    assert_equals_the_equations(build(name, kernel=kernel), reference.run_segment)


def test_all_layers_share_u_and_v():
    network = TransformerXL(3, 16, 2, 24, 8)
    # 4 projections, W_kR, feed-forward sublayer, two norms; u and v
    layer = 5 * 16 * 16 + 2 * 16 * 24 + 24 + 16 + 4 * 16
    assert sum(p.numel() for p in network.parameters()) == 3 * layer + 2 * 16


def test_weights_that_repeat_u_and_v_in_each_layer_load():
    network, fresh = build("TransformerXL"), TransformerXL(3, 16, 2, 24, 12).double()
    weights = network.state_dict()
    for name in ("u", "v"):
        first, *others = (f"layers.{number}.self_attn.biases.{name}" for number in range(3))
        weights |= dict.fromkeys(others, weights[first])
    fresh.load_state_dict(weights)
    assert torch.equal(fresh(draw())[0], network(draw())[0])
    # each layer has its own
    weights["layers.2.self_attn.biases.v"] = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*: \"layers.2.self_attn.biases.v\""):
        fresh.load_state_dict(weights)


def test_weights_begin_as_in_the_published_code():
    torch.manual_seed(1)
    network = TransformerXL(4, 128, 4, 256, 8)
    for name, parameter in network.named_parameters():
        mean = 1.0 if "norm.weight" in name else 0.0
        std = 0.0 if name.endswith("bias") else 0.02
        # vectors have only 128 numbers
        assert parameter.mean().item() == pytest.approx(mean, abs=0.008), name
        assert parameter.std().item() == pytest.approx(std, abs=0.004), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"positions": "rotary"}, "`positions` is 'rotary': there are transformer-xl, shaw"),
        ({"positions": "shaw"}, "`segment` is None: positions 'shaw'"),
    ],
)
def test_impossible_positions_are_refused(options, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        TransformerXL(2, 16, 2, 24, 8, settings=TransformerXLSettings(**options))


@pytest.mark.parametrize("part", ["sublayers", "inner"])
def test_dropout_acts_on_sublayers_and_inner_activations(part):
    block = TransformerXLBlock(16, 2, 24, 8, dropout=0.5).double()
    (layer,) = block.layers
    other = layer.feed_forward.dropout if part == "sublayers" else layer.dropout
    other.p = 0.0
    assert not torch.allclose(block(draw())[0], block(draw())[0])
    assert torch.equal(block.eval()(draw())[0], block(draw())[0])
