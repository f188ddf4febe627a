"""The network and the block of Transformer-XL against the equations of section 3."""

import pytest

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
    # 4 projections, W_kR, feed-forward sublayer, two norms; u and v
    layer = 5 * 16 * 16 + 2 * 16 * 24 + 24 + 16 + 4 * 16
    assert sum(p.numel() for p in network.parameters()) == 3 * layer + 2 * 16
