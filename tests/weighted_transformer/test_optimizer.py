"""Adam with branch weights: the simplex and the schedule in every precision, and freezing."""

import copy
import functools
import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.optim.adam import FairseqAdam
from torch import nn

from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward
from fairseq_plugins.weighted_transformer.branch_weights import (
    BranchSchedule,
    BranchWeights,
    project_to_simplex,
)
from fairseq_plugins.weighted_transformer.optimizer import FairseqAdamWithBranchWeights
from tests.optimizers import adam_options, in_precision
from tests.two_workers import on_two_workers
from tests.weighted_transformer.tiny import assert_on_simplex

WIDTH, BRANCHES = 8, 4


def make_network(freeze_after=None, parameterization="simplex", factor=3.0):
    torch.manual_seed(1)
    schedule = BranchSchedule(factor, 5, freeze_after, parameterization == "simplex")
    kappa, alpha = (
        BranchWeights(BRANCHES, name, schedule, parameterization, start="random", total=1)
        for name in ("kappa", "alpha")
    )
    return BranchedFeedForward(WIDTH, 16, kappa, alpha)


def branch_weights(network):
    """Return κ and α, or their logits."""
    return [getattr(layer.weights, layer.weights.name) for layer in (network.fc1, network.fc2)]


def adam(network, **values):
    return FairseqAdamWithBranchWeights(adam_options(**values), list(network.parameters()))


def learn(network, optimizer, updates=12, parts=1, after=lambda update: None, seed=2):
    """Train for some updates, each with the gradients of ``parts`` passes."""
    torch.manual_seed(seed)
    for update in range(1, updates + 1):
        optimizer.zero_grad()
        heads, wanted = torch.randn(2, 6, WIDTH).to(network.fc1.weight.dtype)
        for x, y in zip(heads.chunk(parts), wanted.chunk(parts), strict=True):
            optimizer.backward((network(x) - y).float().square().sum())
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(10.0)
        optimizer.step()
        after(update)


def build_optimizer_in(network, precision, **common):
    if precision is None:
        return adam(network)
    options = adam_options(_name="adam_with_branch_weights")
    return in_precision(options, network.parameters(), precision, fp16_init_scale=4, **common)


PRECISIONS = pytest.mark.parametrize(
    ("precision", "dtype", "common"),
    [
        (None, torch.float32, {}),
        ("amp", torch.float32, {}),
        ("bf16", torch.bfloat16, {}),
        ("fp16", torch.float16, {}),
        ("fp16", torch.float16, {"memory_efficient_fp16": True}),
    ],
)


@PRECISIONS
def test_branch_weights_stay_on_the_simplex(precision, dtype, common):
    network = make_network().to(dtype)
    optimizer = build_optimizer_in(network, precision, **common)
    weights, seen = branch_weights(network), []

    def check(update):
        assert_on_simplex(*(weight.data for weight in weights))
        (group,) = optimizer.optimizer.param_groups[1:]
        for held, ours in zip(group["params"], weights, strict=True):
            assert torch.equal(held.data, ours.data)
        seen.append(torch.cat([weight.data for weight in weights]))

    learn(network, optimizer, parts=3, after=check)
    assert network.fc1.weight.dtype == dtype
    # they moved, also to the edge of the simplex, where only projection keeps them
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(seen))
    assert any((x == 0).any() for x in seen)


def test_an_update_equals_adam_and_a_projection():
    ours, plain = make_network(), make_network()
    optimizer = adam(ours, weight_decay=0.1)
    betas, weights = (0.9, 0.98), branch_weights(plain)
    others = [p for p in plain.parameters() if all(p is not w for w in weights)]
    main = torch.optim.AdamW(others, lr=1e-3, betas=betas, weight_decay=0.1)
    apart = torch.optim.Adam(weights, betas=betas)
    torch.manual_seed(2)
    for update in range(1, 9):
        x, y = torch.randn(2, 6, WIDTH)
        optimizer.zero_grad()
        optimizer.backward((ours(x) - y).square().sum())
        optimizer.step()
        main.zero_grad()
        apart.zero_grad()
        (plain(x) - y).square().sum().backward()
        main.step()
        (group,) = apart.param_groups
        group["lr"] = 3.0 * min(update**-0.5, update * 5**-1.5)
        apart.step()
        for weight in weights:
            project_to_simplex(weight)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@PRECISIONS
def test_frozen_branch_weights_stay_bit_for_bit(precision, dtype, common):
    # small steps, so that the weights do not end in a corner
    network = make_network(freeze_after=4, factor=0.02).to(dtype)
    optimizer, states = build_optimizer_in(network, precision, **common), []
    learn(network, optimizer, 7, after=lambda _: states.append(copy.deepcopy(network.state_dict())))
    *_, before, at_freezing, _, _, last = states
    for name, weight in at_freezing.items():
        frozen = ".weights." in name
        assert torch.equal(last[name], weight) == frozen
        assert not frozen or not torch.equal(before[name], weight)


def test_softmax_logits_are_not_projected():
    network = make_network(parameterization="softmax")
    optimizer = adam(network)
    learn(network, optimizer)
    for layer, logits in zip((network.fc1, network.fc2), branch_weights(network), strict=True):
        assert logits.abs().sum() > 1.5
        assert_on_simplex(layer.weights())


@pytest.mark.parametrize("freeze_after", [None, 6])
def test_a_resumed_run_is_the_unbroken_one(freeze_after):
    first = make_network(freeze_after)
    optimizer = adam(first)
    learn(first, optimizer, 5)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    learn(first, optimizer, 5, seed=3)
    second = make_network(freeze_after)
    again = adam(second)
    second.load_state_dict(saved[0])
    assert_on_simplex(*(weight.data for weight in branch_weights(second)))
    again.load_state_dict(saved[1])
    learn(second, again, 5, seed=3)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_copy_of_a_layer_has_one_schedule_and_takes_the_optimizers_state():
    network = make_network()
    optimizer = adam(network)
    learn(network, optimizer, 2)
    copied = copy.deepcopy(network)
    again = adam(copied)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(network, optimizer, 2, seed=3)
    learn(copied, again, 2, seed=3)
    for one, other in zip(network.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other)


def train_on(rank, legacy):
    """Return the weights of one of two workers, or of a single one (None), after 8 updates."""
    network = make_network()
    ddp, halves = network, 1
    if rank is not None:
        halves = 2
        wrap = functools.partial(LegacyDistributedDataParallel, process_group=dist.group.WORLD)
        ddp = (wrap if legacy else nn.parallel.DistributedDataParallel)(network)
    optimizer = adam(network)
    torch.manual_seed(2)
    for _ in range(8):
        optimizer.zero_grad()
        x, y = (both.chunk(halves)[rank or 0] for both in torch.randn(2, 6, WIDTH))
        # the workers' gradients are averaged
        optimizer.backward(halves * (ddp(x) - y).square().sum())
        if legacy and rank is not None:
            ddp.all_reduce_grads()
        optimizer.step()
        assert_on_simplex(*(weight.data for weight in branch_weights(network)))
    return network.state_dict()


@pytest.mark.parametrize("legacy", [False, True], ids=["pytorch_ddp", "legacy_ddp"])
def test_two_workers_learn_what_one_does(tmp_path, legacy):
    mine, other = on_two_workers(functools.partial(train_on, legacy=legacy), tmp_path)
    for name, value in train_on(None, legacy).items():
        assert torch.equal(mine[name], other[name])
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)


def test_the_optimizer_without_branch_weights_is_fairseqs_adam(caplog):
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(one.state_dict())
    with caplog.at_level(logging.INFO):
        ours = adam(one)
    assert "no parameter is a branch weight: this is fairseq's Adam" in caplog.text
    theirs = FairseqAdam(adam_options(), list(other.parameters()))
    for _ in range(3):
        for layer, optimizer in ((one, ours), (other, theirs)):
            optimizer.zero_grad()
            optimizer.backward(layer(torch.ones(3)).sum())
            optimizer.step()
    assert torch.equal(one.weight, other.weight)
