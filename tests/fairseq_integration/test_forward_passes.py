"""Recomputed forward passes are recognized; inference caches what it computes from the weights."""

import copy
import pickle

import pytest
import torch
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.fairseq_integration.forward_passes import InferenceCache, is_recomputed


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.passes = []

    def forward(self, x):
        self.passes.append(is_recomputed())
        return super().forward(x)


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (lambda layer, x: layer(x), [False]),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=False), [False, True]),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=True), [False, True]),
        (lambda layer, x: checkpoint_wrapper(layer)(x), [False, True]),
    ],
    ids=["plain", "checkpoint", "reentrant checkpoint", "fairseq's checkpoint"],
)
def test_the_second_pass_of_activation_checkpointing_is_known(run, passes):
    layer = Layer()
    run(layer, torch.ones(3, 2, requires_grad=True)).sum().backward()
    assert layer.passes == passes
    with torch.no_grad():
        layer(torch.ones(3, 2))
    assert layer.passes == [*passes, False]


class Summing:
    """The cached sum of weights, and how many times it was computed."""

    def __init__(self):
        self.cache = InferenceCache()
        self.computed = 0

    def __call__(self, weights):
        def compute():
            self.computed += 1
            return sum(weight.detach().double().sum().item() for weight in weights)

        return self.cache.get(weights, compute)


@pytest.fixture
def weights():
    return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]


def test_nothing_is_recomputed_while_the_weights_stay_unless_it_is_cleared(weights):
    total = Summing()
    first = total(weights)
    (weights[0].sum() + weights[1].sum()).backward()
    # any iterable of weights will do
    assert total(iter(weights)) == first
    # like an update of fairseq's optimizers, which autograd does not notice
    weights[0].data.mul_(2)
    assert total(weights) == first
    assert total.computed == 1
    total.cache.clear()
    assert total(weights) == total(weights) != first
    assert total.computed == 2
    # copies start empty
    for other in (copy.deepcopy(total), pickle.loads(pickle.dumps(total))):
        assert other(weights) == total(weights)
        assert (total.computed, other.computed) == (2, 3)


def give_other_data_in_the_same_place(weights):
    place = weights[1].data_ptr()
    # once the first data is freed, other data soon gets the same address
    weights[1].data = torch.empty(0)
    others = [torch.randn(3)]
    while others[-1].data_ptr() != place and len(others) < 500:
        others.append(torch.randn(3))
    weights[1].data = others[-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights[1].detach().add_(1),
        lambda weights: setattr(weights[1], "data", weights[1].data + 1),
        give_other_data_in_the_same_place,
        lambda weights: weights.__setitem__(1, nn.Parameter(torch.randn(3))),
    ],
    ids=["add", "other data", "other data in the same place", "another parameter"],
)
def test_it_is_recomputed_once_when_a_weight_changes(weights, change):
    total = Summing()
    before = total(weights)
    change(weights)
    after = total(weights)
    assert total(weights) == after != before
    assert total.computed == 2
    assert after == sum(weight.detach().double().sum().item() for weight in weights)
