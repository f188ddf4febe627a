"""Queries: the reference's, batch norm beside torch's and over two workers, dropout."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory.query import QueryNetwork, SyncBatchNorm1d
from tests.gradients import assert_same
from tests.product_key_memory.standalone import random_norms
from tests.reference.product_key_memory import queries as reference_queries
from tests.two_workers import on_two_workers

TOKENS, WIDTH, HEADS, QUERY = 7, 5, 2, 4
FEATURES = HEADS * QUERY


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make(seed=1, **options):
    """A network with random weights also where they start at 0 or 1."""
    torch.manual_seed(seed)
    network = QueryNetwork(WIDTH, HEADS, QUERY, **options).double()
    random_norms(network.batch_norm, network.layer_norm)
    return network


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("hidden", [(), (6,), (6, 3)])
def test_queries_and_gradients_equal_the_reference(hidden, batch_norm, layer_norm, training):
    network = make(hidden_dims=hidden, batch_norm=batch_norm, layer_norm=layer_norm)
    network.train(training)
    x = draw(TOKENS, WIDTH).requires_grad_()
    slow = torch.stack([torch.stack(q) for q in reference_queries(network, list(x), training)])
    fast = network(x)
    assert fast.shape == (TOKENS, HEADS, QUERY)
    assert_same(fast, slow, [x, *network.parameters()])


def twins():
    torch.manual_seed(1)
    ours, torchs = SyncBatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES)
    for norm in (ours, torchs):
        norm.weight.data = torch.linspace(-1, 2, FEATURES)
        norm.bias.data = torch.linspace(3, 1, FEATURES)
    return ours.double(), torchs.double()


def state_of(norm):
    """All but torch's count of batches."""
    state = dict(norm.state_dict())
    state.pop("num_batches_tracked", None)
    return state


def assert_same_state(one, other):
    torch.testing.assert_close(state_of(one), state_of(other))


def test_batch_norm_is_that_of_torch():
    ours, torchs = twins()
    # shared, so that both results have a gradient for them
    torchs.weight, torchs.bias = ours.weight, ours.bias
    for tokens in (2, 30, 7):
        x = (3 * draw(tokens, FEATURES) + torch.arange(FEATURES)).requires_grad_()
        assert_same(ours(x), torchs(x), [x, ours.weight, ours.bias])
        assert_same_state(ours, torchs)
    for norm in (ours, torchs):
        norm.eval()
    before = copy.deepcopy(ours.state_dict())
    x = draw(4, FEATURES).requires_grad_()
    assert_same(ours(x), torchs(x), [x])
    torch.testing.assert_close(dict(ours.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("offset", [0, 100, 1000])
def test_single_precision_is_enough_where_the_mean_is_large(offset):
    x = torch.randn(300, FEATURES) + offset
    ours, torchs = twins()
    exact, single = torchs(x.double()), ours.float()(x)
    # of a number as large, single precision keeps 2^-24
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-5 + 1e-6 * offset)


# each of the batches of two workers: how many of 7 tokens the first worker has
SPLITS = [7, 0, 2, 4]


def split_work(rank):
    """Outputs, gradients and running statistics of a worker that has its part of the tokens."""
    return [of_part(network_part(first, rank)) for first in SPLITS]


def network_part(first, rank):
    """The tokens of a worker, and how much each of its outputs weighs in the loss."""
    torch.manual_seed(3)
    x, weight = draw(TOKENS, WIDTH), draw(TOKENS, HEADS, QUERY)
    part = slice(None) if rank is None else (slice(0, first), slice(first, None))[rank]
    return x[part], weight[part]


def of_part(part):
    x, weight = part
    network = make(hidden_dims=(6,), batch_norm=True)
    x.requires_grad_()
    out = network(x)
    (out * weight).sum().backward()
    return {
        "out": out.detach(),
        "x": x.grad,
        "parameters": [p.grad for p in network.parameters()],
        "statistics": list(network.buffers()),
    }


def test_two_workers_are_normalised_as_one_with_the_tokens_of_both(tmp_path):
    whole = of_part(network_part(None, None))
    for one, other in zip(*on_two_workers(split_work, tmp_path), strict=True):
        for name in ("out", "x"):
            torch.testing.assert_close(torch.cat([one[name], other[name]]), whole[name])
        pairs = zip(one["parameters"], other["parameters"], strict=True)
        torch.testing.assert_close([a + b for a, b in pairs], whole["parameters"])
        for worker in (one, other):
            torch.testing.assert_close(worker["statistics"], whole["statistics"])
        # not only all but alike: they stay the same for ever
        for a, b in zip(one["statistics"], other["statistics"], strict=True):
            assert torch.equal(a, b)


def test_a_cast_model_keeps_statistics_that_can_follow_small_changes():
    network = QueryNetwork(WIDTH, HEADS, QUERY, batch_norm=True).bfloat16()
    norm = network.batch_norm
    assert {tensor.dtype for tensor in (norm.weight, norm.running_mean, norm.running_var)} == {
        torch.float32
    }
    assert network.double().batch_norm.running_mean.dtype == torch.float64
    network.bfloat16()
    x = draw(TOKENS, WIDTH).bfloat16()
    for training in (True, False):
        assert network.train(training)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_computed_again_are_counted_once(reentrant):
    plain, again = (make(seed=3, batch_norm=True) for _ in range(2))
    x = draw(TOKENS, WIDTH).requires_grad_()
    plain(x).square().sum().backward()
    checkpoint(again, x, use_reentrant=reentrant).square().sum().backward()
    assert_same_state(plain.batch_norm, again.batch_norm)
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
