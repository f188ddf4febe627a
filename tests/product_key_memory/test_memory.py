"""The memory layer and its queries: the reference, padding, dropout, batch norm, compilers."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.product_key_memory import memory as memory_layer
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.query import QueryNetwork, SyncBatchNorm1d
from fairseq_plugins.product_key_memory.search import SEARCHES
from fairseq_plugins.product_key_memory.usage import MemoryUsage
from tests.gradients import assert_same
from tests.product_key_memory.layer import EVERYTHING, PADDING, TOKENS, D, K, draw, exact_memory
from tests.reference.product_key_memory import product_key_memory

KEYS = pytest.mark.parametrize("keys", ["product", "flat"])


@pytest.mark.parametrize("padding", [None, "packed", "in place"])
@KEYS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"knn": 1},
        {"knn": K},
        {"heads": 1, "knn": 7},
        {"query_batch_norm": True},
        {"query_layer_norm": True},
        {"query_hidden_dims": (5,)},
        {"value_dim": 3},
        {"output_norm": True},
        {"output_gate": True},
        {"search": "plain"},
        {"search": "plain", "knn": K},
        {"search": "plain", **EVERYTHING},
        EVERYTHING,
    ],
)
def test_values_and_all_gradients_equal_the_reference(options, keys, padding, monkeypatch):
    memory = exact_memory(keys=keys, **options)
    if padding == "in place":
        monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, training: False)
    x, mask = draw(TOKENS, D), PADDING if padding else None
    if padding:
        x.data[PADDING] = torch.nan
    # in evaluation, batch norm uses its running statistics
    for training in (True, False) if memory.query_network.batch_norm else (True,):
        memory.train(training)
        slow = product_key_memory(memory, x, padding and PADDING.tolist())
        assert_same(memory(x, mask), slow, [x, *memory.parameters()])


@KEYS
def test_a_batch_of_sequences_is_read_as_the_reference_reads_its_tokens(keys):
    memory, x, mask = exact_memory(keys=keys), draw(2, TOKENS, D), torch.stack([PADDING, ~PADDING])
    slow = product_key_memory(memory, x.flatten(0, 1), mask.flatten().tolist()).view_as(x)
    assert_same(memory(x, mask), slow, [x, *memory.parameters()])


@pytest.mark.parametrize("search", ["torch", "plain"])
def test_shared_values_and_all_gradients_equal_the_reference(search):
    first = exact_memory(value_dim=3, search=search)
    second = exact_memory(2, value_dim=3, search=search, heads=1, output_gate=True, values_of=first)
    x = draw(TOKENS, D)
    slow = product_key_memory(second, x + product_key_memory(first, x))
    parameters = torch.nn.ModuleList([first, second]).parameters()
    assert_same(second(x + first(x)), slow, [x, *parameters])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@KEYS
@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 2)])
def test_no_tokens_or_padding_alone_have_zero_gradients(shape, keys, search, sparse):
    memory = exact_memory(keys=keys, search=search, sparse=sparse, **EVERYTHING)
    state = copy.deepcopy(memory.state_dict())
    x = draw(*shape, D)
    out = memory(x, torch.ones(shape, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(x))
    out.sum().backward()
    for parameter in (x, *memory.parameters()):
        assert parameter.grad is None or not parameter.grad.to_dense().any()
    torch.testing.assert_close(dict(memory.state_dict()), dict(state), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"value_dim": 3}, {"output_norm": True}, {"output_gate": True}, EVERYTHING]
)
def test_a_memory_can_start_with_an_output_of_zero_and_learn(options):
    memory = ProductKeyMemory(D, slots=K, knn=4, query_dim=4, zero_init=True, **options).double()
    x = draw(TOKENS, D)
    out = memory(x)
    assert not out.any()
    out.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in memory.parameters())


@KEYS
@pytest.mark.parametrize("packed", [True, False])
def test_reads_and_statistics_are_those_of_real_tokens(keys, packed, monkeypatch):
    monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, training: packed)
    x = draw(TOKENS, D)
    padded, real = (exact_memory(keys=keys, query_batch_norm=True) for _ in range(2))
    for memory, tokens, mask in ((padded, x, PADDING), (real, x[~PADDING], None)):
        # one-hot values, so the output shows which slots were read
        memory.values.data = torch.eye(K, dtype=torch.float64)[:, :D].contiguous()
        memory.usage = MemoryUsage(K, 2, by_head=True)
        out = memory(tokens, mask)
        assert memory.usage.tokens == (~PADDING).sum()
        assert memory.usage.reads.sum(1).tolist() == pytest.approx([4.0, 4.0])
        torch.testing.assert_close(memory.usage.total()[:D], out.detach().sum(0))
    torch.testing.assert_close(list(padded.buffers()), list(real.buffers()))


@pytest.mark.parametrize("training", [True, False])
def test_a_recomputed_pass_does_as_the_first_one(training, monkeypatch):
    """The first pass has no gradients, as with --checkpoint-activations on an accelerator."""
    rule = memory_layer.packs_tokens
    monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, mode: rule(x.to("meta"), mode))
    memory = exact_memory(value_dropout=0.3).train(training)
    x, found = draw(TOKENS, D), []
    for grad in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(grad):
            found.append(memory(x, PADDING).detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("option", ["query_dropout", "input_dropout", "value_dropout"])
@pytest.mark.parametrize("value_dim", [None, 3])
def test_dropouts_act_in_training_and_not_in_evaluation(option, value_dim):
    plain, memory = (exact_memory(value_dim=value_dim, **given) for given in ({}, {option: 0.5}))
    x = draw(TOKENS, D)
    assert not torch.allclose(memory(x), plain(x))
    assert torch.equal(memory.eval()(x), plain(x))


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"keys": "flat"}, {"sparse": True}])
def test_half_precision_runs_and_comes_near_single_precision(options):
    # all slots are read, so rounding cannot change which ones
    memory = exact_memory(**{**options, "knn": K}).bfloat16()
    x = torch.randn(3, TOKENS, D).bfloat16().requires_grad_()
    padding = PADDING.expand(3, -1)
    out = memory(x, padding)
    assert out.dtype == torch.bfloat16
    out.square().sum().backward()
    for parameter in (x, *memory.parameters()):
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.to_dense().isfinite().all()
    expected = copy.deepcopy(memory).float()(x.float(), padding)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_values_start_normal_with_variance_one_over_their_width():
    torch.manual_seed(1)
    memory = ProductKeyMemory(16, 64**2, value_dim=64, query_dim=4)
    assert memory.values.shape == (64**2, 64)
    # shares of 262,144 draws within 1, 2 and 3 standard deviations of 1/8
    shares = [(memory.values.abs() < bound / 8).sum().item() / 64**3 for bound in (1, 2, 3)]
    assert shares == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.005)


def test_defaults_are_the_papers():
    with torch.device("meta"):
        memory = ProductKeyMemory(1024)
    shapes = {name: tuple(p.shape) for name, p in memory.named_parameters()}
    assert shapes == {
        "query_network.layers.0.weight": (4 * 256, 1024),
        "query_network.layers.0.bias": (4 * 256,),
        "keys.subkeys": (4, 2, 512, 128),
        "values": (512**2, 1024),
    }
    assert memory.knn == 32


# --- compilers, and the meta device

VARIANTS = pytest.mark.parametrize(
    "variant", [{}, {"keys": "flat"}, {"query_batch_norm": True}, EVERYTHING]
)
MASKS = pytest.mark.parametrize("mask", [None, PADDING], ids=["", "padded"])


@pytest.mark.parametrize(
    ("variant", "mask"),
    [
        ({}, None),
        *(
            pytest.param(variant, mask, marks=pytest.mark.slow)
            for variant in ({"keys": "flat"}, {"query_batch_norm": True}, EVERYTHING)
            for mask in (None, PADDING)
        ),
    ],
)
def test_a_compiled_and_an_exported_memory_are_one_graph_with_the_same_gradients(variant, mask):
    eager = exact_memory(**variant)
    twin = copy.deepcopy(eager)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = draw(TOKENS, D)
    found = []
    for module, memory in ((eager, eager), (compiled, twin)):
        out = module(x, mask)
        gradients = torch.autograd.grad(out.square().sum(), [x, *memory.parameters()])
        found.append([out.detach(), *gradients, *memory.buffers()])
    torch.testing.assert_close(*found)
    given = (x.detach(),) if mask is None else (x.detach(), mask)
    exported = torch.export.export(twin.eval(), given).module()
    torch.testing.assert_close(exported(*given), eager.eval()(*given))


@VARIANTS
@MASKS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_memory_on_the_meta_device_gives_shapes(variant, mask, training, sparse):
    memory = exact_memory(sparse=sparse, **variant).to("meta").train(training)
    x = torch.empty(TOKENS, D, dtype=torch.float64, device="meta", requires_grad=True)
    out = memory(x, None if mask is None else mask.to("meta"))
    out.sum().backward()
    assert out.is_meta
    assert out.shape == x.grad.shape == x.shape
    assert memory.values.grad.shape == memory.values.shape


@KEYS
def test_a_plain_memory_has_higher_derivatives(keys):
    memory = exact_memory(search="plain", keys=keys, query_batch_norm=True)
    assert torch.autograd.gradgradcheck(memory, draw(3, D))


FEATURES = 8


def twins():
    """Return our norm and torch's; they share weights, so both outputs have gradients for them."""
    ours, torchs = SyncBatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES)
    ours.weight.data, ours.bias.data = torch.linspace(-1, 2, FEATURES), torch.arange(FEATURES) / 3
    torchs.weight, torchs.bias = ours.double().weight, ours.bias
    return ours, torchs.double()


def test_batch_norm_is_that_of_torch():
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
def test_single_precision_is_enough_where_the_mean_is_large(offset):
    x, (ours, torchs) = torch.randn(300, FEATURES) + offset, twins()
    exact = torchs(x.double())
    # float32 rounds a number by up to 2^-24 of its size
    tolerance = {"rtol": 0, "atol": 1e-5 + 1e-6 * offset}
    torch.testing.assert_close(ours.float()(x).double(), exact, **tolerance)


def test_a_cast_model_keeps_statistics_that_can_follow_small_changes():
    network = QueryNetwork(D, 2, 4, batch_norm=True).bfloat16()
    assert {x.dtype for x in network.batch_norm.state_dict().values()} == {torch.float32}
    assert network.double().batch_norm.running_mean.dtype == torch.float64
    network.bfloat16()
    for training in (True, False):
        x = torch.randn(7, D).bfloat16()
        assert network.train(training)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_computed_again_are_counted_once(reentrant):
    plain = QueryNetwork(D, 2, 4, batch_norm=True).double()
    again, x = copy.deepcopy(plain), draw(7, D)
    plain(x).square().sum().backward()
    checkpoint(again, x, use_reentrant=reentrant).square().sum().backward()
    found, expected = (
        [*network.buffers(), *(p.grad for p in network.parameters())] for network in (again, plain)
    )
    torch.testing.assert_close(found, expected)
