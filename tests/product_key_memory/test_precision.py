"""Values in half precision and scaled losses: small steps must add up."""

import copy

import pytest
import torch

from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.lazy_adam import round_at_random
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.optimizers import adam_options, in_precision
from tests.product_key_memory.layer import (
    WIDTH,
    adam_with_memory,
    dense,
    hide_values,
    learn,
    make_memory,
    make_pair,
)

BF16 = torch.bfloat16
PADDED = pytest.mark.parametrize("padded", [False, True])
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer_for(memory, precision, eps=1e-8, **common):
    choices = {"lr": [0.01], "adam_eps": eps, "_name": "adam_with_memory"}
    options = adam_options(AdamWithMemoryConfig, **choices)
    return in_precision(options, dense(memory), precision, **common)


@pytest.mark.parametrize(
    ("dtype", "precision", "common"),
    [
        (BF16, "bf16", {}),
        (torch.float16, "fp16", {"fp16_init_scale": 4}),
        (torch.float16, "fp16", {"fp16_init_scale": 4, "memory_efficient_fp16": True}),
    ],
)
def test_in_half_precision_small_steps_add_up(dtype, precision, common):
    exact = make_memory()
    with torch.no_grad():
        exact.values.copy_(exact.values.to(dtype))
    half = hide_values(copy.deepcopy(exact).to(dtype))
    reference = adam_with_memory(exact, memory_lr=1e-5)
    optimizer = build_optimizer_for(half, precision, **common)
    optimizer.optimizer.memory_lr = 1e-5
    rows, before = torch.tensor([1, 5, 60]), exact.values.detach().clone()
    for _ in range(30):
        grads = torch.randn(3, WIDTH).to(dtype)
        for memory, its_optimizer in ((exact, reference), (half, optimizer)):
            its_optimizer.zero_grad()
            loss_scale = common.get("fp16_init_scale", 1) if memory is half else 1
            scaled = (loss_scale * grads).to(memory.values.dtype)
            memory.values.grad = rows_as_gradient(rows, scaled, memory.values.shape)
            its_optimizer.multiply_grads(0.5)
            its_optimizer.clip_grad_norm(0.1)
            its_optimizer.step()
    assert half.values.dtype == dtype
    state = half.table.state()
    # most steps are too small for half precision: the copy in single precision has their sum
    torch.testing.assert_close(state["master"], exact.values.detach(), rtol=0, atol=1e-7)
    assert (exact.values - before)[rows].abs().max() > 5e-5
    assert torch.equal(half.values, state["master"].to(dtype))
    assert {state[name].dtype for name in MOMENTS} == {torch.float32}
    # resuming copies the state, also in single precision
    saved = optimizer.state_dict()
    build_optimizer_for(half, precision, **common).load_state_dict(saved)
    for name in (*MOMENTS, "master"):
        moment = getattr(half.table.moments, name)
        assert moment.dtype == torch.float32
        assert moment.data_ptr() != saved["tables"][0][name].data_ptr()


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.01])
def test_under_amp_the_values_learn_what_they_learn_without(max_norm, accumulated):
    plain, scaled = make_memory(), make_memory()
    reference = adam_with_memory(plain, adam_eps=1e-6)
    optimizer = build_optimizer_for(scaled, "amp", 1e-6, fp16_init_scale=128)
    assert optimizer.scaler.get_scale() == 128
    for _ in range(4):
        x, norms = torch.randn(accumulated, 4, WIDTH), []
        for memory, its_optimizer in ((plain, reference), (scaled, optimizer)):
            its_optimizer.zero_grad()
            for part in x:
                its_optimizer.backward(memory(part).square().sum())
            its_optimizer.multiply_grads(1 / 2048)
            norms.append(its_optimizer.clip_grad_norm(max_norm))
            its_optimizer.step()
        torch.testing.assert_close(*norms)
    torch.testing.assert_close(dict(scaled.state_dict()), dict(plain.state_dict()))


@PADDED
def test_under_amp_an_overflow_in_a_table_alone_is_passed_over(monkeypatch, padded):
    monkeypatch.setattr(values, "pads_rows", lambda x: padded)
    memory = make_memory()
    optimizer = build_optimizer_for(memory, "amp", fp16_init_scale=128)
    before = copy.deepcopy(memory.state_dict())
    optimizer.backward(memory(torch.randn(3, WIDTH)).sum())
    memory.values.grad._values()[0] = torch.inf
    assert not optimizer.clip_grad_norm(1.0).isfinite()
    optimizer.step()
    assert optimizer.scaler.get_scale() == 64
    torch.testing.assert_close(dict(memory.state_dict()), dict(before), rtol=0, atol=0)
    learn(memory, optimizer, updates=1)
    assert not torch.equal(memory.values, before["values"])


def test_fp16_passes_over_an_overflow_and_goes_on():
    memory = make_memory().to(torch.float16)
    optimizer = build_optimizer_for(memory, "fp16", fp16_init_scale=2**30)
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


# --- values that stay in bfloat16


def test_numbers_are_rounded_to_a_neighbour_and_are_right_on_average():
    x = torch.cat([torch.randn(30, 20), torch.randn(30, 20) * 1e-20, torch.zeros(1, 20)])
    rows = torch.randperm(1 << 22)[: len(x)]
    drawn = torch.stack([round_at_random(x, rows, update) for update in range(500)])
    assert drawn.dtype == BF16
    low = x.view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
    gap = (x.abs() * 2**-7).clamp(min=1e-40)
    assert ((drawn.float() - x).abs() / gap).max() < 1
    assert (drawn.float() == low).float().mean().item() == pytest.approx(0.5, abs=0.05)
    # a rounding's standard deviation is at most half a gap; allow 5 deviations for a mean of 500
    assert (((drawn.double().mean(0) - x) / gap).abs() < 5 * 0.5 / 500**0.5).all()
    # numbers that need no rounding stay the same
    assert torch.equal(round_at_random(drawn[0].float(), rows, 3), drawn[0])


def test_chance_is_that_of_row_column_and_update_wherever_they_are():
    x, rows = torch.full((9, 8), 1 + 2**-8), torch.arange(9) * 1000
    whole = round_at_random(x, rows, 7)
    assert torch.equal(round_at_random(x[3:, 4:], rows[3:], 7, first_column=4), whole[3:, 4:])
    assert torch.equal(round_at_random(x, rows, 7), whole)
    assert not torch.equal(round_at_random(x, rows + 1, 7), whole)
    assert not torch.equal(round_at_random(x, rows, 8), whole)


@PADDED
def test_rounded_steps_add_up_and_moments_are_those_of_single_precision(monkeypatch, padded):
    monkeypatch.setattr(values, "pads_rows", lambda x: padded)
    exact, rounded = (make_memory(slots=400, values_dtype=dtype) for dtype in (None, BF16))
    # both start with the same values
    assert torch.equal(rounded.values, exact.values.bfloat16())
    optimizers = [adam_with_memory(memory, memory_lr=1e-5) for memory in (exact, rounded)]
    with torch.no_grad():
        exact.values.copy_(rounded.values)
    rows, before = torch.arange(0, 400, 2), exact.values.detach().clone()
    slope = torch.randn(200, WIDTH).bfloat16()
    for _ in range(50):
        grads = slope + torch.randn(200, WIDTH).bfloat16() / 8
        for memory, optimizer in zip((exact, rounded), optimizers, strict=True):
            listed = grads.to(memory.values.dtype)
            memory.values.grad = rows_as_gradient(rows, listed, memory.values.shape, padded)
            optimizer.step()
    states = [optimizer.state_dict()["tables"][0] for optimizer in optimizers]
    assert states[1]["rows"].tolist() == rows.tolist()
    for name in MOMENTS:
        assert states[1][name].dtype == torch.float32
        torch.testing.assert_close(states[1][name], states[0][name][rows], rtol=1e-5, atol=1e-7)
    # rounding to the nearest number would lose almost all steps
    moved, expected = ((x.values.float() - before)[rows] for x in (rounded, exact))
    along = (moved * expected).sum() / expected.square().sum()
    assert along.item() == pytest.approx(1, abs=0.15)
    assert torch.equal(rounded.values[1::2].float(), before[1::2])


@pytest.mark.parametrize("cast", [torch.half, torch.double, BF16, torch.float])
def test_casts_leave_the_values_alone(cast):
    model = make_pair(values_dtype=BF16)
    # too small for float16
    with torch.no_grad():
        model.values[0] = 1e-20
    before = model.values.detach().clone()
    model.to(cast)
    for memory in (model.first, model.second):
        assert memory.keys.subkeys.dtype == cast
        assert memory.values.dtype == BF16
        assert torch.equal(memory.values, before)
        assert memory.table.values is memory.values
    assert model(torch.randn(3, WIDTH, dtype=cast)).dtype == cast
