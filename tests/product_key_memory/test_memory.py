"""The memory layer: the reference, padding, dropout, compilers, torch.func, data parallelism."""

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.product_key_memory import memory as memory_layer
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.product_key_memory.search import KERNELS
from fairseq_plugins.product_key_memory.values import Values
from tests.gradients import assert_same
from tests.product_key_memory.layer import (
    BATCH_NORM,
    EVERYTHING,
    PADDING,
    TOKENS,
    D,
    K,
    draw,
    exact_memory,
)
from tests.reference.product_key_memory import product_key_memory

GATE = {"output": {"gate": True}}
KEYS = pytest.mark.parametrize("keys", memory_layer.KEYS)


@pytest.mark.parametrize("padding", [None, "packed", "in place"])
@KEYS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"knn": 1},
        {"heads": 1, "knn": K},
        BATCH_NORM,
        {"value_dim": 3},
        GATE,
        EVERYTHING,
        {"kernel": "plain", "knn": K},
        {"kernel": "plain", **EVERYTHING},
    ],
)
def test_a_memory_and_its_gradients_equal_the_reference(options, keys, padding, monkeypatch):
    memory = exact_memory(keys=keys, **options)
    if padding == "in place":
        monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, training: False)
    x, mask = draw(TOKENS, D), PADDING if padding else None
    if padding:
        x.data[PADDING] = torch.nan
    # in evaluation, batch norm uses its running statistics
    for training in (True, False) if memory.query.batch_norm else (True,):
        memory.train(training)
        slow = product_key_memory(memory, x, padding and PADDING.tolist())
        assert_same(memory(x, mask), slow, [x, *memory.parameters()])


@KEYS
def test_a_batch_of_sequences_equals_the_reference(keys):
    memory, x, mask = exact_memory(keys=keys), draw(2, TOKENS, D), torch.stack([PADDING, ~PADDING])
    slow = product_key_memory(memory, x.flatten(0, 1), mask.flatten().tolist()).view_as(x)
    assert_same(memory(x, mask), slow, [x, *memory.parameters()])


@pytest.mark.parametrize("kernel", KERNELS)
def test_memories_with_shared_values_equal_the_reference(kernel):
    first = exact_memory(value_dim=3, kernel=kernel)
    second = exact_memory(2, 1, value_dim=3, kernel=kernel, values=first.values, **GATE)
    x = draw(TOKENS, D)
    slow = product_key_memory(second, x + product_key_memory(first, x))
    parameters = torch.nn.ModuleList([first, second]).parameters()
    assert_same(second(x + first(x)), slow, [x, *parameters])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@KEYS
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 2)])
def test_a_memory_without_tokens_has_zero_gradients(shape, keys, kernel, sparse):
    memory = exact_memory(keys=keys, kernel=kernel, sparse=sparse, **EVERYTHING)
    state = copy.deepcopy(memory.state_dict())
    x = draw(*shape, D)
    out = memory(x, torch.ones(shape, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(x))
    out.sum().backward()
    for parameter in (x, *memory.parameters()):
        assert parameter.grad is None or not parameter.grad.to_dense().any()
    torch.testing.assert_close(dict(memory.state_dict()), dict(state), rtol=0, atol=0)


@KEYS
@pytest.mark.parametrize("packed", [True, False])
def test_padding_changes_neither_reads_nor_statistics(keys, packed, monkeypatch):
    monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, training: packed)
    x = draw(TOKENS, D)
    padded, real = (exact_memory(keys=keys, **BATCH_NORM) for _ in range(2))
    for _ in range(2):
        out = padded(x, PADDING)
        torch.testing.assert_close(out[~PADDING], real(x[~PADDING]))
        assert not out[PADDING].any()
    torch.testing.assert_close(list(padded.buffers()), list(real.buffers()))


@pytest.mark.parametrize(
    ("part", "rate"), [("query", "dropout"), ("query", "input_dropout"), ("output", "dropout")]
)
@pytest.mark.parametrize("value_dim", [None, 3])
def test_dropouts_act_in_training_and_not_in_evaluation(part, rate, value_dim):
    plain = exact_memory(value_dim=value_dim)
    memory = exact_memory(value_dim=value_dim, **{part: {rate: 0.5}})
    memory.load_state_dict(plain.state_dict())
    x = draw(TOKENS, D)
    assert not torch.allclose(memory(x), plain(x))
    assert torch.equal(memory.eval()(x), plain(x))


def test_values_start_normal_with_variance_one_over_their_width():
    torch.manual_seed(1)
    memory = ProductKeyMemory(16, 64**2, value_dim=64, query_dim=4)
    values = memory.values.weight
    assert values.shape == (64**2, 64)
    # shares of 262,144 draws within 1, 2 and 3 standard deviations of 1/8
    shares = [(values.abs() < bound / 8).sum().item() / 64**3 for bound in (1, 2, 3)]
    assert shares == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.005)


def test_defaults_are_the_papers():
    with torch.device("meta"):
        memory = ProductKeyMemory(1024)
    assert memory.keys.subkeys.shape == (4, 2, 512, 256 / 2)
    assert memory.values.weight.shape == (512**2, 1024)
    assert memory.knn == 32


@pytest.mark.parametrize(
    ("variant", "mask"),
    [
        ({}, None),
        *(
            pytest.param(variant, mask, marks=pytest.mark.slow)
            for variant in ({"keys": "flat"}, BATCH_NORM, EVERYTHING)
            for mask in (None, PADDING)
        ),
    ],
)
def test_compiled_and_exported_memories_equal_the_eager_one(variant, mask):
    eager = exact_memory(**variant)
    twin = copy.deepcopy(eager)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = draw(TOKENS, D)
    results = []
    for module, memory in ((eager, eager), (compiled, twin)):
        out = module(x, mask)
        gradients = torch.autograd.grad(out.square().sum(), [x, *memory.parameters()])
        results.append([out.detach(), *gradients, *memory.buffers()])
    torch.testing.assert_close(*results)
    inputs = (x.detach(),) if mask is None else (x.detach(), mask)
    exported = torch.export.export(twin.eval(), inputs).module()
    torch.testing.assert_close(exported(*inputs), eager.eval()(*inputs))


@KEYS
def test_a_plain_memory_has_higher_derivatives(keys):
    memory = exact_memory(kernel="plain", keys=keys, **BATCH_NORM)
    assert torch.autograd.gradgradcheck(memory, draw(3, D))


def test_a_fast_memory_refuses_higher_derivatives():
    memory, x = exact_memory(), draw(3, D)
    (grad,) = torch.autograd.grad(memory(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@KEYS
@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_func_gives_the_gradients_that_autograd_gives(keys, kernel):
    memory, x = exact_memory(keys=keys, kernel=kernel), draw(TOKENS, D)
    weights = dict(memory.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(memory, weights, x).square().sum()

    expected = torch.autograd.grad(loss(weights, x), [*weights.values(), x])
    weight_grads, x_grad = torch.func.grad(loss, argnums=(0, 1))(weights, x)
    torch.testing.assert_close([*weight_grads.values(), x_grad], list(expected))
    by_token = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(None, 0))(weights, x)
    torch.testing.assert_close(by_token, x_grad)


def two_memories(**options):
    """Return two memories in sequence that share their values."""
    first = exact_memory(**options)
    return torch.nn.Sequential(first, exact_memory(2, values=first.values, **options))


def test_torch_func_leaves_shared_values_in_their_place():
    pair, x = two_memories(kernel="plain"), draw(TOKENS, D)
    before = dict(pair.named_parameters(remove_duplicate=False))
    assert before["0.values.weight"] is before["1.values.weight"]

    def loss(weights):
        return torch.func.functional_call(pair, weights, x).square().sum()

    weights = {name: weight.detach() for name, weight in pair.named_parameters()}
    gradients = torch.func.grad(loss)(weights)
    after = dict(pair.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is weight for name, weight in before.items())
    pair(x).square().sum().backward()
    for name, weight in pair.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad)


def test_per_sample_gradients_with_batch_norm_equal_those_of_single_samples():
    memory, samples = exact_memory(kernel="plain", **BATCH_NORM), draw(3, TOKENS, D).detach()
    stateless = copy.deepcopy(memory)
    torch.func.replace_all_batch_norm_modules_(stateless)

    def loss(weights, x):
        return torch.func.functional_call(stateless, weights, x).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    gradients = each(dict(stateless.named_parameters()), samples)
    for number, x in enumerate(samples):
        expected = torch.autograd.grad(memory(x).square().sum(), [*memory.parameters()])
        for gradient, one in zip(gradients.values(), expected, strict=True):
            torch.testing.assert_close(gradient[number], one)
    # without running statistics, evaluation normalises by its batch, too
    torch.testing.assert_close(stateless.eval()(samples[0]), memory(samples[0]))


# --- torch's data parallelism


def compare_gradients(rank, meeting, sparse):
    """Compare a worker's gradients with those that one process gets from the whole batch."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    pair, alone = (two_memories(sparse=sparse, **BATCH_NORM) for _ in range(2))
    batch, parallel = draw(2, TOKENS, D).detach(), DistributedDataParallel(pair)
    parallel(batch[rank]).square().sum().backward()
    dist.destroy_process_group()
    # workers average their gradients
    (alone(batch.flatten(0, 1)).square().sum() / 2).backward()
    assert pair[0].values.weight.grad.is_sparse == sparse
    for one, other in zip(pair.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())
    torch.testing.assert_close([*pair.buffers()], [*alone.buffers()])


@pytest.mark.parametrize("sparse", [False, True])
def test_data_parallel_workers_get_the_gradients_of_the_whole_batch(tmp_path, sparse):
    calls = [(rank, tmp_path / "workers", sparse) for rank in (0, 1)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap_async(compare_gradients, calls, chunksize=1).get(300)


# --- adapters, hooks, and weights that are swapped


def test_a_projection_that_was_replaced_or_has_a_hook_is_called():
    memory, x = exact_memory(**GATE), draw(TOKENS, D)
    before, called = memory(x).detach(), []
    for module in memory.modules():
        module.register_forward_hook(lambda module, *_: called.append(module))
    memory(x)
    # the empty dropouts of the query network and the output are called too
    assert set(called) == set(memory.modules())
    linear = memory.query.layers[0]
    memory.query.layers[0] = torch.nn.Sequential(linear, torch.nn.Linear(8, 8).double())
    assert not torch.allclose(memory(x), before)


# --- errors name the argument, its value and the remedy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"knn": 0}, "`knn` is 0: .* from 1 to 25"),
        ({"knn": 26}, "`knn` is 26: .* from 1 to 25"),
        ({"keys": "round"}, "`keys` is 'round': .* product, flat"),
        ({"slots": 26}, "`slots` is 26: .* 25 or 36"),
        ({"query_dim": 7}, "`query_dim` is 7: .* even"),
        ({"values": Values(25, 3)}, r"are 25 and 6, .* have \(25, 3\): .* same"),
        ({"query": QueryNetwork(D, 2, 6)}, "are 2 and 4, .* has 2 and 6: .* same"),
    ],
)
def test_a_memory_refuses_impossible_arguments(options, words):
    arguments = {"slots": K, "heads": 2, "knn": 4, "query_dim": 4, **options}
    with pytest.raises(ValueError, match=words):
        ProductKeyMemory(D, **arguments)


@pytest.mark.parametrize("mask", [torch.zeros(TOKENS), torch.zeros(1) > 0])
def test_a_memory_refuses_a_mask_of_another_shape_or_type(mask):
    with pytest.raises(ValueError, match=r"`padding_mask` is .*: give booleans, \(7,\)"):
        exact_memory()(draw(TOKENS, D), mask)
