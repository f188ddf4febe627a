"""Two workers train a memory, with a whole or a sharded table, as one worker does."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.fairseq_layers import keep_shards_apart
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.options import MemoryBuilder, MemoryOptions
from fairseq_plugins.product_key_memory.sharding import AllColumns
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.product_key_memory.layer import SLOTS, WIDTH, adam_with_memory, make_memory, make_pair
from tests.two_workers import on_two_workers

TOKENS, UPDATES = 10, 4
# tokens of worker 0 in each update; worker 1 has the rest, none in the third update
SHARES = (6, 3, TOKENS, 5)


def make(sharded, seed=1, shared=False, **choices):
    build = make_pair if shared else make_memory
    memory = build(seed=seed, query_batch_norm=True, shard_values=sharded, **choices)
    # batch norm cancels the bias before it, whose gradient is only rounding error: a large epsilon
    # keeps Adam from turning that into steps
    return memory, adam_with_memory(memory, adam_eps=1e-4, memory_lr=0.02)


def learn(memory, optimizer, rank, workers, updates=range(UPDATES)):
    """Update as fairseq's trainer does; return the gradient norms and the outputs."""
    norms, outputs = [], []
    for update in updates:
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
    return torch.stack(norms), outputs


def train(rank, workers, sharded, updates=range(UPDATES), resume=None, padded=False, **options):
    memory, optimizer = make(sharded, **options)
    if resume is not None:
        memory.load_state_dict(resume.pop("model"))
        optimizer.load_state_dict(resume)
    # accelerators pad row gradients, CPUs do not
    with mock.patch.object(values, "pads_rows", return_value=padded):
        norms, outputs = learn(memory, optimizer, rank, workers, updates)
    optimizer.optimizer.consolidate_state_dict()
    result = {"norms": norms, "outputs": outputs, "shape": tuple(memory.values.shape)}
    result["statistics"] = [x for name, x in memory.named_buffers() if "running" in name]
    if rank == 0:
        result |= {"model": dict(memory.state_dict()), **optimizer.state_dict()}
    # a worker must not exit before its part is gathered
    if workers > 1:
        dist.barrier()
    return result


def assert_same_training(together, alone, **tolerance):
    first, second = together
    # exactly equal, or they would drift apart
    torch.testing.assert_close(first["statistics"], second["statistics"], rtol=0, atol=0)
    first["outputs"] = [
        torch.cat(parts) for parts in zip(first["outputs"], second["outputs"], strict=True)
    ]
    torch.testing.assert_close(second["norms"], alone["norms"], **tolerance)
    compared = ("norms", "outputs", "model", "state", "tables")
    found, expected = ({name: run[name] for name in compared} for run in (first, alone))
    torch.testing.assert_close(found, expected, **tolerance)


BF16 = {"values_dtype": torch.bfloat16}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"search": "torch"},
        {"search": "plain"},
        {"shared": True},
        {"shared": True, "padded": True},
        BF16,
    ],
)
def test_two_workers_learn_what_one_learns(how, sharded, tmp_path):
    together = on_two_workers(functools.partial(train, workers=2, sharded=sharded, **how), tmp_path)
    # sums in another order may be rounded to the neighboring bfloat16 number
    tolerance = {"rtol": 0.02, "atol": 0.02} if how is BF16 else {}
    alone = {name: value for name, value in how.items() if name not in ("search", "padded")}
    assert_same_training(together, train(0, 1, sharded=False, **alone), **tolerance)
    columns = WIDTH // 2 if sharded else WIDTH
    assert [worker["shape"] for worker in together] == [(SLOTS, columns)] * 2
    assert len(together[0]["tables"]) == 1


def stop_and_go_on(rank):
    first = train(rank, 2, sharded=True, updates=range(2))
    saved = "model", "state", "param_groups", "tables"
    checkpoint = [{name: first.get(name) for name in saved}]
    dist.broadcast_object_list(checkpoint)
    second = train(rank, 2, True, range(2, UPDATES), copy.deepcopy(checkpoint[0]))
    second["norms"] = torch.cat([first["norms"], second["norms"]])
    second["outputs"] = first["outputs"] + second["outputs"]
    return second


def test_a_sharded_training_resumes_from_a_checkpoint_of_the_whole(tmp_path):
    alone = train(0, 1, sharded=False)
    assert_same_training(on_two_workers(stop_and_go_on, tmp_path), alone)


def exchange(rank):
    table, columns = torch.zeros(9, 2), AllColumns(2)
    rows, grads = [
        (torch.tensor([1, 4, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        (torch.tensor([4]), torch.tensor([[10.0, 20.0]])),
    ][rank]
    own = rows_as_gradient(rows, grads, table.shape)
    mean, alone = (columns.average(table, given) for given in (own, None if rank else own))
    return [mean.indices()[0], mean.values(), alone.to_dense(), columns.average(table, None)]


def test_what_travels_is_the_union_of_the_rows(tmp_path):
    for rows, grads, alone, nothing in on_two_workers(exchange, tmp_path):
        assert rows.tolist() == [1, 4, 8]
        assert grads.tolist() == [[0.5, 1.0], [6.5, 12.0], [2.5, 3.0]]
        assert alone[[1, 4, 8]].tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
        assert nothing is None


def wrap(rank):
    memory = make(sharded=True)[0]
    before = memory.values.detach().clone()
    keep_shards_apart(memory)
    DistributedDataParallel(memory)
    return [before, memory.values.detach()]


def test_torchs_data_parallelism_leaves_each_worker_its_columns(tmp_path):
    (first, of_first), (second, of_second) = on_two_workers(wrap, tmp_path)
    assert not torch.equal(first, second)
    assert torch.equal(first, of_first)
    assert torch.equal(second, of_second)


def refuse(rank):
    sizes = {"slots": 16, "knn": 2, "query_dim": 4, "value_dim": 5, "shard_values": True}
    with pytest.raises(ValueError, match=r"^`shard_values` with 2 workers .* `value_dim`"):
        ProductKeyMemory(WIDTH, **sizes)
    options = {f"memory_{name}": value for name, value in sizes.items()}
    with pytest.raises(ValueError, match=r"^--memory-shard-values with 2 .* --memory-value-dim"):
        MemoryBuilder(MemoryOptions(**options)).build(WIDTH)
    memory, optimizer = make(sharded=True)
    with pytest.raises(ValueError, match=r"call gather_values\(\) on all workers"):
        memory.state_dict()
    options |= {"memory_value_dim": 4, "memory_optimizer": "adam_with_memory"}
    in_fairseq = MemoryBuilder(MemoryOptions(**options)).build(WIDTH)
    with pytest.raises(ValueError, match="in fairseq, leave out --no-save-optimizer-state"):
        in_fairseq.state_dict()
    with pytest.raises(ValueError, match=r"call consolidate_state_dict\(\)"):
        optimizer.state_dict()
    memory.gather_values()
    return memory.state_dict()["values"].shape == (SLOTS, WIDTH) if rank == 0 else True


def test_what_workers_cannot_share_is_refused(tmp_path):
    assert on_two_workers(refuse, tmp_path) == [True, True]
