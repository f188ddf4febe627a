"""Lazy Adam for rows that were read, next to fairseq's Adam: rule, clipping, buffers, state."""

import copy

import pytest
import torch
from fairseq.optim.adam import Adam

from fairseq_plugins.product_key_memory import cpu_kernels, lazy_adam, values
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.product_key_memory.layer import (
    SLOTS,
    WIDTH,
    adam_with_memory,
    dense,
    hide_values,
    learn,
    make_memory,
    make_pair,
)


@pytest.fixture(params=["loop", "torch", "padded"])
def padded(request, monkeypatch):
    """Update with the compiled loop, with torch operations, or padded as on an accelerator."""
    monkeypatch.setattr(values, "pads_rows", lambda x: request.param == "padded")
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "update_rows", lazy_adam.update_rows)
    return request.param == "padded"


EPS, BETAS = 1e-3, (0.9, 0.98)


def frozen_memory(apart, thawed=False):
    memory = make_memory(apart)
    memory.train_only(torch.arange(SLOTS) % 3 > 0)
    if thawed:
        memory.train_only(None)
    return memory


MODELS = {
    "memory": make_memory,
    "all slots": lambda apart: make_memory(apart, slots=16, knn=16),
    "frozen slots": frozen_memory,
    "slots no longer frozen": lambda apart: frozen_memory(apart, thawed=True),
    "shared values": make_pair,
    "plain search": lambda apart: make_memory(apart, search="plain"),
}


def adam_by_hand(state, grad, step, lr, scale, decay):
    """Return the state after a step of Adam for the rows that have a gradient."""
    table, mean, square = state
    read = grad.ne(0).any(-1, keepdim=True)
    grad = grad * scale
    new_mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    new_square = BETAS[1] * square + (1 - BETAS[1]) * grad**2
    corrected = lr * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step)
    new = table * (1 - decay * lr) - corrected * new_mean / (new_square.sqrt() + EPS)
    after = (new, new_mean, new_square)
    return [torch.where(read, x, old) for x, old in zip(after, state, strict=True)]


@pytest.mark.parametrize("at_once", [1 << 22, 3 * WIDTH])
@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_with_dense_gradients(monkeypatch, model, at_once, padded):
    """Updates alternate between one and two passes, with and without clipping."""
    monkeypatch.setitem(lazy_adam.UPDATED_AT_ONCE, "cpu", at_once)
    ours, plain = (MODELS[model](apart) for apart in (True, False))
    optimizer = adam_with_memory(ours, memory_lr=0.02, memory_weight_decay=0.1, adam_eps=EPS)
    state = [plain.values.detach().double(), *torch.zeros(2, *plain.values.shape).double()]
    torch.manual_seed(2)
    for step in range(1, 5):
        optimizer.zero_grad()
        plain.zero_grad()
        for _ in range(1 + step % 2):
            x = torch.randn(5, WIDTH)
            optimizer.backward(ours(x).square().sum())
            plain(x).square().sum().backward()
        gradient = ours.values.grad
        assert gradient.is_coalesced() != padded
        assert gradient._nnz() <= len(ours.values)
        changes = gradient._indices()[0].diff()
        # rows rise; left-over entries of a padded gradient repeat a row with zeros
        assert (changes >= int(not padded)).all()
        assert not gradient._values()[1:][changes == 0].any()
        torch.testing.assert_close(gradient.to_dense(), plain.values.grad, rtol=1e-5, atol=1e-5)
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        norm = torch.stack([grad.norm() for grad in expected.values()]).norm() / 4
        max_norm = (0.0, 0.1, 1000.0)[step % 3]
        optimizer.multiply_grads(0.25)
        torch.testing.assert_close(optimizer.clip_grad_norm(max_norm), norm)
        scale = 0.25 * (0.1 / norm if max_norm == 0.1 else 1)
        for name, parameter in ours.named_parameters():
            if not name.endswith("values"):
                torch.testing.assert_close(parameter.grad, expected[name] * scale)
        before = ours.values.detach().clone()
        optimizer.step()
        state = adam_by_hand(state, plain.values.grad.double(), step, 0.02, scale, 0.1)
        read = plain.values.grad.any(1)
        assert torch.equal(ours.values[~read], before[~read])
        plain.load_state_dict(ours.state_dict())
        plain.values.data.copy_(state[0])
        torch.testing.assert_close(ours.values, plain.values, rtol=1e-5, atol=1e-6)
    assert len(optimizer.tables) == 1


def test_what_the_loss_does_not_depend_on_moves_nothing(padded):
    """fairseq gives workers that have no data left a batch whose loss it multiplies by 0."""
    memory = make_memory()
    optimizer = adam_with_memory(memory, memory_weight_decay=0.1)
    learn(memory, optimizer)
    learned = memory.values.data, memory.table.moments.exp_avg, memory.table.moments.exp_avg_sq
    before = copy.deepcopy(learned)
    optimizer.zero_grad()
    optimizer.backward(memory(torch.randn(5, WIDTH)).sum() * 0)
    assert padded or memory.values.grad._nnz() == 0
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert all(map(torch.equal, learned, before))


def test_an_updates_gradients_take_the_memory_of_the_last_ones():
    memory, gradients = make_memory(slots=16, knn=16), []
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer, 3, after=lambda _: gradients.append(memory.values.grad.values()))
    assert len({values.data_ptr() for values in gradients}) == 1


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
            for parameter in dense(memory):
                parameter.grad = None
        optimizer.backward(layer(x).sum())
        assert optimizer.clip_grad_norm(1.0).isfinite()
        optimizer.step()
    assert torch.equal(memory.values, other.values)


def test_schedules_leave_the_learning_rate_of_the_memory_alone():
    memory = make_memory()
    optimizer = adam_with_memory(memory, lr=[0.5], memory_lr=0.125)
    optimizer.set_lr(0.25)
    # reduce_lr_on_plateau writes to the groups directly
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    assert optimizer.get_lr() == 0.0
    before = memory.values.clone()
    row, ones = torch.tensor([2]), torch.ones(1, WIDTH)
    memory.values.grad = rows_as_gradient(row, ones, memory.values.shape)
    optimizer.step()
    moved = torch.zeros(SLOTS, WIDTH)
    moved[2] = 0.125
    torch.testing.assert_close(before - memory.values, moved)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(dtype):
    memory, resumed = (make_memory(seed=seed, values_dtype=dtype) for seed in (1, 5))
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer)
    resumed.load_state_dict(memory.state_dict())
    other = adam_with_memory(resumed, lr=[7.0])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for layer, its_optimizer in ((memory, optimizer), (resumed, other)):
        learn(layer, its_optimizer, seed=4)
    assert torch.equal(memory.values, resumed.values)
    torch.testing.assert_close(optimizer.state_dict()["tables"], other.state_dict()["tables"])
    assert other.get_lr() == 0.01


def test_a_new_optimizer_and_a_copy_start_without_moments():
    memory = make_memory()
    learn(memory, adam_with_memory(memory))
    twin = hide_values(copy.deepcopy(memory))
    assert twin.table.moments is None
    for each in (memory, twin):
        learn(each, adam_with_memory(each), seed=4)
    assert torch.equal(memory.values, twin.values)
    assert memory.table.state()["step"] == 5


def test_a_state_without_tables_is_that_of_adam():
    layer = torch.nn.Linear(2, 2)
    optimizer = adam_with_memory(layer)
    assert optimizer.tables == []
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = Adam(layer.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert len(plain.state_dict()["state"]) == 2
