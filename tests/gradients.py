"""Compare the values and gradients of two computations of the same result."""

import torch
from torch import Tensor


def assert_same(one: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    """Check that two results agree, as do the gradients of a random weighted sum for each input.

    An input that a result does not depend on has gradient 0.
    """
    torch.testing.assert_close(one, other)
    weight = torch.randn_like(one)
    gradients = [
        torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True, materialize_grads=True)
        for out in (one, other)
    ]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)
