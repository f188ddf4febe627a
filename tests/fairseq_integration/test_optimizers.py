"""What optimizers share: options of Adam, a step under --amp, and rules that follow parameters."""

import functools
from dataclasses import dataclass

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import (
    AMPOptimizer,
    FairseqOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
)
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf
from torch import nn

from fairseq_plugins.fairseq_integration.parameters import (
    AmpScaledStep,
    UpdateRule,
    adam_options,
    set_update_rule,
    update_rule,
)


@dataclass
class Schedule(UpdateRule):
    """A rule with a number."""

    warmup: int = 5


class Link(UpdateRule):
    """A rule of another kind."""


def configuration(**common):
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = {"_name": "adam", "lr": [0.5], "adam_betas": "(0.9, 0.98)", "tpu": False}
    cfg.common.update(common)
    return cfg


def test_a_rule_is_read_by_its_kind():
    ruled, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    rule = Schedule()
    set_update_rule(ruled, rule)
    assert update_rule(ruled, Schedule) is update_rule(ruled, UpdateRule) is rule
    assert update_rule(ruled, Link) is None
    assert update_rule(other, Schedule) is None
    # fairseq's own use of the attribute, names of groups, is no rule
    other.param_group = "default"
    assert update_rule(other, UpdateRule) is None


@pytest.mark.parametrize(
    ("wrapper", "common"),
    [
        (FP16Optimizer, {"fp16": True, "fp16_no_flatten_grads": True}),
        (FP16Optimizer, {"bf16": True, "fp16_no_flatten_grads": True}),
        (MemoryEfficientFP16Optimizer, {"bf16": True}),
    ],
)
def test_fairseq_hands_a_rule_on_to_the_copies_that_it_updates(wrapper, common):
    dtype = torch.bfloat16 if "bf16" in common else torch.float16
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(3)]
    rules = [Schedule(1), None, Link()]
    for param, rule in zip(params, rules, strict=True):
        if rule is not None:
            set_update_rule(param, rule)
    optimizer = wrapper.build_optimizer(configuration(**common), params)
    updated = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    assert [update_rule(p, UpdateRule) for p in updated] == rules
    if wrapper is FP16Optimizer:
        assert {p.dtype for p in updated} == {torch.float32}


@pytest.mark.parametrize("betas", ["(0.9, 0.98)", "0.9,0.98", "[0.9, 0.98]", (0.9, 0.98)])
def test_options_of_adam_are_those_that_torch_takes(betas):
    cfg = OmegaConf.structured(FairseqAdamConfig)
    cfg.update({"lr": [0.5, 0.1], "adam_betas": betas, "adam_eps": 1e-9, "weight_decay": 0.1})
    options = adam_options(cfg)
    assert options == {"lr": 0.5, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.1}
    torch.optim.Adam([torch.ones(1)], **options)


class Descent(AmpScaledStep, FairseqOptimizer):
    """Gradient descent, through fairseq's interface."""

    def __init__(self, cfg, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.SGD(params, lr=1.0)


@pytest.mark.parametrize(
    ("gradient", "clip", "expected"),
    [
        ([3.0, 4.0], 0.0, [-2.0, -3.0]),
        # of norm 5
        ([3.0, 4.0], 1.0, [0.4, 0.2]),
        ([3.0, float("inf")], 0.0, [1.0, 1.0]),
        ([3.0, float("nan")], 1.0, [1.0, 1.0]),
    ],
)
def test_under_amp_gradients_are_unscaled_once_and_skipped_if_not_finite(
    monkeypatch, gradient, clip, expected
):
    # torch's scaler for CPUs scales as the one for GPUs does, which is idle without a GPU
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", scaler)
    weight = nn.Parameter(torch.ones(2))
    optimizer = AMPOptimizer(
        configuration(amp=True, fp16_init_scale=128), [weight], Descent(None, [weight])
    )
    assert optimizer.scaler.get_scale() == 128
    optimizer.backward((weight * torch.tensor(gradient)).sum())
    optimizer.clip_grad_norm(clip)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


def test_without_amp_the_step_is_the_optimizers():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Descent(None, [weight])
    optimizer.backward(weight.sum())
    optimizer.step()
    assert weight.tolist() == [0, 0]
