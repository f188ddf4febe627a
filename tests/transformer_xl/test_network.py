"""The network and the block of Transformer-XL against the equations of section 3."""

import pytest
import torch

from fairseq_plugins.transformer_xl.network import TransformerXL
from tests.reference import transformer_xl as reference
from tests.segment_language_model.equations import assert_equals_the_equations
from tests.segment_language_model.networks import build


@pytest.mark.parametrize("kernel", ["fast", "plain"])
@pytest.mark.parametrize("name", ["TransformerXL", "TransformerXLBlock"])
def test_networks_equal_the_equations(name, kernel):
    assert_equals_the_equations(build(name, kernel=kernel), reference.run_segment)


def test_all_layers_share_u_and_v():
    network = TransformerXL(3, 16, 2, 24, 8)
    assert len({id(layer.self_attn.biases) for layer in network.layers}) == 1
    # 4 projections, W_kR, feed-forward sublayer, two norms; u and v
    layer = 5 * 16 * 16 + 2 * 16 * 24 + 24 + 16 + 4 * 16
    assert sum(p.numel() for p in network.parameters()) == 3 * layer + 2 * 16


def test_dropout_acts_in_training_only():
    network = build("TransformerXL", dropout=0.5)
    x = torch.ones(1, 4, 16, dtype=torch.float64)
    dropped = []
    for layer in network.layers:
        for module in (layer.dropout, layer.feed_forward.dropout):
            module.register_forward_hook(lambda _, args, out: dropped.append((out == 0).any()))
    assert not torch.equal(network(x)[0], network(x)[0])
    assert len(dropped) == 2 * 3 * 3
    assert torch.equal(network.eval()(x)[0], build("TransformerXL")(x)[0])
