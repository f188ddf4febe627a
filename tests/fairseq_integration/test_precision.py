"""Modules that stay in single precision among others that are cast to a lower one."""

import copy

import pytest
import torch
from torch import nn

from fairseq_plugins.fairseq_integration.parameters import Float32Module


class Scale(Float32Module):
    """A parameter, a buffer of floating-point numbers, one of integers, and a module within."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1 / 3, 1e-30]))
        self.register_buffer("mean", torch.tensor([2 / 3, 70_000.0]))
        self.register_buffer("count", torch.tensor(3))
        self.within = nn.Linear(2, 2)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 2), Scale())


def dtypes(module):
    return {x.dtype for x in module.state_dict().values() if x.is_floating_point()}


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.to("cpu", torch.float16), torch.float16),
        (lambda model: model.half().bfloat16(), torch.bfloat16),
    ],
)
def test_half_precision_leaves_them_as_they_are(model, cast, dtype):
    before = copy.deepcopy(model[1].state_dict())
    cast(model)
    assert dtypes(model[0]) == {dtype}
    for name, now in model[1].state_dict().items():
        assert now.dtype == before[name].dtype
        assert torch.equal(now, before[name])


def test_double_precision_and_other_devices_are_as_for_any_module(model):
    assert dtypes(model.double()) == {torch.float64}
    model.half()
    assert model[1].scale.dtype == torch.float64
    model.to("meta", torch.bfloat16)
    assert {x.device.type for x in model.state_dict().values()} == {"meta"}
    assert model[1].scale.dtype == torch.float64
