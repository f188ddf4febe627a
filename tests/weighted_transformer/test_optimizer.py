"""Adam with branch weights: the simplex and the schedule in every precision, and freezing."""

import copy
import itertools

import pytest
import torch
from fairseq.optim.adam import FairseqAdam
from torch import nn

from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, project_to_simplex
from fairseq_plugins.weighted_transformer.optimizer import (
    BranchSchedule,
    FairseqAdamWithBranchWeights,
    schedule_branches,
)
from fairseq_plugins.weighted_transformer.options import BranchOptions
from tests.optimizers import EACH_PRECISION, LOSS_SCALES, adam_options, in_precision
from tests.weighted_transformer.tiny import assert_on_simplex

WIDTH, BRANCHES, FACTOR = 8, 4, 0.7


def make_network(freeze_after=None, parameterization="simplex", factor=FACTOR):
    torch.manual_seed(1)
    kappa, alpha = (
        BranchWeights(BRANCHES, name, parameterization, start="random")
        for name in ("kappa", "alpha")
    )
    network = BranchedFeedForward(WIDTH, 16, kappa, alpha)
    options = {"branch_lr": factor * WIDTH**0.5, "branch_warmup_updates": 5}
    options |= {"branch_parameterization": parameterization}
    options |= {"freeze_branch_weights_after": freeze_after}
    schedule_branches(nn.ModuleList([network]), WIDTH, BranchOptions(**options))
    return network


def test_the_schedule_equals_the_papers_until_weights_are_frozen():
    rates = BranchSchedule(BranchOptions(), depth=512 / 6).learning_rate
    factor = (512 / 6) ** -0.5
    expected = [factor / 8000, factor / 40, factor / 20, factor / 100]
    assert [rates(update) for update in (1, 200, 400, 10_000)] == pytest.approx(expected, rel=1e-12)
    frozen = BranchSchedule(BranchOptions(freeze_branch_weights_after=200), depth=1.0)
    assert [frozen.learning_rate(update) is None for update in (1, 200, 201)] == [0, 0, 1]
    at_once = BranchSchedule(BranchOptions(freeze_branch_weights_after=0), depth=1.0)
    assert at_once.learning_rate(1) is None


def branch_weights(network):
    """Return κ and α, or their logits."""
    return [getattr(layer.weights, layer.weights.name) for layer in (network.fc1, network.fc2)]


def adam(network, precision=None, weight_decay=0.0, **common):
    options = adam_options(_name="adam_with_branch_weights", weight_decay=weight_decay)
    return in_precision(options, network.parameters(), precision, **common)


def learn(network, optimizer, updates=12, seed=2):
    torch.manual_seed(seed)
    for x, y in torch.randn(updates, 2, 6, WIDTH):
        optimizer.zero_grad()
        optimizer.backward((network(x) - y).square().sum())
        optimizer.step()


@EACH_PRECISION
def test_updates_equal_adam_a_schedule_and_a_projection_until_frozen(precision, dtype, common):
    network = make_network(freeze_after=9).to(dtype)
    optimizer = adam(network, precision, weight_decay=0.1, **common)
    weights, seen = branch_weights(network), []
    others = [p for p in network.parameters() if all(p is not weight for weight in weights)]
    # in single precision, as the optimizer's own
    plain, free = ([nn.Parameter(p.detach().float()) for p in each] for each in (weights, others))
    apart = torch.optim.Adam(plain, betas=(0.9, 0.98))
    main = torch.optim.AdamW(free, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
    rounding = {"rtol": 0.02, "atol": 0.02} if dtype != torch.float32 else {}
    torch.manual_seed(2)
    for update in range(1, 13):
        optimizer.zero_grad()
        for x, y in torch.randn(3, 2, 4, WIDTH).to(dtype):
            optimizer.backward((network(x) - y).float().square().sum())
        for copied, weight in zip(plain + free, weights + others, strict=True):
            copied.grad = 0.5 * weight.grad.float() / LOSS_SCALES[precision]
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(0.0)
        optimizer.step()
        main.step()
        if update <= 9:
            apart.param_groups[0]["lr"] = FACTOR * min(update**-0.5, update * 5**-1.5)
            apart.step()
            for weight in plain:
                project_to_simplex(weight)
        seen.append(torch.cat([weight.data for weight in weights]))
        torch.testing.assert_close(weights, plain)
        assert_on_simplex(*(weight.data for weight in weights))
        for one, other in zip(others, free, strict=True):
            torch.testing.assert_close(one.float(), other, **rounding)
    # they moved, also to the edge of the simplex, where only projection keeps them
    assert any((x == 0).any() for x in seen)
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(seen)]
    assert moved == [True] * 8 + [False] * 3


def test_softmax_logits_are_not_projected():
    network = make_network(parameterization="softmax")
    optimizer = adam(network)
    learn(network, optimizer)
    for layer, logits in zip((network.fc1, network.fc2), branch_weights(network), strict=True):
        assert logits.abs().sum() > 1.5
        assert_on_simplex(layer.weights())


@pytest.mark.parametrize("freeze_after", [None, 6])
def test_a_resumed_run_is_the_unbroken_one(freeze_after):
    first, second = make_network(freeze_after), make_network(freeze_after)
    optimizer = adam(first)
    learn(first, optimizer, 5)
    second.load_state_dict(first.state_dict())
    again = adam(second)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, its_optimizer in ((first, optimizer), (second, again)):
        learn(network, its_optimizer, 5, seed=3)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_the_optimizer_without_branch_weights_is_fairseqs_adam():
    one = nn.Linear(3, 2)
    other = copy.deepcopy(one)
    for layer, kind in ((one, FairseqAdamWithBranchWeights), (other, FairseqAdam)):
        optimizer = kind(adam_options(), list(layer.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(layer(torch.ones(3)).sum())
            optimizer.step()
    assert torch.equal(one.weight, other.weight)
