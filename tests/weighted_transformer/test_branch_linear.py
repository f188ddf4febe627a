"""First layers of all branches: the sum that defines them, layouts and precision."""

import pytest
import torch

from fairseq_plugins.weighted_transformer.as_written_attention import branch_linear
from tests.gradients import assert_same

TOKENS, BRANCHES, HEAD, INNER = 5, 3, 2, 4


def draw(dtype=torch.double):
    torch.manual_seed(1)
    shapes = (TOKENS, BRANCHES * HEAD), (BRANCHES, HEAD, INNER), (BRANCHES, INNER)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def one_by_one(x, weight, bias):
    parts = x.split(HEAD, dim=1)
    return torch.cat([parts[i] @ weight[i] + bias[i] for i in range(BRANCHES)], dim=1)


def test_each_branch_has_a_layer_of_its_own():
    inputs = draw()
    assert_same(branch_linear(*inputs), one_by_one(*inputs), inputs)


def test_any_strides_of_inputs_and_gradients_will_do():
    x, weight, bias = (t.detach() for t in draw())
    inputs = [
        x.T.contiguous().T.requires_grad_(),
        weight.mT.contiguous().mT.requires_grad_(),
        bias.requires_grad_(),
    ]
    # a sum's gradient has strides of 0, a transposed tensor's is not contiguous
    for end in (torch.Tensor.sum, lambda out: out.T.contiguous().cos().sum()):
        out, expected = end(branch_linear(*inputs)), end(one_by_one(*inputs))
        assert_same(out, expected, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    inputs = draw(dtype)
    out = branch_linear(*inputs)
    assert out.dtype == dtype
    torch.testing.assert_close(out, one_by_one(*inputs), rtol=0.02, atol=0.02)
    out.sum().backward()
    assert {x.grad.dtype for x in inputs} == {dtype}


def test_under_autocast_the_product_is_of_its_dtype_and_gradients_of_the_inputs():
    inputs = draw(torch.float)
    with torch.autocast("cpu", torch.bfloat16):
        out = branch_linear(*inputs)
        expected = one_by_one(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=0.02, atol=0.02)
    out.float().sum().backward()
    assert {x.grad.dtype for x in inputs} == {torch.float}


def test_gradients_of_gradients_are_refused():
    inputs = draw()
    out = branch_linear(*inputs).square().sum()
    for grad in torch.autograd.grad(out, inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward(retain_graph=True)
