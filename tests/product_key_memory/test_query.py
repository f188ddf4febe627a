"""Batch norm of queries beside torch's; :mod:`test_memory` has queries beside the reference."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory.query import QueryNetwork, SyncBatchNorm1d
from tests.gradients import assert_same
from tests.product_key_memory.standalone import draw

WIDTH, FEATURES = 5, 8


def twins():
    ours, torchs = SyncBatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES)
    for norm in (ours, torchs):
        norm.weight.data = torch.linspace(-1, 2, FEATURES)
        norm.bias.data = torch.linspace(3, 1, FEATURES)
    return ours.double(), torchs.double()


def assert_same_state(ours, torchs):
    """All but torch's count of batches."""
    state = dict(torchs.state_dict())
    state.pop("num_batches_tracked", None)
    torch.testing.assert_close(dict(ours.state_dict()), state)


def test_batch_norm_is_that_of_torch():
    ours, torchs = twins()
    # shared, so that both results have a gradient for them
    torchs.weight, torchs.bias = ours.weight, ours.bias
    for tokens in (2, 30, 7):
        x = (3 * draw(tokens, FEATURES) + torch.arange(FEATURES)).detach().requires_grad_()
        assert_same(ours(x), torchs(x), [x, ours.weight, ours.bias])
        assert_same_state(ours, torchs)
    for norm in (ours, torchs):
        norm.eval()
    before = copy.deepcopy(ours.state_dict())
    x = draw(4, FEATURES)
    assert_same(ours(x), torchs(x), [x])
    torch.testing.assert_close(dict(ours.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("offset", [0, 100, 1000])
def test_single_precision_is_enough_where_the_mean_is_large(offset):
    x = torch.randn(300, FEATURES) + offset
    ours, torchs = twins()
    exact, single = torchs(x.double()), ours.float()(x)
    # of a number as large, single precision keeps 2^-24
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-5 + 1e-6 * offset)


def test_a_cast_model_keeps_statistics_that_can_follow_small_changes():
    network = QueryNetwork(WIDTH, 2, 4, batch_norm=True).bfloat16()
    assert {x.dtype for x in network.batch_norm.state_dict().values()} == {torch.float32}
    assert network.double().batch_norm.running_mean.dtype == torch.float64
    network.bfloat16()
    for training in (True, False):
        x = torch.randn(7, WIDTH).bfloat16()
        assert network.train(training)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_computed_again_are_counted_once(reentrant):
    plain = QueryNetwork(WIDTH, 2, 4, batch_norm=True).double()
    again, x = copy.deepcopy(plain), draw(7, WIDTH)
    plain(x).square().sum().backward()
    checkpoint(again, x, use_reentrant=reentrant).square().sum().backward()
    assert_same_state(plain, again)
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
