"""The query network: batch norm over tokens, and its precision."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from fairseq_plugins.product_key_memory.query import QueryNetwork, SyncBatchNorm1d
from tests.gradients import assert_same
from tests.product_key_memory.layer import PADDING, TOKENS, D, draw

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
        expected, state = dict(torchs.state_dict()), dict(ours.state_dict())
        # torch also counts batches
        expected.pop("num_batches_tracked", None)
        torch.testing.assert_close(state, expected)
        # fairseq's checkpoints do not say by which version of a class they were written
        ours.load_state_dict(state)


def test_torch_measures_the_statistics_of_an_averaged_model_again():
    averages = []
    for norm in twins():
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(D, FEATURES).double(), norm)
        averages.append(AveragedModel(network, use_buffers=True))
        for scale in (1, 2):
            nn.init.normal_(network[0].weight, scale)
            network(scale * draw(9, D))
            averages[-1].update_parameters(network)
        # batches of different sizes
        update_bn([draw(tokens, D).detach() for tokens in (4, 30, 2)], averages[-1])
        assert norm.momentum == 0.1
    ours, torchs = (average.module[1] for average in averages)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    torch.testing.assert_close(ours.running_var, torchs.running_var)


def test_a_batch_without_tokens_does_not_count_in_an_average():
    norm, other = (SyncBatchNorm1d(FEATURES).double() for _ in range(2))
    norm.momentum = other.momentum = None
    x = draw(3, 5, FEATURES)
    for batch in x:
        norm(batch, torch.zeros(5, dtype=torch.bool))
        norm(batch)
        other(batch)
    torch.testing.assert_close(norm.state_dict(), other.state_dict())


@pytest.mark.parametrize("tokens", [None, ~PADDING])
def test_a_query_network_takes_torchs_batch_norm(tokens):
    network, x = QueryNetwork(D, 2, 4, batch_norm=True).double(), draw(TOKENS, D)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(network))
    assert isinstance(converted.batch_norm, nn.SyncBatchNorm)
    for training in (True, False):
        queries, expected = (each.train(training)(x, tokens) for each in (converted, network))
        # queries of padding are not read
        counted = slice(None) if tokens is None else tokens
        torch.testing.assert_close(queries[counted], expected[counted])


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
