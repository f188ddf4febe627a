"""Lazy Adam for rows that were read, next to fairseq's Adam: rule, clipping, state, precision."""

import copy
import functools

import pytest
import torch
from fairseq.optim.adam import Adam

from fairseq_plugins.product_key_memory import lazy_adam
from fairseq_plugins.product_key_memory.lazy_adam import UPDATED_AT_ONCE
from tests.optimizers import EACH_PRECISION, LOSS_SCALES
from tests.product_key_memory.layer import WIDTH, Pair, adam_with_memory, learn, make_memory

EPS, BETAS, LR, DECAY = 1e-3, (0.9, 0.98), 0.02, 0.1
MODELS = {
    "memory": make_memory,
    "all slots": functools.partial(make_memory, slots=16, knn=16),
    "shared values": Pair,
    "plain kernel": functools.partial(make_memory, kernel="plain"),
}


def adam_by_hand(state, grad, step, lr=LR, betas=BETAS):
    """Return the state after a step of Adam for the rows that have a gradient."""
    table, mean, square = state
    new_mean = betas[0] * mean + (1 - betas[0]) * grad
    new_square = betas[1] * square + (1 - betas[1]) * grad**2
    corrected = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
    new = table * (1 - DECAY * lr) - corrected * new_mean / (new_square.sqrt() + EPS)
    read, after = grad.ne(0).any(-1, keepdim=True), (new, new_mean, new_square)
    return [torch.where(read, x, old) for x, old in zip(after, state, strict=True)]


@EACH_PRECISION
@pytest.mark.parametrize("rule", ["loop", "operations"])
@pytest.mark.parametrize("model", MODELS)
def test_updates_equal_adam_for_the_rows_that_were_read(
    monkeypatch, model, rule, precision, dtype, common
):
    """Updates have one pass or two, with and without clipping, at a rate that no schedule sets."""
    monkeypatch.setitem(UPDATED_AT_ONCE, "cpu", 3 * WIDTH)
    if rule == "operations":
        monkeypatch.setattr(lazy_adam, "cpu_loops", lambda x: None)
    memory = MODELS[model]().to(dtype)
    rates = {"memory_lr": LR, "memory_weight_decay": DECAY, "adam_eps": EPS}
    optimizer = adam_with_memory(memory, precision, common, **rates)
    table = memory.values.weight
    state = [table.double(), *torch.zeros(2, *table.shape).double()]
    torch.manual_seed(2)
    for step in range(1, 5):
        optimizer.zero_grad()
        optimizer.set_lr(0.1 / step)
        for _ in range(1 + step % 2):
            optimizer.backward(memory(torch.randn(5, WIDTH).to(dtype)).float().square().sum())
        gradients = [weight.grad for weight in memory.parameters()]
        scaled = [grad.to_dense().double() / LOSS_SCALES[precision] for grad in gradients]
        norm = torch.stack([grad.norm() for grad in scaled]).norm() / 4
        gradient = table.grad.to_dense().double() / LOSS_SCALES[precision]
        max_norm = (0.0, 0.1, 1000.0)[step % 3]
        optimizer.multiply_grads(0.25)
        clipped = torch.as_tensor(optimizer.clip_grad_norm(max_norm))
        torch.testing.assert_close(clipped.double(), norm, rtol=1e-5, atol=1e-5)
        before = table.clone()
        optimizer.step()
        scale = 0.25 * (0.1 / norm if max_norm == 0.1 else 1)
        state = adam_by_hand(state, gradient * scale, step)
        unread = ~gradient.any(1)
        assert torch.equal(table[unread], before[unread])
        (saved,) = optimizer.state_dict()["tables"]
        # steps that are too small for half precision add up in a copy
        exact = saved.get("master", table)
        torch.testing.assert_close(exact, state[0].float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(table, exact.to(dtype))


def test_values_may_follow_the_schedule_with_betas_of_their_own():
    memory = make_memory()
    rates = {"memory_lr": LR, "memory_weight_decay": DECAY, "adam_eps": EPS, "lr": [0.1]}
    changes = {"memory_scheduled": True, "memory_betas": "(0.7, 0.9)"}
    optimizer = adam_with_memory(memory, **rates, **changes)
    table = memory.values.weight
    state = [table.double(), *torch.zeros(2, *table.shape).double()]
    for step in range(1, 4):
        optimizer.zero_grad()
        optimizer.set_lr(0.1 / step)
        optimizer.backward(memory(torch.randn(5, WIDTH)).square().sum())
        gradient = table.grad.to_dense().double()
        optimizer.step()
        state = adam_by_hand(state, gradient, step, LR / step, (0.7, 0.9))
        torch.testing.assert_close(table, state[0].float(), rtol=1e-5, atol=1e-6)


def test_a_loss_times_zero_moves_nothing():
    """fairseq gives workers that have no data left a batch whose loss it multiplies by 0."""
    memory = make_memory()
    optimizer = adam_with_memory(memory, memory_weight_decay=0.1)
    learn(memory, optimizer)
    (moments,) = optimizer.optimizer.moments
    learned = memory.values.weight.data, moments.exp_avg, moments.exp_avg_sq
    before = copy.deepcopy(learned)
    optimizer.zero_grad()
    optimizer.backward(memory(torch.randn(5, WIDTH)).sum() * 0)
    assert memory.values.weight.grad._nnz() == 0
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert all(map(torch.equal, learned, before))


def test_an_update_that_is_not_finite_leaves_no_trace():
    memory, other = make_memory(), make_memory()
    x = torch.randn(3, WIDTH)
    for layer in (memory, other):
        optimizer = adam_with_memory(layer)
        if layer is memory:
            optimizer.backward(memory(x).sum() * torch.inf)
            optimizer.multiply_grads(0.5)
            assert not optimizer.clip_grad_norm(1.0).isfinite()
            # with --fp16, fairseq clears only the gradients that it knows
            memory.query.zero_grad()
            memory.keys.zero_grad()
        optimizer.backward(layer(x).sum())
        assert optimizer.clip_grad_norm(1.0).isfinite()
        optimizer.step()
    assert torch.equal(memory.values.weight, other.values.weight)


def test_amp_skips_an_update_with_an_overflow_in_a_table():
    memory = make_memory()
    optimizer = adam_with_memory(memory, "amp")
    before = copy.deepcopy(memory.state_dict())
    optimizer.backward(memory(torch.randn(3, WIDTH)).sum())
    memory.values.weight.grad._values()[0] = torch.inf
    assert not optimizer.clip_grad_norm(1.0).isfinite()
    optimizer.step()
    assert optimizer.scaler.get_scale() == 2
    torch.testing.assert_close(dict(memory.state_dict()), dict(before), rtol=0, atol=0)
    learn(memory, optimizer, updates=1)
    assert not torch.equal(memory.values.weight, before["values.weight"])


@EACH_PRECISION
def test_a_resumed_training_is_the_unbroken_one(precision, dtype, common):
    """Only the values learn here: fairseq does not save its copies of other weights."""
    memory, resumed = (make_memory(seed=seed).to(dtype) for seed in (1, 5))
    optimizer = adam_with_memory(memory, precision, common, lr=[0.0])
    learn(memory, optimizer)
    resumed.load_state_dict(memory.state_dict())
    other = adam_with_memory(resumed, precision, common, lr=[7.0])
    other.load_state_dict(optimizer.state_dict())
    for layer, its_optimizer in ((memory, optimizer), (resumed, other)):
        learn(layer, its_optimizer, seed=4)
    tables = (each.state_dict()["tables"] for each in (optimizer, other))
    torch.testing.assert_close(*tables, rtol=0, atol=0)
    assert torch.equal(memory.values.weight, resumed.values.weight)
    assert other.get_lr() == 0.0


def test_a_model_without_memories_has_the_state_of_adam():
    layer = torch.nn.Linear(2, 2)
    optimizer = adam_with_memory(layer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = Adam(layer.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert len(plain.state_dict()["state"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_weight_decay": -0.5}, "`memory_weight_decay` is -0.5: .* at least 0"),
        ({"fp16_adam_stats": True}, "--fp16-adam-stats .* leave it out"),
        ({"memory_betas": "(0.9, 1.0)"}, r"--memory-betas is \(0.9, 1.0\): .* two numbers"),
        ({"memory_betas": "0.9"}, "--memory-betas is 0.9: .* two numbers"),
    ],
)
def test_the_optimizer_refuses_impossible_options(options, words):
    with pytest.raises(ValueError, match=words):
        adam_with_memory(make_memory(), **options)


@pytest.mark.parametrize(
    ("slots", "times", "words"),
    [(81, 1, r"shape \(64, 8\), .* \(81, 8\)"), (64, 2, "2 memories, .* has 1")],
)
def test_the_optimizer_refuses_the_state_of_other_memories(slots, times, words):
    memory = make_memory()
    optimizer, other = adam_with_memory(memory), adam_with_memory(make_memory(slots=slots))
    learn(memory, optimizer, 1)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"{words}: give --reset-optimizer"):
        other.load_state_dict({**state, "tables": state["tables"] * times})
