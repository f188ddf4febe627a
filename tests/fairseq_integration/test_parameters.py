"""Parameters with a precision, an update rule or a constraint of their own."""

import functools

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import (
    AMPOptimizer,
    FairseqBMUF,
    FairseqOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
    build_optimizer,
)
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf
from torch import nn

from fairseq_plugins.fairseq_integration.parameters import (
    OwnRulesStep,
    adam_options,
    apply_constraints,
)


@pytest.fixture(autouse=True)
def fairseq_without_a_gpu(monkeypatch):
    """Let fairseq's flat copies and torch's gradient scaler work on a CPU."""
    # fairseq stores a flat copy by the GPU's index, and looks it up by a parameter's device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(
        torch.cuda.amp, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu")
    )


def configuration(name, **common):
    """Return fairseq's options for an optimizer."""
    cfg = OmegaConf.structured(FairseqConfig())
    adam = {"adam_betas": "(0.9, 0.98)", "tpu": False} if name == "adam" else {}
    cfg.optimizer = {"_name": name, "lr": [0.3], **adam}
    cfg.common.update(common)
    return cfg


def test_adam_options_are_torchs():
    cfg = OmegaConf.structured(FairseqAdamConfig)
    expected = {"lr": 0.5, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.1}
    for betas in ("(0.9, 0.98)", "[0.9, 0.98]", (0.9, 0.98)):
        cfg.update({"lr": [0.5, 0.1], "adam_betas": betas, "adam_eps": 1e-9, "weight_decay": 0.1})
        assert adam_options(cfg) == expected


class Descent(OwnRulesStep, FairseqOptimizer):
    def __init__(self, cfg, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.SGD(params, lr=1.0)


@pytest.mark.parametrize(
    ("gradient", "clip", "expected"),
    [
        ([3.0, 4.0], 0.0, [-2.0, -3.0]),
        # the norm is 5
        ([3.0, 4.0], 1.0, [0.4, 0.2]),
        ([3.0, float("inf")], 0.0, [1.0, 1.0]),
        ([3.0, float("nan")], 1.0, [1.0, 1.0]),
    ],
)
def test_amp_unscales_gradients_once_and_skips_infinite_ones(gradient, clip, expected):
    weight = nn.Parameter(torch.ones(2))
    optimizer = AMPOptimizer(
        configuration("adam", amp=True, fp16_init_scale=128), [weight], Descent(None, [weight])
    )
    assert optimizer.scaler.get_scale() == 128
    optimizer.backward((weight * torch.tensor(gradient)).sum())
    optimizer.clip_grad_norm(clip)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


class Bounded(nn.Module):
    """Values in [0, 1], and shares: rounding them after they are normalized gives others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.value = nn.Parameter(torch.rand(4))
        self.share = nn.Parameter(torch.full((2, 3), 1 / 3))

    def constrained(self):
        yield self.value, lambda values: values.clamp_(0, 1)
        yield self.share, divide_up


def divide_up(shares):
    shares.clamp_(min=0.01)
    shares.div_(shares.sum(dim=1, keepdim=True))


WRAPPERS = {"in place": MemoryEfficientFP16Optimizer, "amp": AMPOptimizer}
PRECISIONS = [
    ("plain", "adagrad_with_clip", torch.float32),
    ("plain", "adam", torch.float32),
    ("one by one", "adagrad_with_clip", torch.float16),
    ("one by one", "adam", torch.bfloat16),
    ("flat", "adam", torch.float16),
    ("in place", "adam", torch.bfloat16),
    ("amp", "adagrad_with_clip", torch.float32),
]


def build(precision, name, dtype):
    """Return a model, fairseq's optimizer, the trained parameters and the optimizer's copies.

    The second bounded module stays in single precision; the first is frozen out of bounds.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), Bounded(), Bounded()).to(dtype)
    model[2].float()
    model[1].value.requires_grad_(False).fill_(2.0)
    params = [p for p in model.parameters() if p.requires_grad]
    cfg = configuration(name, bf16=dtype is torch.bfloat16)
    cfg.common.fp16_no_flatten_grads = precision == "one by one"
    if precision == "plain":
        return model, build_optimizer(cfg.optimizer, params), params, params
    optimizer = WRAPPERS.get(precision, FP16Optimizer).build_optimizer(cfg, params)
    if precision == "flat":
        (flat_copy,) = optimizer.fp32_params.values()
        pieces = flat_copy.data.split([p.numel() for p in params])
        return model, optimizer, params, [x.view_as(p) for x, p in zip(pieces, params, strict=True)]
    masters = optimizer.fp32_params if precision == "one by one" else params
    return model, optimizer, params, masters


def learn(optimizer, params, step):
    """Compute gradients that do not depend on the weights, ready for an update."""
    generator = torch.Generator().manual_seed(step // 4)
    optimizer.zero_grad()
    # the same direction for four updates, so that values run out of bounds on either side
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
    optimizer.backward(loss)
    optimizer.multiply_grads(0.01)
    optimizer.clip_grad_norm(0.0)


@pytest.mark.parametrize(("precision", "name", "dtype"), PRECISIONS)
def test_constraints_hold_where_the_optimizer_works(precision, name, dtype):
    model, optimizer, params, masters = build(precision, name, dtype)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    unconstrained = []
    for step in range(12):
        learn(optimizer, params, step)
        optimizer.step()
        free = [master.detach().clone() for master in masters]
        apply_constraints(optimizer, model)
        for name, weight, master, expected in zip(names, params, masters, free, strict=True):
            if name.endswith("value"):
                unconstrained += expected.tolist()
                expected.clamp_(0, 1)
            elif name.endswith("share"):
                divide_up(expected)
            assert torch.equal(master, expected), name
            assert torch.equal(weight, master.to(weight.dtype)), name
    # the frozen parameter stays, and does not hide the others
    assert model[1].value.tolist() == [2.0] * 4
    assert min(unconstrained) < 0
    assert max(unconstrained) > 1


def test_an_optimizer_with_other_weights_is_refused():
    # without constraints, the optimizer is not inspected
    apply_constraints(object(), nn.Linear(2, 3))
    model, optimizer, *_ = build("plain", "adam", torch.float32)
    wrapper = FairseqBMUF(OmegaConf.structured(FairseqConfig()).bmuf, optimizer)
    with pytest.raises(ValueError, match=r"^FairseqBMUF keeps .* of Bounded .*--use-bmuf"):
        apply_constraints(wrapper, model)
    model[2].value = nn.Parameter(torch.rand(5))
    with pytest.raises(ValueError, match=r"^FairseqAdam .* of Bounded, .*\(5,\).*--ddp-backend"):
        apply_constraints(optimizer, model)
