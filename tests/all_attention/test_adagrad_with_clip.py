"""adagrad_with_clip against its formula in plain float64 loops, and its use by fairseq."""

import math

import pytest
import torch
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf
from torch import nn

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip
from fairseq_plugins.all_attention.optimizer import FairseqAdagradWithClip

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
# the first tensor's gradients have norms of about 3.5, the last one's of about 0.005
SCALES = [1.0, 0.1, 0.01, 0.002]
STEPS = 5


def weights(dtype):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def gradients(dtype):
    """Draw a gradient of each parameter for each step."""
    scaled = list(zip(SHAPES, SCALES, strict=True))
    return [
        [scale * torch.randn(shape, dtype=dtype) for shape, scale in scaled] for _ in range(STEPS)
    ]


def reference(param, grads, lr, clip, weight_decay):
    """Compute a tensor's weights and sums after each of ``grads``, one number at a time."""
    w = param.double().flatten().tolist()
    sums = [0.0] * len(w)
    after = []
    for grad in grads:
        g = [x + weight_decay * y for x, y in zip(grad.double().flatten().tolist(), w, strict=True)]
        norm = math.sqrt(math.fsum(x * x for x in g))
        factor = min(1.0, clip / (norm + 1e-10)) if clip > 0 else 1.0
        for i, x in enumerate(g):
            sums[i] += x * x
            w[i] -= lr * factor * x / (math.sqrt(sums[i]) + 1e-10)
        shaped = [torch.tensor(v, dtype=torch.float64).view(param.shape) for v in (w, sums)]
        after.append(shaped)
    return after


# learning rate, clip and weight decay of each tensor: the same for all, or set by group
ALL = [[(0.07, clip, decay)] * 4 for clip, decay in ((0.03, 0.0), (0.0, 0.1))]
GROUPS = [(0.07, 0.03, 0.0), (0.5, 0.0, 0.2), (0.0, 0.03, 0.0), (0.01, 0.001, 0.1)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("options", [*ALL, GROUPS])
def test_an_update_equals_the_formula(dtype, tolerance, options):
    params, steps = weights(dtype), gradients(dtype)
    expected = [
        reference(p.detach(), grads, *chosen)
        for p, grads, chosen in zip(params, zip(*steps, strict=True), options, strict=True)
    ]
    optimizer = AdagradWithClip(params, *options[0])
    if options is GROUPS:
        names = ("params", "lr", "clip", "weight_decay")
        pairs = zip(params, options, strict=True)
        groups = [dict(zip(names, ([p], *chosen), strict=True)) for p, chosen in pairs]
        optimizer = AdagradWithClip(groups, lr=1.0)
    for step, grads in enumerate(steps):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        for p, after in zip(params, expected, strict=True):
            actual = [p.detach().double(), optimizer.state[p]["sum"].double()]
            torch.testing.assert_close(actual, after[step], rtol=tolerance, atol=tolerance)


def test_fairseq_builds_the_optimizer_and_resumes_it():
    cfg = OmegaConf.create({"_name": "adagrad_with_clip", "lr": [0.07]})
    optimizer = build_optimizer(cfg, weights(torch.float32))
    assert isinstance(optimizer, FairseqAdagradWithClip)
    assert not optimizer.supports_flat_params
    assert not optimizer.supports_memory_efficient_fp16

    def group():
        return [optimizer.param_groups[0][name] for name in ("lr", "clip", "weight_decay")]

    assert group() == [0.07, 0.03, 0.0]
    alone = AdagradWithClip(weights(torch.float32), lr=0.07)
    assert alone.defaults == {"lr": 0.07, "clip": 0.03, "weight_decay": 0.0}
    # clip and weight decay come from the command line, not from the checkpoint
    saved = AdagradWithClip(weights(torch.float32), lr=0.007, clip=0.5, weight_decay=0.2)
    optimizer.load_state_dict(saved.state_dict())
    assert group() == [0.007, 0.03, 0.0]
    optimizer.load_state_dict(saved.state_dict(), {"clip": 0.1})
    assert group() == [0.007, 0.1, 0.0]
