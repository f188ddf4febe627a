"""adagrad_with_clip against its formula in plain float64 loops, and what fairseq asks of it."""

import copy
import functools
import math

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import AMPOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer, build_optimizer
from omegaconf import OmegaConf
from torch import nn

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip, FairseqAdagradWithClip

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
# the first tensor's gradients have norms of about 3.5, the last one's of about 0.005
SCALES = [1.0, 0.1, 0.01, 0.002]
STEPS = 5


def weights(dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype))
        for s in SHAPES
    ]


def gradients(dtype, seed=2):
    """For each step, a gradient of each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape, scale in zip(SHAPES, SCALES, strict=True)
        ]
        for _ in range(STEPS)
    ]


def set_gradients(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()


def reference(param, grads, lr, clip, weight_decay):
    """A tensor's weights and sums after each of ``grads``, one number at a time."""
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


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, {"rtol": 1e-12, "atol": 1e-12}),
        (torch.float32, {"rtol": 1e-5, "atol": 1e-6}),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 0.03])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_update_is_that_of_the_formula(dtype, tolerance, clip, weight_decay):
    params, steps = weights(dtype), gradients(dtype)
    expected = [
        reference(p.detach(), grads, 0.07, clip, weight_decay)
        for p, grads in zip(params, zip(*steps, strict=True), strict=True)
    ]
    optimizer = AdagradWithClip(params, lr=0.07, clip=clip, weight_decay=weight_decay)
    for step, grads in enumerate(steps):
        set_gradients(params, grads)
        optimizer.step()
        for p, after in zip(params, expected, strict=True):
            weight, total = after[step]
            torch.testing.assert_close(p.detach().double(), weight, **tolerance)
            torch.testing.assert_close(optimizer.state[p]["sum"].double(), total, **tolerance)


def test_each_tensor_is_clipped_by_its_own_norm():
    together, alone = weights(torch.float64), weights(torch.float64)
    one = AdagradWithClip(together, lr=0.07)
    others = [AdagradWithClip([p], lr=0.07) for p in alone]
    unclipped = weights(torch.float64)
    whole = AdagradWithClip(unclipped, lr=0.07, clip=0)
    for grads in gradients(torch.float64):
        for params in (together, alone, unclipped):
            set_gradients(params, grads)
        for optimizer in (one, whole, *others):
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        assert torch.equal(p, q)
    # gradients shorter than the clip step as if there were none, whatever their neighbours do
    assert torch.equal(together[3], unclipped[3])
    assert not torch.isclose(together[0], unclipped[0]).any()


def test_groups_have_rates_clips_and_decays_of_their_own():
    params, steps = weights(torch.float64), gradients(torch.float64)
    options = [(0.07, 0.03, 0.0), (0.5, 0.0, 0.2), (0.0, 0.03, 0.0), (0.01, 0.001, 0.1)]
    expected = [
        reference(p.detach(), grads, *chosen)[-1][0]
        for p, grads, chosen in zip(params, zip(*steps, strict=True), options, strict=True)
    ]
    groups = [
        {"params": [p], "lr": lr, "clip": clip, "weight_decay": decay}
        for p, (lr, clip, decay) in zip(params, options, strict=True)
    ]
    optimizer = AdagradWithClip(groups, lr=1.0)
    for grads in steps:
        set_gradients(params, grads)
        optimizer.step()
    for p, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), weight, rtol=1e-12, atol=1e-12)


def test_no_number_is_read_from_the_device():
    # a tensor on the meta device has no numbers: whatever asks for one fails
    params = [nn.Parameter(torch.empty(s, device="meta")) for s in SHAPES]
    for p in params:
        p.grad = torch.empty_like(p)
    AdagradWithClip(params, lr=0.07, weight_decay=0.1).step()


def test_a_saved_state_goes_on_bit_for_bit():
    straight, steps = weights(torch.float32), gradients(torch.float32)
    optimizer = AdagradWithClip(straight, lr=0.07, weight_decay=0.01)
    for step, grads in enumerate(steps):
        if step == 2:
            resumed = copy.deepcopy(straight)
            state = copy.deepcopy(optimizer.state_dict())
        set_gradients(straight, grads)
        optimizer.step()
    assert all(set(entry) == {"sum"} for entry in state["state"].values())
    other = AdagradWithClip(resumed, lr=1.0)
    other.load_state_dict(state)
    for grads in steps[2:]:
        set_gradients(resumed, grads)
        other.step()
    for p, q in zip(straight, resumed, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["sum"], other.state[q]["sum"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "`lr` is -0.1: it must be 0 or more, and finite"),
        ({"lr": 1, "clip": -0.03}, "`clip` is -0.03: it must be 0 or more, and finite"),
        (
            {"lr": 1, "weight_decay": -1.0},
            "`weight_decay` is -1.0: it must be 0 or more, and finite",
        ),
        ({"lr": math.nan}, "`lr` is nan: it must be 0 or more, and finite"),
    ],
)
def test_negative_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        AdagradWithClip(weights(torch.float32), **options)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    message = (
        r"^a parameter of shape \(4, 3\) has a sparse gradient, which AdagradWithClip cannot use: "
        r"take dense embeddings \(sparse=False\), or Adagrad$"
    )
    with pytest.raises(ValueError, match=message):
        AdagradWithClip(table.parameters(), lr=0.07).step()


def configuration(**common):
    """fairseq's options with this optimizer, as its command line would make them."""
    cfg = OmegaConf.structured(FairseqConfig())
    for name, value in common.items():
        cfg.common[name] = value
    cfg.optimization.lr = [0.07]
    cfg.optimizer = {"_name": "adagrad_with_clip", "lr": [0.07]}
    return cfg


def test_fairseq_builds_it_by_name_with_the_published_clip():
    optimizer = build_optimizer(configuration().optimizer, weights(torch.float32))
    assert isinstance(optimizer, FairseqAdagradWithClip)
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in ("lr", "clip", "weight_decay")} == {
        "lr": 0.07,
        "clip": 0.03,
        "weight_decay": 0.0,
    }
    assert not optimizer.supports_flat_params
    assert not optimizer.supports_memory_efficient_fp16


def test_on_resuming_clip_and_decay_are_those_of_the_command_line():
    saved = AdagradWithClip(weights(torch.float32), lr=0.007, clip=0.5, weight_decay=0.2)
    optimizer = build_optimizer(configuration().optimizer, weights(torch.float32))
    optimizer.load_state_dict(saved.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["clip"], group["weight_decay"]) == (0.007, 0.03, 0.0)
    optimizer.load_state_dict(saved.state_dict(), {"clip": 0.1})
    assert optimizer.param_groups[0]["clip"] == 0.1


def test_parameters_laid_end_to_end_are_refused_with_the_remedy(monkeypatch):
    # where fairseq keeps its flat copy; on a CPU, a tensor's device has no index
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    with pytest.raises(RuntimeError, match="please set --fp16-no-flatten-grads"):
        FP16Optimizer.build_optimizer(configuration(fp16=True), weights(torch.float16))


def test_sums_in_half_precision_are_refused():
    with pytest.raises(ValueError, match="Unsupported optimizer: FairseqAdagradWithClip"):
        MemoryEfficientFP16Optimizer.build_optimizer(
            configuration(bf16=True, memory_efficient_bf16=True), weights(torch.bfloat16)
        )


def loss_with(params, grads):
    """A loss whose gradients are ``grads``."""
    return sum((p * g).sum() for p, g in zip(params, grads, strict=True))


def test_amp_clips_what_plain_training_clips(monkeypatch):
    # torch's scaler for CPUs scales as the one for GPUs does, which is idle without a GPU
    monkeypatch.setattr(
        torch.cuda.amp, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu")
    )
    params, plain, steps = weights(torch.float32), weights(torch.float32), gradients(torch.float32)
    optimizer = AMPOptimizer.build_optimizer(configuration(amp=True), params)
    assert optimizer.scaler.is_enabled()
    assert optimizer.scaler.get_scale() == 128
    expected = AdagradWithClip(plain, lr=0.07)
    for step, grads in enumerate(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_with(params, grads))
        if step == 2:  # an overflow: no parameter moves, and the scale is halved
            params[1].grad[0] = math.inf
        optimizer.clip_grad_norm(0.0)
        optimizer.step()
        if step != 2:
            set_gradients(plain, grads)
            expected.step()
        assert optimizer.scaler.get_scale() == (128 if step < 2 else 64)
        for p, q in zip(params, plain, strict=True):
            assert torch.equal(p, q)
