"""Values in bfloat16: rounding at random, moments of the rows that were read, state, casts."""

import copy

import pytest
import torch

from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.lazy_adam import round_at_random
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.product_key_memory.standalone import SLOTS, WIDTH, adam_with_memory, learn, make_memory

BF16 = torch.bfloat16


def make_rounded(seed=1, **how):
    return make_memory(seed=seed, values_dtype=BF16, **how)


def test_numbers_are_rounded_to_a_neighbour_and_are_right_on_average():
    torch.manual_seed(1)
    x = torch.cat([torch.randn(30, 20), torch.randn(30, 20) * 1e-20, torch.zeros(1, 20)])
    rows = torch.randperm(1 << 22)[: len(x)]
    drawn = torch.stack([round_at_random(x, rows, update) for update in range(500)])
    assert drawn.dtype == BF16
    low = x.view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
    gap = (x.abs() * 2**-7).clamp(min=1e-40)
    far = (drawn.float() - x).abs() / gap
    assert far.max() < 1
    assert (drawn.float() == low).float().mean().item() == pytest.approx(0.5, abs=0.05)
    # 500 drawings of a gap at most: far more than 5 standard deviations would be an error
    assert (((drawn.double().mean(0) - x) / gap).abs() < 5 * 0.5 / 500**0.5).all()


def test_what_needs_no_rounding_stays():
    x = torch.randn(9, 8).bfloat16()
    assert torch.equal(round_at_random(x.float(), torch.arange(9), 3), x)


def test_chance_is_that_of_row_column_and_update_wherever_they_are():
    x, rows = torch.full((9, 8), 1 + 2**-8), torch.arange(9) * 1000
    whole = round_at_random(x, rows, 7)
    assert torch.equal(round_at_random(x[3:, 4:], rows[3:], 7, first_column=4), whole[3:, 4:])
    assert torch.equal(round_at_random(x, rows, 7), whole)
    assert not torch.equal(round_at_random(x, rows + 1, 7), whole)
    assert not torch.equal(round_at_random(x, rows, 8), whole)


@pytest.mark.parametrize("padded", [False, True])
def test_small_steps_add_up_and_moments_are_those_of_single_precision(monkeypatch, padded):
    monkeypatch.setattr(values, "pads_rows", lambda x: padded)
    exact, rounded = make_memory(slots=400), make_rounded(slots=400)
    optimizers = [adam_with_memory(memory, memory_lr=1e-5) for memory in (exact, rounded)]
    rows = torch.arange(0, 400, 2)
    with torch.no_grad():
        exact.values.copy_(rounded.values)
    before = exact.values.detach().clone()
    torch.manual_seed(2)
    slope = torch.randn(200, WIDTH).bfloat16()
    for _ in range(50):
        grads = slope + torch.randn(200, WIDTH).bfloat16() / 8
        for memory, optimizer in zip((exact, rounded), optimizers, strict=True):
            listed = grads.to(memory.values.dtype)
            grad = rows_as_gradient(rows, listed, memory.values.shape, padded)
            memory.values.grad = grad
            optimizer.step()
    states = [optimizer.state_dict()["tables"][0] for optimizer in optimizers]
    assert states[1]["rows"].tolist() == rows.tolist()
    for name in ("exp_avg", "exp_avg_sq"):
        assert states[1][name].dtype == torch.float32
        torch.testing.assert_close(states[1][name], states[0][name][rows], rtol=1e-5, atol=1e-7)
    # all but a few steps are too small for rounding to the nearest number
    moved, expected = ((x.values.float() - before)[rows] for x in (rounded, exact))
    along = (moved * expected).sum() / expected.square().sum()
    assert along.item() == pytest.approx(1, abs=0.15)
    assert torch.equal(rounded.values[1::2].float(), before[1::2])


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped():
    memory = make_rounded()
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer)
    resumed = make_rounded(seed=5)
    other = adam_with_memory(resumed)
    resumed.load_state_dict(memory.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its_optimizer in ((memory, optimizer), (resumed, other)):
        learn(one, its_optimizer, seed=4)
    assert torch.equal(memory.values, resumed.values)
    torch.testing.assert_close(optimizer.state_dict()["tables"], other.state_dict()["tables"])


@pytest.mark.parametrize("dtypes", [(None, BF16), (BF16, None)])
def test_a_state_of_the_other_precision_is_refused(dtypes):
    before, after = (make_memory(values_dtype=dtype) for dtype in dtypes)
    first, second = adam_with_memory(before), adam_with_memory(after)
    learn(before, first, 2)
    with pytest.raises(ValueError, match="another dtype: give --reset-optimizer"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16", "float"])
@pytest.mark.parametrize("shared", [False, True])
def test_casts_leave_the_values_alone(cast, shared):
    memory = make_rounded()
    model = torch.nn.ModuleList([memory])
    if shared:
        second = ProductKeyMemory(WIDTH, SLOTS, 2, 3, query_dim=4, values_of=memory)
        model.append(second)
    # numbers that half precision lacks
    with torch.no_grad():
        memory.values[0] = 1e-20
    before = memory.values.detach().clone()
    getattr(model, cast)()
    dtype = memory.keys.subkeys.dtype
    assert dtype == getattr(torch, {"half": "float16"}.get(cast, cast))
    assert memory.values.dtype == BF16
    assert torch.equal(memory.values, before)
    assert memory.table.values is memory.values
    x = torch.randn(3, WIDTH, dtype=dtype)
    assert all(each(x).dtype == dtype for each in model)


def test_values_start_as_those_of_single_precision():
    assert torch.equal(make_rounded().values, make_memory().values.bfloat16())
