"""The first layers of the variant as-written: products, precision, and dropout that stays."""

import pytest
import torch

from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward, FirstLayers
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from tests.gradients import assert_same

WIDTH, INNER, BRANCHES, TOKENS = 6, 12, 3, 5


def first_layers(dtype=torch.double):
    torch.manual_seed(1)
    layer = FirstLayers(WIDTH, INNER, BranchWeights(BRANCHES, "kappa")).to(dtype)
    torch.nn.init.normal_(layer.out_bias)
    return layer


def one_by_one(layer, heads):
    """Compute κ_i (head_i W^{O_i} + b^O/S) W_1^i + b_1^i of one branch after the other."""
    kappa, results = layer.weights(), []
    for i in range(BRANCHES):
        columns = slice(2 * i, 2 * i + 2)
        z = kappa[i] * (heads[:, columns] @ layer.out_weight[:, columns].T + layer.out_bias / 3)
        rows = slice(4 * i, 4 * i + 4)
        results.append(z @ layer.weight[rows].T + layer.bias[rows])
    return torch.cat(results, dim=1)


def test_first_layers_equal_those_of_single_branches():
    layer = first_layers()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.double)
    for heads in (x.requires_grad_(), x.detach().mT.contiguous().mT.requires_grad_()):
        inputs = [heads, *layer.parameters()]
        assert_same(layer(heads), one_by_one(layer, heads), inputs)


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


def test_first_layers_have_second_derivatives():
    layer = first_layers()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_first_layers_refuse_widths_that_branches_cannot_share():
    with pytest.raises(ValueError, match=r"^`ffn_dim` is 22: it must be a multiple of .* 4$"):
        FirstLayers(12, 22, BranchWeights(4))
