"""A memory on two workers, its table on both or sharded by columns, beside one worker's."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.fairseq_integration.parameters import set_update_rule
from fairseq_plugins.product_key_memory import values
from fairseq_plugins.product_key_memory.fairseq_memory import MemoryBuilder, keep_shards_apart
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig, FairseqAdamWithMemory
from fairseq_plugins.product_key_memory.options import MemoryOptions
from fairseq_plugins.product_key_memory.sharding import AllColumns
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from tests.product_key_memory.tiny import naming, option_of
from tests.two_workers import on_two_workers

WIDTH, SLOTS, TOKENS, UPDATES = 8, 64, 10, 4
# tokens of worker 0; the rest are worker 1's, in the third update none
SHARES = (6, 3, TOKENS, 5)


class Pair(nn.Module):
    """Two memories, one after the other, with one table of values."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    @property
    def values(self):
        return self.first.values

    def forward(self, x):
        return self.second(x + self.first(x))


def make(sharded, seed=1, shared=False, **options):
    torch.manual_seed(seed)
    sizes = {"slots": SLOTS, "heads": 2, "knn": 3, "query_dim": 4}
    choices = {**sizes, "query_batch_norm": True, "shard_values": sharded, **options}
    memory = ProductKeyMemory(WIDTH, **choices)
    memories = [memory]
    if shared:
        memories.append(ProductKeyMemory(WIDTH, **choices, values_of=memory))
        memory = Pair(*memories)
    for each in memories:
        each.keep_gradient_beside_autograd()
        set_update_rule(each.keys.subkeys, each.table)
    cfg = OmegaConf.structured(AdamWithMemoryConfig)
    # batch norm takes back what the bias before it adds, whose gradient is rounding errors: a large
    # epsilon keeps Adam from making steps of them
    cfg.update({"lr": [0.01], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-4, "memory_lr": 0.02})
    dense = [parameter for parameter in memory.parameters() if parameter.requires_grad]
    return memory, FairseqAdamWithMemory(cfg, dense)


def own_part(x, update, rank, workers):
    if workers == 1:
        return x
    return x.split([SHARES[update], TOKENS - SHARES[update]])[rank]


def learn(memory, optimizer, rank, workers, updates=range(UPDATES)):
    """What fairseq's trainer does in an update; returns the norms and the outputs."""
    norms, outputs = [], []
    for update in updates:
        torch.manual_seed(100 + update)
        x, slope = (own_part(part, update, rank, workers) for part in torch.randn(2, TOKENS, WIDTH))
        x.requires_grad_()
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


def train_padded(rank, **how):
    """Train as on accelerators."""
    with mock.patch.object(values, "pads_rows", return_value=True):
        return train(rank, **how)


def train(rank, workers, sharded, updates=range(UPDATES), resume=None, **options):
    memory, optimizer = make(sharded, **options)
    if resume is not None:
        memory.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
    norms, outputs = learn(memory, optimizer, rank, workers, updates)
    optimizer.optimizer.consolidate_state_dict()
    result = {"norms": norms, "outputs": outputs, "held": tuple(memory.values.shape)}
    if rank == 0:
        result |= {"model": memory.state_dict(), "optimizer": optimizer.state_dict()}
    # the other may not leave before its part is gathered
    if workers > 1:
        dist.barrier()
    return result


@pytest.fixture(scope="module")
def alone():
    return train(0, 1, sharded=False)


def assert_same_training(together, alone, **tolerance):
    same = functools.partial(torch.testing.assert_close, **tolerance)
    same(together[0]["norms"], alone["norms"])
    same(together[1]["norms"], alone["norms"])
    same(dict(together[0]["model"]), dict(alone["model"]))
    for number, whole in enumerate(alone["outputs"]):
        both = torch.cat([worker["outputs"][number] for worker in together])
        same(both, whole)
    for part in ("state", "tables"):
        same(together[0]["optimizer"][part], alone["optimizer"][part])


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("sharded", [False, True])
def test_two_workers_learn_what_one_learns(sharded, search, alone, tmp_path):
    work = functools.partial(train, workers=2, sharded=sharded, search=search)
    together = on_two_workers(work, tmp_path)
    assert_same_training(together, alone)
    columns = WIDTH // 2 if sharded else WIDTH
    assert [worker["held"] for worker in together] == [(SLOTS, columns)] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_two_workers_learn_the_same_from_padded_gradients(sharded, tmp_path):
    work = functools.partial(train_padded, workers=2, sharded=sharded, shared=True)
    alone = train(0, 1, sharded=False, shared=True)
    assert_same_training(on_two_workers(work, tmp_path), alone)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_workers_learn_values_that_memories_share(sharded, tmp_path):
    work = functools.partial(train, workers=2, sharded=sharded, shared=True)
    together = on_two_workers(work, tmp_path)
    assert_same_training(together, train(0, 1, sharded=False, shared=True))
    assert len(together[0]["optimizer"]["tables"]) == 1
    names = [name for name in together[0]["model"] if name.endswith("values")]
    assert names == ["first.values"]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_workers_learn_values_in_bfloat16(sharded, tmp_path):
    choices = {"sharded": sharded, "values_dtype": torch.bfloat16}
    together = on_two_workers(functools.partial(train, workers=2, **choices), tmp_path)
    # sums in another order may be rounded to the next number of 8 bits
    assert_same_training(together, train(0, 1, **choices), rtol=0.02, atol=0.02)
    assert together[0]["model"]["values"].dtype == torch.bfloat16


def stop_and_go_on(rank):
    first = train(rank, 2, sharded=True, updates=range(2))
    checkpoint = [{name: first.get(name) for name in ("model", "optimizer")}]
    dist.broadcast_object_list(checkpoint)
    second = train(rank, 2, True, range(2, UPDATES), copy.deepcopy(checkpoint[0]))
    second["norms"] = torch.cat([first["norms"], second["norms"]])
    second["outputs"] = first["outputs"] + second["outputs"]
    return second


def test_a_sharded_training_resumes_from_a_checkpoint_of_the_whole(alone, tmp_path):
    assert_same_training(on_two_workers(stop_and_go_on, tmp_path), alone)


def exchange(rank):
    table, columns = torch.zeros(9, 2), AllColumns(2)
    rows, grads = [
        (torch.tensor([1, 4, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        (torch.tensor([4]), torch.tensor([[10.0, 20.0]])),
    ][rank]
    mean = columns.average(table, rows_as_gradient(rows, grads, table.shape))
    alone = columns.average(
        table, rows_as_gradient(rows, grads, table.shape) if rank == 0 else None
    )
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
    text = (
        "{shard_values} with 2 workers and values of width 5: each takes as many columns, so the "
        "number of workers must divide {value_dim}"
    )
    sizes = {"slots": 16, "knn": 2, "query_dim": 4, "value_dim": 5, "shard_values": True}
    with pytest.raises(ValueError, match=naming(text, "`{}`".format)):
        ProductKeyMemory(WIDTH, **sizes)
    options = {f"memory_{name}": value for name, value in sizes.items()}
    with pytest.raises(ValueError, match=naming(text, option_of)):
        MemoryBuilder(MemoryOptions(**options)).build(WIDTH)
    memory, optimizer = make(sharded=True)
    with pytest.raises(ValueError, match=r"have not been gathered: .* on worker 0$"):
        memory.state_dict()
    options |= {"memory_value_dim": 4, "memory_optimizer": "adam_with_memory"}
    in_fairseq = MemoryBuilder(MemoryOptions(**options)).build(WIDTH)
    with pytest.raises(ValueError, match=r" 0; in fairseq, leave out --no-save-optimizer-state$"):
        in_fairseq.state_dict()
    with pytest.raises(ValueError, match=r"^a memory's values are sharded over workers: call cons"):
        optimizer.state_dict()
    memory.gather_values()
    return memory.state_dict()["values"].shape == (SLOTS, WIDTH) if rank == 0 else True


def test_what_workers_cannot_share_is_refused(tmp_path):
    assert on_two_workers(refuse, tmp_path) == [True, True]
