"""Lazy Adam for rows that were read, next to fairseq's Adam: rule, clipping, state, precision."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from fairseq.optim.adam import Adam

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.optimizer import (
    UPDATED_AT_ONCE,
    AdamWithMemoryConfig,
    average_rows,
    update_rows,
)
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.optimizers import adam_options, in_precision
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
from tests.two_workers import on_two_workers


@pytest.fixture(params=["loop", "operations"])
def loop_or_operations(request, monkeypatch):
    """Update with the compiled loop, and with torch operations."""
    if request.param == "operations":
        monkeypatch.setattr(cpu_kernels, "update_rows", update_rows)


EPS, BETAS = 1e-3, (0.9, 0.98)


MODELS = {
    "memory": make_memory,
    "all slots": lambda apart: make_memory(apart, slots=16, knn=16),
    "shared values": make_pair,
    "plain kernel": lambda apart: make_memory(apart, kernel="plain"),
}


def adam_by_hand(state, grad, step, lr, scale, decay):
    """Return the state after a step of Adam for the rows that have a gradient."""
    table, mean, square = state
    has_gradient = grad.ne(0).any(-1, keepdim=True)
    grad = grad * scale
    new_mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    new_square = BETAS[1] * square + (1 - BETAS[1]) * grad**2
    corrected = lr * (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step)
    new = table * (1 - decay * lr) - corrected * new_mean / (new_square.sqrt() + EPS)
    after = (new, new_mean, new_square)
    return [torch.where(has_gradient, x, old) for x, old in zip(after, state, strict=True)]


@pytest.mark.parametrize("at_once", [1 << 22, 3 * WIDTH])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_adam_with_dense_gradients(monkeypatch, model, at_once, loop_or_operations):
    """Updates alternate between one and two passes, with and without clipping."""
    monkeypatch.setitem(UPDATED_AT_ONCE, "cpu", at_once)
    ours, plain = (MODELS[model](apart) for apart in (True, False))
    optimizer = adam_with_memory(ours, memory_lr=0.02, memory_weight_decay=0.1, adam_eps=EPS)
    state = [
        plain.values.weight.detach().double(),
        *torch.zeros(2, *plain.values.weight.shape).double(),
    ]
    torch.manual_seed(2)
    for step in range(1, 5):
        optimizer.zero_grad()
        plain.zero_grad()
        for _ in range(1 + step % 2):
            x = torch.randn(5, WIDTH)
            optimizer.backward(ours(x).square().sum())
            plain(x).square().sum().backward()
        gradient = ours.values.weight.grad
        assert gradient.is_coalesced()
        assert gradient._nnz() <= len(ours.values.weight)
        # rows rise
        assert (gradient._indices()[0].diff() > 0).all()
        torch.testing.assert_close(
            gradient.to_dense(), plain.values.weight.grad, rtol=1e-5, atol=1e-5
        )
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        norm = torch.stack([grad.norm() for grad in expected.values()]).norm() / 4
        max_norm = (0.0, 0.1, 1000.0)[step % 3]
        optimizer.multiply_grads(0.25)
        torch.testing.assert_close(optimizer.clip_grad_norm(max_norm), norm)
        scale = 0.25 * (0.1 / norm if max_norm == 0.1 else 1)
        for name, parameter in ours.named_parameters():
            if not name.endswith("values.weight"):
                torch.testing.assert_close(parameter.grad, expected[name] * scale)
        before = ours.values.weight.detach().clone()
        optimizer.step()
        state = adam_by_hand(state, plain.values.weight.grad.double(), step, 0.02, scale, 0.1)
        unread = ~plain.values.weight.grad.any(1)
        assert torch.equal(ours.values.weight[unread], before[unread])
        plain.load_state_dict(ours.state_dict())
        plain.values.weight.data.copy_(state[0])
        torch.testing.assert_close(ours.values.weight, plain.values.weight, rtol=1e-5, atol=1e-6)
    assert len(optimizer.tables) == 1


def test_a_loss_times_zero_moves_nothing(loop_or_operations):
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
            for parameter in dense(memory):
                parameter.grad = None
        optimizer.backward(layer(x).sum())
        assert optimizer.clip_grad_norm(1.0).isfinite()
        optimizer.step()
    assert torch.equal(memory.values.weight, other.values.weight)


def test_a_schedule_does_not_change_the_memorys_learning_rate():
    memory = make_memory()
    optimizer = adam_with_memory(memory, lr=[0.5], memory_lr=0.125)
    optimizer.set_lr(0.25)
    # reduce_lr_on_plateau writes to the groups directly
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    assert optimizer.get_lr() == 0.0
    before = memory.values.weight.clone()
    row, ones = torch.tensor([2]), torch.ones(1, WIDTH)
    memory.values.weight.grad = rows_as_gradient(row, ones, memory.values.weight.shape)
    optimizer.step()
    moved = torch.zeros(SLOTS, WIDTH)
    moved[2] = 0.125
    torch.testing.assert_close(before - memory.values.weight, moved)


def test_a_resumed_training_is_the_unbroken_one():
    memory, resumed = make_memory(), make_memory(seed=5)
    optimizer = adam_with_memory(memory)
    learn(memory, optimizer)
    resumed.load_state_dict(memory.state_dict())
    other = adam_with_memory(resumed, lr=[7.0])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for layer, its_optimizer in ((memory, optimizer), (resumed, other)):
        learn(layer, its_optimizer, seed=4)
    assert torch.equal(memory.values.weight, resumed.values.weight)
    torch.testing.assert_close(optimizer.state_dict()["tables"], other.state_dict()["tables"])
    assert other.get_lr() == 0.01


def test_a_model_without_memories_has_the_state_of_adam():
    layer = torch.nn.Linear(2, 2)
    optimizer = adam_with_memory(layer)
    assert optimizer.tables == []
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = Adam(layer.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert len(plain.state_dict()["state"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_lr": float("inf")}, "`memory_lr` is inf: .* finite"),
        ({"memory_weight_decay": -0.5}, "`memory_weight_decay` is -0.5: .* 0 or more"),
        ({"fp16_adam_stats": True}, "--fp16-adam-stats .* leave it out"),
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


# --- half precision and scaled losses: small steps must add up

BF16 = torch.bfloat16
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer_in(memory, precision, eps=1e-8, **common):
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
def test_half_precision_adds_up_small_steps(dtype, precision, common):
    exact = make_memory()
    with torch.no_grad():
        exact.values.weight.copy_(exact.values.weight.to(dtype))
    half = hide_values(copy.deepcopy(exact).to(dtype))
    reference = adam_with_memory(exact, memory_lr=1e-5)
    optimizer = build_optimizer_in(half, precision, **common)
    optimizer.optimizer.memory_lr = 1e-5
    rows, before = torch.tensor([1, 5, 60]), exact.values.weight.detach().clone()
    for _ in range(30):
        grads = torch.randn(3, WIDTH).to(dtype)
        for memory, its_optimizer in ((exact, reference), (half, optimizer)):
            its_optimizer.zero_grad()
            loss_scale = common.get("fp16_init_scale", 1) if memory is half else 1
            scaled = (loss_scale * grads).to(memory.values.weight.dtype)
            memory.values.weight.grad = rows_as_gradient(rows, scaled, memory.values.weight.shape)
            its_optimizer.multiply_grads(0.5)
            its_optimizer.clip_grad_norm(0.1)
            its_optimizer.step()
    assert half.values.weight.dtype == dtype
    (state,) = optimizer.state_dict()["tables"]
    # most steps are too small for half precision: the copy in single precision has their sum
    torch.testing.assert_close(state["master"], exact.values.weight.detach(), rtol=0, atol=1e-7)
    assert (exact.values.weight - before)[rows].abs().max() > 5e-5
    assert torch.equal(half.values.weight, state["master"].to(dtype))
    assert {state[name].dtype for name in MOMENTS} == {torch.float32}
    # resuming copies the state, also in single precision
    saved = optimizer.state_dict()
    resumed = build_optimizer_in(half, precision, **common)
    resumed.load_state_dict(saved)
    (moments,) = resumed.optimizer.moments
    for name in (*MOMENTS, "master"):
        moment = getattr(moments, name)
        assert moment.dtype == torch.float32
        assert moment.data_ptr() != saved["tables"][0][name].data_ptr()


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.01])
def test_amp_trains_the_values_as_without_amp(max_norm, accumulated):
    plain, scaled = make_memory(), make_memory()
    reference = adam_with_memory(plain, adam_eps=1e-6)
    optimizer = build_optimizer_in(scaled, "amp", 1e-6, fp16_init_scale=128)
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


def test_amp_skips_an_update_with_an_overflow_in_a_table():
    memory = make_memory()
    optimizer = build_optimizer_in(memory, "amp", fp16_init_scale=128)
    before = copy.deepcopy(memory.state_dict())
    optimizer.backward(memory(torch.randn(3, WIDTH)).sum())
    memory.values.weight.grad._values()[0] = torch.inf
    assert not optimizer.clip_grad_norm(1.0).isfinite()
    optimizer.step()
    assert optimizer.scaler.get_scale() == 64
    torch.testing.assert_close(dict(memory.state_dict()), dict(before), rtol=0, atol=0)
    learn(memory, optimizer, updates=1)
    assert not torch.equal(memory.values.weight, before["values.weight"])


# --- two workers

TOKENS, UPDATES = 10, 4
# tokens of worker 0 in each update; worker 1 has the rest, none in the third update
SHARES = (6, 3, TOKENS, 5)


def train(rank, workers, shared=False, **options):
    """Update as fairseq's trainer does."""
    make = make_pair if shared else make_memory
    memory = make(batch_norm=True, **options)
    # batch norm cancels the bias before it, whose gradient is only rounding error: a large epsilon
    # keeps Adam from turning that into steps
    optimizer = adam_with_memory(memory, adam_eps=1e-4, memory_lr=0.02)
    norms, outputs = [], []
    for update in range(UPDATES):
        torch.manual_seed(100 + update)
        both = torch.randn(2, TOKENS, WIDTH)
        if workers > 1:
            both = both.split([SHARES[update], TOKENS - SHARES[update]], dim=1)[rank]
        x, slope = both[0].clone().requires_grad_(), both[1]
        optimizer.zero_grad()
        y = memory(x)
        optimizer.backward((y * slope).sum())
        outputs += [y.detach(), x.grad]
        if workers > 1:
            for parameter in optimizer.params:
                parameter.grad /= workers
                dist.all_reduce(parameter.grad)
        optimizer.all_reduce_grads(memory)
        optimizer.multiply_grads(workers / TOKENS)
        norms.append(optimizer.clip_grad_norm(0.2))
        optimizer.step()
    states = {"model": dict(memory.state_dict()), **optimizer.state_dict()}
    return {"norms": torch.stack(norms), "outputs": outputs, **states}


@pytest.mark.parametrize("how", [{}, {"kernel": "plain"}, {"shared": True}])
def test_two_workers_learn_what_one_learns(how, tmp_path):
    first, second = on_two_workers(functools.partial(train, workers=2, **how), tmp_path)
    alone = train(0, 1, **how)
    # exactly equal, or they would drift apart
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    first["outputs"] = [
        torch.cat(parts) for parts in zip(first["outputs"], second["outputs"], strict=True)
    ]
    names = ("norms", "outputs", "model", "state", "tables")
    torch.testing.assert_close(*({name: run[name] for name in names} for run in (first, alone)))


def exchange(rank):
    rows, grads = [
        (torch.tensor([1, 4, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        (torch.tensor([4]), torch.tensor([[10.0, 20.0]])),
    ][rank]
    table, averages = torch.zeros(9, 2), []
    gradient = rows_as_gradient(rows, grads, table.shape)
    for table.grad in (gradient, None if rank else gradient, None):
        averages.append(average_rows(table))
    mean, alone, nothing = averages
    return [mean.indices()[0], mean.values(), alone.to_dense(), nothing]


def test_workers_average_the_union_of_their_rows(tmp_path):
    for rows, grads, alone, nothing in on_two_workers(exchange, tmp_path):
        assert rows.tolist() == [1, 4, 8]
        assert grads.tolist() == [[0.5, 1.0], [6.5, 12.0], [2.5, 3.0]]
        assert alone[[1, 4, 8]].tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
        assert nothing is None
