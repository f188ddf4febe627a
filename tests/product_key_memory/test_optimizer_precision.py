"""Lazy Adam of a memory under fairseq's wrappers for half precision and scaled losses."""

import copy
import functools

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig, FairseqConfig
from fairseq.models.ema.ema import EMA
from fairseq.optim import AMPOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf

from fairseq_plugins.fairseq_integration.parameters import set_update_rule
from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import FairseqAdamWithMemory
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.product_key_memory.standalone import (
    WIDTH,
    adam_with_memory,
    dense,
    learn,
    make_memory,
    options,
)


def wrapped(memory, precision, **common):
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common.update({precision: True, "fp16_no_flatten_grads": True, **common})
    cfg.optimizer = options()
    if common.get("memory_efficient_fp16"):
        inner = FairseqAdamWithMemory(cfg.optimizer, dense(memory))
        return MemoryEfficientFP16Optimizer(cfg, dense(memory), inner)
    # what --optimizer adam_with_memory makes fairseq's command line put there
    cfg.optimizer._name = "adam_with_memory"
    return FP16Optimizer.build_optimizer(cfg, dense(memory))


@pytest.mark.parametrize(
    ("dtype", "precision", "common"),
    [
        (torch.bfloat16, "bf16", {}),
        (torch.float16, "fp16", {"fp16_init_scale": 4}),
        (torch.float16, "fp16", {"fp16_init_scale": 4, "memory_efficient_fp16": True}),
    ],
)
def test_in_half_precision_small_steps_add_up(dtype, precision, common):
    exact = make_memory()
    with torch.no_grad():
        exact.values.copy_(exact.values.to(dtype))
    half = copy.deepcopy(exact).to(dtype)
    set_update_rule(half.keys.subkeys, half.table)
    reference = adam_with_memory(exact, memory_lr=1e-5)
    optimizer = wrapped(half, precision, **common)
    optimizer.optimizer.memory_lr = 1e-5
    torch.manual_seed(2)
    rows, before = torch.tensor([1, 5, 60]), exact.values.detach().clone()
    for _ in range(30):
        grads = torch.randn(3, WIDTH).to(dtype)
        for memory, one in ((exact, reference), (half, optimizer)):
            one.zero_grad()
            loss_scale = common.get("fp16_init_scale", 1) if memory is half else 1
            scaled = (loss_scale * grads).to(memory.values.dtype)
            memory.values.grad = rows_as_gradient(rows, scaled, memory.values.shape)
            one.multiply_grads(0.5)
            one.clip_grad_norm(0.1)
            one.step()
    assert half.values.dtype == dtype
    state = half.table.state()
    # a step is less than what half precision can add to most values: the copy has their sum
    torch.testing.assert_close(state["master"], exact.values.detach(), rtol=0, atol=1e-7)
    assert (exact.values - before)[rows].abs().max() > 5e-5
    assert torch.equal(half.values, state["master"].to(dtype))
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.01])
def test_under_amp_the_values_learn_what_they_learn_without(monkeypatch, max_norm, accumulated):
    # torch's scaler for CPUs scales as the one for GPUs does, which is idle without a GPU
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", scaler)
    plain, scaled = make_memory(), make_memory()
    reference = adam_with_memory(plain, adam_eps=1e-6)
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common.update({"amp": True, "fp16_init_scale": 128})
    cfg.optimizer = options(_name="adam_with_memory", adam_eps=1e-6)
    optimizer = AMPOptimizer.build_optimizer(cfg, dense(scaled))
    assert optimizer.scaler.get_scale() == 128
    for update in range(4):
        torch.manual_seed(10 + update)
        x = torch.randn(accumulated, 4, WIDTH)
        norms = []
        for memory, one in ((plain, reference), (scaled, optimizer)):
            one.zero_grad()
            for part in x:
                one.backward(memory(part).square().sum())
            one.multiply_grads(1 / 2048)
            norms.append(one.clip_grad_norm(max_norm))
            one.step()
        torch.testing.assert_close(*norms)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(scaled.state_dict()[name], parameter.detach(), msg=name)


@pytest.mark.parametrize("padded", [False, True])
def test_under_amp_an_overflow_in_a_table_alone_is_passed_over(monkeypatch, padded):
    monkeypatch.setattr(values, "pads_rows", lambda x: padded)
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", scaler)
    memory = make_memory()
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common.update({"amp": True, "fp16_init_scale": 128})
    cfg.optimizer = options(_name="adam_with_memory")
    optimizer = AMPOptimizer.build_optimizer(cfg, dense(memory))
    before = copy.deepcopy(memory.state_dict())
    optimizer.backward(memory(torch.randn(3, WIDTH)).sum())
    memory.values.grad._values()[0] = torch.inf
    assert not optimizer.clip_grad_norm(1.0).isfinite()
    optimizer.step()
    assert optimizer.scaler.get_scale() == 64
    torch.testing.assert_close(dict(memory.state_dict()), dict(before), rtol=0, atol=0)
    learn(memory, optimizer, updates=1)
    assert not torch.equal(memory.values, before["values"])


def test_memory_efficient_training_resumes_with_a_state_of_its_own():
    memory = make_memory().bfloat16()
    first = wrapped(memory, "bf16", memory_efficient_fp16=True)
    learn(memory, first)
    saved = first.state_dict()
    second = wrapped(memory, "bf16", memory_efficient_fp16=True)
    second.load_state_dict(saved)
    learn(memory, second, updates=1)
    for name in ("exp_avg", "exp_avg_sq", "master"):
        ours, theirs = getattr(memory.table.moments, name), saved["tables"][0][name]
        assert ours.dtype == torch.float32
        assert ours.data_ptr() != theirs.data_ptr()


def test_a_batch_that_counts_for_nothing_moves_nothing():
    """fairseq gives workers that have no data left a batch whose loss it multiplies by 0."""
    memory = make_memory()
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer)
    before = copy.deepcopy([memory.values.data, memory.table.moments.exp_avg])
    optimizer.zero_grad()
    optimizer.backward(memory(torch.randn(5, WIDTH)).sum() * 0)
    assert memory.values.grad._nnz() == 0
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert torch.equal(memory.values, before[0])
    assert torch.equal(memory.table.moments.exp_avg, before[1])


def test_an_average_of_the_weights_can_be_kept():
    memory = ProductKeyMemory(WIDTH, 64, 2, 3, query_dim=4, query_batch_norm=True)
    ema = EMA(memory, EMAConfig(store_ema=True, ema_decay=0.5))
    memory(torch.randn(5, WIDTH)).sum().backward()
    with torch.no_grad():
        memory.values += 1
    ema.step(memory)
    torch.testing.assert_close(ema.get_model().values + 0.5, memory.values)


def test_fp16_passes_over_an_overflow_and_goes_on():
    memory = make_memory().to(torch.float16)
    optimizer = wrapped(memory, "fp16", fp16_init_scale=2**30)
    before = memory.values.clone()
    x = torch.randn(4, WIDTH).half()
    for update in range(40):
        optimizer.zero_grad()
        optimizer.backward(memory(x).float().sum())
        try:
            optimizer.clip_grad_norm(0.0)
        except OverflowError:
            assert torch.equal(memory.values, before)
            continue
        assert update > 0
        optimizer.step()
        break
    assert not torch.equal(memory.values, before)
    assert memory.values.isfinite().all()
