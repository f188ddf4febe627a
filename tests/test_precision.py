"""Modules that stay in single precision."""

import copy

import torch
from torch import nn

from fairseq_plugins.precision import Float32Module


class Scale(Float32Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1 / 3, 1e-30]))
        self.register_buffer("mean", torch.tensor([2 / 3, 70_000.0]))
        self.register_buffer("count", torch.tensor(3))
        self.within = nn.Linear(2, 2)


def test_a_float32_module_ignores_half_precision_alone():
    model = nn.Sequential(nn.Linear(2, 2), Scale())
    before = copy.deepcopy(model[1].state_dict())
    for dtype in (torch.float16, torch.bfloat16):
        model.to(dtype)
        assert model[0].weight.dtype == dtype
        # assert_close compares dtypes, too
        torch.testing.assert_close(model[1].state_dict(), before, rtol=0, atol=0)
    model.double()
    assert {x.dtype for x in (*model.parameters(), model[1].mean)} == {torch.float64}
    model.to("meta", torch.bfloat16)
    assert {x.device.type for x in model.state_dict().values()} == {"meta"}
    assert model[1].scale.dtype == torch.float64
