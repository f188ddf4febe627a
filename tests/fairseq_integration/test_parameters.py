"""Parameters with a precision, an update rule or a constraint of their own."""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import LegacyDistributedDataParallel, ModuleProxyWrapper
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
    Float32Module,
    OwnRulesStep,
    UpdateRule,
    adam_options,
    apply_constraints,
    set_update_rule,
    update_rule,
)
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.tiny import dictionary


@pytest.fixture(autouse=True)
def fairseq_without_a_gpu(monkeypatch):
    """Let fairseq's flat copies and torch's gradient scaler work on a CPU."""
    # fairseq files a flat copy under the GPU's index, and looks for that of a parameter's device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(
        torch.cuda.amp, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu")
    )


def configuration(name, **common):
    """fairseq's options for an optimizer."""
    cfg = OmegaConf.structured(FairseqConfig())
    cfg.optimizer = {"_name": name, "lr": [0.3]}
    if name == "adam":
        cfg.optimizer = {"_name": name, "lr": [0.3], "adam_betas": "(0.9, 0.98)", "tpu": False}
    cfg.common.update(common)
    return cfg


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


@dataclass
class Schedule(UpdateRule):
    """A rule with a number."""

    warmup: int = 5


class Link(UpdateRule):
    """A rule of another kind."""


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
        (MemoryEfficientFP16Optimizer, {"fp16": True}),
    ],
)
def test_fairseq_hands_a_rule_on_to_the_copies_that_it_updates(wrapper, common):
    params = [nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    rule = Schedule(1)
    set_update_rule(params[0], rule)
    optimizer = wrapper.build_optimizer(configuration("adam", **common), params)
    updated = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    assert [update_rule(p, UpdateRule) for p in updated] == [rule, None]


@pytest.mark.parametrize("betas", ["(0.9, 0.98)", "0.9,0.98", "[0.9, 0.98]", (0.9, 0.98)])
def test_options_of_adam_are_those_that_torch_takes(betas):
    cfg = OmegaConf.structured(FairseqAdamConfig)
    cfg.update({"lr": [0.5, 0.1], "adam_betas": betas, "adam_eps": 1e-9, "weight_decay": 0.1})
    options = adam_options(cfg)
    assert options == {"lr": 0.5, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.1}
    torch.optim.Adam([torch.ones(1)], **options)


class Descent(OwnRulesStep, FairseqOptimizer):
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
def test_under_amp_gradients_are_unscaled_once_and_skipped_if_not_finite(gradient, clip, expected):
    weight = nn.Parameter(torch.ones(2))
    optimizer = AMPOptimizer(
        configuration("adam", amp=True, fp16_init_scale=128), [weight], Descent(None, [weight])
    )
    assert optimizer.scaler.get_scale() == 128
    optimizer.backward((weight * torch.tensor(gradient)).sum())
    optimizer.clip_grad_norm(clip)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor(expected))


STEPS = 12


class Bounded(nn.Module):
    """A weight that is free, and values in [0, 1]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.value = nn.Parameter(torch.rand(4))

    def constrained(self):
        yield self.value, lambda values: values.clamp_(0, 1)


class Shares(nn.Module):
    """Shares that sum to 1; rounding the shares is not the same as sharing what was rounded."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.full((2, 3), 1 / 3))

    def constrained(self):
        yield self.share, divide_up


def divide_up(shares):
    shares.clamp_(min=0.01)
    shares.div_(shares.sum(dim=1, keepdim=True))


WRAPPERS = {
    "flat": FP16Optimizer,
    "one by one": FP16Optimizer,
    "in place": MemoryEfficientFP16Optimizer,
    "amp": AMPOptimizer,
}
PRECISIONS = [
    ("plain", "adagrad_with_clip", torch.float32),
    ("plain", "adam", torch.float32),
    ("one by one", "adagrad_with_clip", torch.float16),
    ("one by one", "adam", torch.bfloat16),
    ("flat", "adam", torch.float16),
    ("in place", "adam", torch.bfloat16),
    ("amp", "adagrad_with_clip", torch.float32),
]


def build(precision, name, dtype, frozen=False):
    """A model, fairseq's optimizer, the parameters it trains and the optimizer's copy of each.

    The second bounded module stays in single precision; the first may be frozen, out of bounds.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), Bounded(), Shares(), Bounded(), nn.Linear(3, 1))
    model.to(dtype)
    model[3].float()
    if frozen:
        model[1].value.requires_grad_(False).fill_(2.0)
    params = [p for p in model.parameters() if p.requires_grad]
    cfg = configuration(name, bf16=dtype is torch.bfloat16)
    cfg.common.fp16_no_flatten_grads = precision == "one by one"
    if precision == "plain":
        return model, build_optimizer(cfg.optimizer, params), params, params
    optimizer = WRAPPERS[precision].build_optimizer(cfg, params)
    if precision == "flat":
        (copy_of_all,) = optimizer.fp32_params.values()
        pieces = copy_of_all.data.split([p.numel() for p in params])
        return model, optimizer, params, [x.view_as(p) for x, p in zip(pieces, params, strict=True)]
    masters = optimizer.fp32_params if precision == "one by one" else params
    return model, optimizer, params, masters


@pytest.fixture(scope="module")
def task():
    return SegmentLanguageModelingTask(SegmentLanguageModelingConfig(), dictionary())


def update(task, model, optimizer, params, step):
    """Make an update with gradients that do not depend on the weights."""
    generator = torch.Generator().manual_seed(step // 4)
    optimizer.zero_grad()
    # the same direction for four updates, so that values run out of bounds on either side
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
    optimizer.backward(loss)
    optimizer.multiply_grads(0.01)
    optimizer.clip_grad_norm(0.0)
    task.optimizer_step(optimizer, model, step)


def copies(params, masters):
    return [[t.detach().clone() for t in tensors] for tensors in (params, masters)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("precision", "name", "dtype"), PRECISIONS)
def test_constraints_hold_where_the_optimizer_works(
    monkeypatch, task, precision, name, dtype, frozen
):
    histories = {}
    for constrained in (True, False):
        with monkeypatch.context() as patch:
            if not constrained:
                patch.delattr(Bounded, "constrained")
                patch.delattr(Shares, "constrained")
            model, optimizer, params, masters = build(precision, name, dtype, frozen)
            history = [copies(params, masters)]
            for step in range(STEPS):
                update(task, model, optimizer, params, step)
                history.append(copies(params, masters))
            histories[constrained] = history
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            # what is frozen stays, and the others are found beside it
            assert not frozen or model[1].value.tolist() == [2.0] * 4
    bounded = [i for i, name in enumerate(names) if name.endswith("value")]
    shares = names.index("2.share")
    for step in range(1, STEPS + 1):
        (_, before), (in_model, held) = histories[True][step - 1 : step + 1]
        (_, free_before), (free_model, free) = histories[False][step - 1 : step + 1]
        for i, (weight, master) in enumerate(zip(in_model, held, strict=True)):
            assert torch.equal(weight, master.to(weight.dtype)), names[i]
            if i in bounded or i == shares:
                # the update is the one without a constraint, and what it leads to is projected
                expected = before[i] + (free[i] - free_before[i])
                expected.clamp_(0, 1) if i in bounded else divide_up(expected)
                exact = {"rtol": 0, "atol": 1e-5}
                rounded = {"rtol": 0, "atol": 0.02}
                tolerance = exact if master.dtype is torch.float32 else rounded
                torch.testing.assert_close(master, expected, **tolerance)
            else:
                assert torch.equal(weight, free_model[i]), names[i]
                assert torch.equal(master, free[i]), names[i]
        for i in bounded:
            for values in (in_model[i], held[i]):
                assert ((values >= 0) & (values <= 1)).all()
    # without a constraint the same gradients lead out of bounds, both ways
    for i in bounded if not frozen else ():
        free = torch.stack([after[1][i] for after in histories[False]])
        assert free.min() < 0
        assert free.max() > 1


@pytest.mark.parametrize(
    ("precision", "dtype"), [("one by one", torch.bfloat16), ("flat", torch.float16)]
)
def test_a_parameter_frozen_in_training_stays_beside_the_others(task, precision, dtype):
    """Though Adam's momentum moves the optimizer's copy of it; a flat copy keeps its layout."""
    model, optimizer, params, masters = build(precision, "adam", dtype)
    update(task, model, optimizer, params, 0)
    frozen = model[2].share.requires_grad_(False)
    before = frozen.detach().clone()
    for step in range(1, STEPS):
        update(task, model, optimizer, [p for p in params if p.requires_grad], step)
        for parameter, master in zip(params, masters, strict=True):
            same = torch.equal(parameter, master.to(parameter.dtype))
            assert same or (parameter is frozen and precision == "one by one")
        for bounded in (model[1].value, model[3].value):
            assert ((bounded >= 0) & (bounded <= 1)).all()
    assert precision == "flat" or torch.equal(frozen, before)


def test_the_model_may_be_wrapped_for_several_workers(task):
    model, optimizer, params, _ = build("one by one", "adam", torch.bfloat16)
    wrapped = ModuleProxyWrapper(LegacyDistributedDataParallel(model, process_group=None))
    for step in range(STEPS):
        update(task, wrapped, optimizer, params, step)
        assert ((model[1].value >= 0) & (model[1].value <= 1)).all()


def test_without_constraints_the_optimizer_is_not_looked_into():
    apply_constraints(object(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))


def test_a_wrapper_that_keeps_weights_of_its_own_is_refused(task):
    model, optimizer, params, _ = build("plain", "adam", torch.float32)
    wrapper = FairseqBMUF(OmegaConf.structured(FairseqConfig()).bmuf, optimizer)
    with pytest.raises(ValueError, match=r"^FairseqBMUF keeps .* of Bounded .*--use-bmuf"):
        update(task, model, wrapper, params, 0)


def test_a_parameter_that_the_optimizer_does_not_have_is_refused(task):
    model, optimizer, params, _ = build("plain", "adam", torch.float32)
    model[1].value = nn.Parameter(torch.rand(5))
    with pytest.raises(ValueError, match=r"^FairseqAdam .* of Bounded, .*\(5,\).*--ddp-backend"):
        update(task, model, optimizer, params, 0)
