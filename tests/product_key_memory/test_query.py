"""The query network: batch norm over tokens, and its precision."""

import pytest
import torch
from torch import nn

from fairseq_plugins.product_key_memory.query import QueryNetwork, SyncBatchNorm1d
from tests.gradients import assert_same
from tests.product_key_memory.layer import D, draw

FEATURES = 8


def twins():
    """Return our norm and torch's; they share weights, so both outputs have gradients for them."""
    ours, torchs = SyncBatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES)
    ours.weight.data, ours.bias.data = torch.linspace(-1, 2, FEATURES), torch.arange(FEATURES) / 3
    torchs.weight, torchs.bias = ours.double().weight, ours.bias
    return ours, torchs.double()


def test_batch_norm_equals_torchs():
    ours, torchs = twins()
    for tokens, training in ((2, True), (30, True), (7, True), (4, False)):
        x = (3 * draw(tokens, FEATURES) + torch.arange(FEATURES)).detach().requires_grad_()
        out, expected = (norm.train(training)(x) for norm in (ours, torchs))
        assert_same(out, expected, [x, ours.weight, ours.bias])
        expected = dict(torchs.state_dict())
        # torch also counts batches
        expected.pop("num_batches_tracked", None)
        torch.testing.assert_close(dict(ours.state_dict()), expected)


@pytest.mark.parametrize("offset", [0, 100, 1000])
def test_batch_norm_is_precise_where_the_mean_is_large(offset):
    x, (ours, torchs) = torch.randn(300, FEATURES) + offset, twins()
    exact = torchs(x.double())
    # float32 rounds a number by up to 2^-24 of its size
    tolerance = {"rtol": 0, "atol": 1e-5 + 1e-6 * offset}
    torch.testing.assert_close(ours.float()(x).double(), exact, **tolerance)


def test_batch_norm_stays_in_single_precision():
    network = QueryNetwork(D, 2, 4, batch_norm=True).bfloat16()
    assert {x.dtype for x in network.batch_norm.state_dict().values()} == {torch.float32}
    assert network.double().batch_norm.running_mean.dtype == torch.float64
    network.bfloat16()
    for training in (True, False):
        x = torch.randn(7, D).bfloat16()
        assert network.train(training)(x).dtype == torch.bfloat16
