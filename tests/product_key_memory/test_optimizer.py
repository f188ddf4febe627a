"""Lazy Adam of the rows that were read, beside fairseq's Adam: rule, precision, clipping, state."""

import copy

import pytest
import torch
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig

from fairseq_plugins.product_key_memory import cpu_kernels, lazy_adam
from fairseq_plugins.product_key_memory.optimizer import FairseqAdamWithMemory
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.product_key_memory.standalone import (
    BETAS,
    SLOTS,
    WIDTH,
    adam_with_memory,
    dense,
    hide_values,
    learn,
    make_memory,
    options,
)

RULES = {"torch": lazy_adam.update_rows, "loop": cpu_kernels.update_rows}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_are_all_read_are_updated_as_fairseqs_adam_would(monkeypatch, rule, decay):
    monkeypatch.setattr(cpu_kernels, "update_rows", RULES[rule])
    lazy, plain = make_memory(slots=16, knn=16), make_memory(apart=False, slots=16, knn=16)
    choices = {"lr": [1e-3], "adam_eps": 1e-6, "weight_decay": decay}
    learn(lazy, adam_with_memory(lazy, memory_weight_decay=decay, **choices))
    learn(plain, FairseqAdam(options(FairseqAdamConfig, **choices), dense(plain)))
    # torch's operations are the same; the loop rounds products before it adds them
    tolerance = {"torch": 0, "loop": 1e-6}[rule]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            lazy.state_dict()[name], parameter.data, rtol=tolerance, atol=tolerance
        )


def test_the_rule_is_that_of_torchs_sparse_adam():
    lazy, plain = make_memory(), make_memory()
    ours = adam_with_memory(lazy, memory_lr=0.02)
    theirs = torch.optim.SparseAdam([plain.values], lr=0.02, betas=BETAS)
    torch.manual_seed(3)
    for _ in range(6):
        rows = torch.randint(SLOTS, (5,)).unique()
        grad = rows_as_gradient(rows, torch.randn(len(rows), WIDTH), lazy.values.shape)
        lazy.values.grad, plain.values.grad = grad.clone(), grad
        ours.step()
        theirs.step()
    torch.testing.assert_close(lazy.values, plain.values)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rows_that_are_not_read_stay_bit_for_bit_in_values_and_state(decay):
    memory = make_memory()
    optimizer = adam_with_memory(memory, memory_weight_decay=decay)
    learn(memory, optimizer, updates=2)
    state = memory.table.moments
    before = copy.deepcopy([memory.values.data, state.exp_avg, state.exp_avg_sq])
    read = []
    learn(memory, optimizer, 1, 2, lambda _: read.append(memory.values.grad.indices()[0]), seed=9)
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[read[0]] = False
    assert 0 < untouched.sum() < SLOTS
    for old, new in zip(before, (memory.values.data, state.exp_avg, state.exp_avg_sq), strict=True):
        assert torch.equal(old[untouched], new[untouched])
        assert not torch.equal(old[~untouched], new[~untouched])


def test_an_updates_gradients_take_the_memory_of_the_last_ones():
    memory = make_memory(slots=16, knn=16)
    places = []
    optimizer = adam_with_memory(memory)
    learn(
        memory, optimizer, 3, after=lambda _: places.append(memory.values.grad.values().data_ptr())
    )
    assert len(set(places)) == 1


def test_gradients_of_another_pass_do_not_take_memory_that_is_in_use():
    memory = make_memory(slots=16, knn=16)
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer, 1)
    torch.manual_seed(2)
    optimizer.zero_grad()
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        before = memory.values.grad
        kept = None if before is None else before.to_dense()
        optimizer.backward(memory(x).square().sum())
        if before is not None:
            # what was there is not written over, and counts
            assert torch.equal(before.to_dense(), kept)
            assert not torch.equal(memory.values.grad.to_dense(), kept)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1000.0])
def test_norm_and_clipping_are_those_of_all_gradients_together(max_norm):
    lazy, plain = make_memory(), make_memory(apart=False)
    ours = adam_with_memory(lazy)
    theirs = FairseqAdam(options(FairseqAdamConfig), dense(plain))
    torch.manual_seed(2)
    x = torch.randn(5, WIDTH)
    norms = []
    for memory, optimizer in ((lazy, ours), (plain, theirs)):
        optimizer.backward(memory(x).square().sum())
        optimizer.multiply_grads(0.25)
        norms.append(optimizer.clip_grad_norm(max_norm))
    torch.testing.assert_close(*norms)
    assert 0.5 < norms[0] < 1000
    scaled = lazy.values.grad.to_dense() * ours.optimizer.scale.grad
    torch.testing.assert_close(scaled, plain.values.grad)
    torch.testing.assert_close(lazy.keys.subkeys.grad, plain.keys.subkeys.grad)


def test_an_update_that_is_not_finite_leaves_no_trace():
    memory, other = make_memory(), make_memory()
    x = torch.randn(3, WIDTH)
    for one in (memory, other):
        optimizer = adam_with_memory(one)
        if one is memory:
            optimizer.backward(memory(x).sum() * torch.inf)
            optimizer.multiply_grads(0.5)
            assert not optimizer.clip_grad_norm(1.0).isfinite()
            # as fairseq does with --fp16, which knows of nothing else
            for parameter in dense(memory):
                parameter.grad = None
        optimizer.backward(one(x).sum())
        assert optimizer.clip_grad_norm(1.0).isfinite()
        optimizer.step()
    assert torch.equal(memory.values, other.values)


def test_schedules_leave_the_learning_rate_of_the_memory_alone():
    memory = make_memory()
    optimizer = adam_with_memory(memory, lr=[0.5], memory_lr=0.125)
    optimizer.set_lr(0.25)
    # reduce_lr_on_plateau writes to the groups themselves
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    assert optimizer.get_lr() == 0.0
    before = memory.values.clone()
    memory.values.grad = rows_as_gradient(
        torch.tensor([2]), torch.ones(1, WIDTH), memory.values.shape
    )
    optimizer.step()
    moved = torch.zeros(SLOTS, WIDTH)
    moved[2] = 0.125
    torch.testing.assert_close(before - memory.values, moved)


def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped():
    memory = make_memory()
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer)
    resumed = make_memory(seed=5)
    resumed.load_state_dict(memory.state_dict())
    other = adam_with_memory(resumed, lr=[7.0])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(memory, optimizer, seed=4)
    learn(resumed, other, seed=4)
    assert torch.equal(memory.values, resumed.values)
    assert other.get_lr() == 0.01


def test_a_new_optimizer_and_a_copy_start_without_moments():
    memory = make_memory()
    learn(memory, adam_with_memory(memory))
    twin = hide_values(copy.deepcopy(memory))
    for each in (memory, twin):
        learn(each, adam_with_memory(each), seed=4)
    assert torch.equal(memory.values, twin.values)
    assert memory.table.state()["step"] == 5


def test_a_state_without_tables_is_that_of_adam():
    layer = torch.nn.Linear(2, 2)
    optimizer = FairseqAdamWithMemory(options(), layer.parameters())
    assert optimizer.tables == []
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = Adam(layer.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert len(plain.state_dict()["state"]) == 2
