"""The branches of the variant as-written: half precision, activation."""

import pytest
import torch

from fairseq_plugins.modules import WeightedDecoderLayer, WeightedEncoderLayer
from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights

WIDTH, INNER, BRANCHES, TOKENS = 6, 12, 3, 5


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float, True)]
)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_half_precision_follows_inputs_or_autocast(dtype, autocast, tokens):
    layer = BranchedFeedForward(WIDTH, INNER, *(BranchWeights(BRANCHES) for _ in range(2)))
    x = torch.randn(tokens, WIDTH).to(dtype)
    expected = layer(x.float())
    layer.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, again = layer(x), layer.eval()(x)
    assert out.dtype == again.dtype == (torch.bfloat16 if autocast else dtype)
    for y in (out, again):
        torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert {p.grad.dtype for p in (layer.fc1.weight, layer.fc2.weight)} == {dtype}
    assert {w.dtype for w in (layer.fc1.weights.alpha, layer.fc2.weights.alpha)} == {torch.float}


def test_branches_have_their_layers_activation():
    """A decoder layer's, too, whose parts are built for each attention."""
    for kind in (WeightedEncoderLayer, WeightedDecoderLayer):
        layer = kind(8, 2, 12, variant="as-written", activation=torch.square)
        (network,) = (m for m in layer.modules() if isinstance(m, BranchedFeedForward))
        heads = torch.randn(5, 8)
        torch.testing.assert_close(network(heads), network.fc2(network.fc1(heads) ** 2))
