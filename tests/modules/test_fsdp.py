"""Networks whose layers FSDP shards over two processes compute what they compute alone."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from tests.segment_language_model.networks import NETWORKS, build, draw, read_segments


def loss_of_segments(network, x):
    """Return the outputs of three segments, and a loss of them, with the penalty of spans."""
    y, _ = read_segments(network, x.split(4, dim=1))
    penalty = network.span_penalty() if hasattr(network, "span_penalty") else 0.0
    return y, y.square().sum(), penalty


def compare_on_one_of_two(rank, folder, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    x, whole = draw(4, 12), build(name)
    sharded = build(name)
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    y, loss, penalty = loss_of_segments(whole, x)
    (loss / 2 + penalty).backward()
    streams = slice(2 * rank, 2 * rank + 2)
    part, loss, penalty = loss_of_segments(sharded, x[streams])
    loss.backward()
    if not isinstance(penalty, float):
        penalty.backward()
    torch.testing.assert_close(part, y[streams])
    expected = {key: weight.grad for key, weight in whole.named_parameters()}
    actual = {key: weight.grad.full_tensor() for key, weight in sharded.named_parameters()}
    torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        text = x[streams].split(1, dim=1)
        read, _ = read_segments(sharded.eval(), text)
        torch.testing.assert_close(read, part)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compute_the_same_with_sharded_layers(name, tmp_path):
    # a fork has what this process has imported
    mp.start_processes(compare_on_one_of_two, (tmp_path, name), nprocs=2, start_method="fork")
