"""The memory layer: the reference's values and gradients, padding, sparse gradients, dropout."""

import copy
import importlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fairseq_plugins.product_key_memory import cpu_kernels, search, values
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage
from tests.gradients import assert_same
from tests.product_key_memory.test_values import Held
from tests.product_key_memory.tiny import NO_FAISS, REFUSED, naming
from tests.reference.product_key_memory import product_key_memory

PACKAGE = "fairseq_plugins.product_key_memory"
WIDTH, SLOTS, TOKENS = 6, 25, 7
PADDING = [False, True, False, False, True, True, False]


def make(seed=1, **options):
    """A memory of 2 heads that read 4 slots each, in double precision, random all over."""
    torch.manual_seed(seed)
    sizes = {"slots": SLOTS, "heads": 2, "knn": 4, "query_dim": 4}
    memory = ProductKeyMemory(WIDTH, **{**sizes, **options}).double()
    network = memory.query_network
    for norm in (network.batch_norm, network.layer_norm):
        if norm is not None:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    if network.batch_norm is not None:
        network.batch_norm.running_mean.normal_()
        network.batch_norm.running_var.uniform_(0.5, 2)
    return memory


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


EVERYTHING = {
    "query_hidden_dims": (5, 3),
    "query_batch_norm": True,
    "query_layer_norm": True,
    "value_dim": 3,
}


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"knn": 1},
        {"knn": SLOTS},
        {"heads": 1, "knn": 7},
        {"query_batch_norm": True},
        {"query_layer_norm": True},
        {"query_hidden_dims": (5,)},
        {"value_dim": 3},
        EVERYTHING,
    ],
)
def test_values_and_all_gradients_equal_the_reference(options, keys, padding):
    memory = make(keys=keys, **options)
    x = draw(TOKENS, WIDTH)
    slow = product_key_memory(memory, x, padding)
    fast = memory(x, None if padding is None else torch.tensor(padding))
    assert_same(fast, slow, [x, *memory.parameters()])


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("keys", ["product", "flat"])
def test_evaluation_equals_the_reference(keys, search):
    memory = make(keys=keys, search=search, **EVERYTHING).eval()
    x = draw(TOKENS, WIDTH)
    slow = product_key_memory(memory, x, PADDING)
    assert_same(memory(x, torch.tensor(PADDING)), slow, [x, *memory.parameters()])


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (3, 1, 2), (0,), (2, 0, 3)])
def test_any_leading_shape_is_read_token_by_token(shape, mask, keys):
    memory = make(keys=keys, value_dim=3)
    x = draw(*shape, WIDTH)
    padding = torch.rand(shape) < 0.4 if mask else torch.zeros(shape, dtype=torch.bool)
    rows = [
        row * 0 if pad else memory(row)
        for row, pad in zip(x.view(-1, WIDTH), padding.flatten(), strict=True)
    ]
    expected = torch.stack(rows).view(x.shape) if rows else x * 0
    assert_same(memory(x, padding if mask else None), expected, [x, *memory.parameters()])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 2)])
def test_no_tokens_or_padding_alone_have_zero_gradients(shape, keys, sparse):
    memory = make(keys=keys, sparse=sparse, **EVERYTHING)
    state = copy.deepcopy(memory.state_dict())
    x = draw(*shape, WIDTH)
    out = memory(x, torch.ones(shape, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(x))
    out.sum().backward()
    assert not x.grad.any()
    for parameter in memory.parameters():
        assert parameter.grad is None or not parameter.grad.to_dense().any()
    torch.testing.assert_close(dict(memory.state_dict()), dict(state), rtol=0, atol=0)


def outcome(padded, padding, **options):
    """Everything that a pass gives with these inputs in the place of padding."""
    memory = make(query_batch_norm=True, query_hidden_dims=(5,), **options)
    x = draw(TOKENS, WIDTH)
    x.data[padding] = padded
    memory.usage = MemoryUsage(SLOTS)
    out = memory(x, padding)
    (out**2).sum().backward()
    return {
        "out": out.detach(),
        "x": x.grad,
        "parameters": [p.grad for p in memory.parameters()],
        "statistics": list(memory.buffers()),
        "reads": memory.usage.total(),
    }


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("padded", [1.0, 1e4, float("inf"), float("nan")])
def test_padding_changes_nothing(padded, keys):
    padding = torch.tensor(PADDING)
    before, after = (outcome(value, padding, keys=keys) for value in (0.0, padded))
    assert not before["out"][padding].any()
    assert not before["x"][padding].any()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_sparse_gradients_are_the_dense_ones_of_the_rows_read():
    memory = make(keys="product")
    x = draw(TOKENS, WIDTH)
    memory(x).square().sum().backward()
    dense = memory.values.grad
    memory.values.grad, memory.sparse = None, True
    memory(x).square().sum().backward()
    sparse = memory.values.grad
    assert torch.equal(sparse.to_dense(), dense)
    assert sparse._indices().tolist() == [dense.any(-1).nonzero().flatten().tolist()]
    assert 0 < sparse._nnz() < SLOTS


def trained(steps, beside, search):
    """A memory, or a twin of it whose values' gradient stays beside autograd."""
    ordinary = make(query_batch_norm=True, search=search)
    twin = copy.deepcopy(ordinary)
    twin.keep_gradient_beside_autograd()
    torch.manual_seed(2)
    for _ in range(steps):
        x = draw(TOKENS, WIDTH)
        for memory in (ordinary, twin):
            memory(x).square().sum().backward()
    return twin if beside else ordinary


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_gradient_beside_autograd_is_the_ordinary_one_and_accumulates(steps, search):
    ordinary, beside = (trained(steps, how, search) for how in (False, True))
    assert not beside.values.requires_grad
    assert beside.values.grad.is_sparse
    torch.testing.assert_close(beside.values.grad.to_dense(), ordinary.values.grad)
    for (name, one), other in zip(ordinary.named_parameters(), beside.parameters(), strict=True):
        if name != "values":
            assert torch.equal(one.grad, other.grad)
    beside.zero_grad()
    assert beside.values.grad is None


def test_two_readings_in_one_graph_add_their_gradients():
    ordinary = make()
    beside = copy.deepcopy(ordinary)
    beside.keep_gradient_beside_autograd()
    x = draw(TOKENS, WIDTH)
    for memory in (ordinary, beside):
        memory(memory(x)).square().sum().backward()
    torch.testing.assert_close(beside.values.grad.to_dense(), ordinary.values.grad)


def test_values_beside_autograd_get_no_gradient_in_evaluation():
    memory = make()
    memory.keep_gradient_beside_autograd()
    x = draw(TOKENS, WIDTH)
    with torch.no_grad():
        assert not memory(x).requires_grad
    memory.eval()
    memory(x).sum().backward()
    assert memory.values.grad is None
    assert x.grad.any()
    memory.train()
    memory(x).sum().backward()
    assert memory.values.grad is not None


def pickled(memory):
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(memory):
    memory.load_state_dict(copy.deepcopy(memory.state_dict()), assign=True)
    return memory


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "half": lambda memory: memory.half(),
    "to": lambda memory: memory.to(torch.bfloat16),
    "assign": assigned,
    "meta": lambda memory: memory.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_table_is_that_of_the_parameter_after_copies_and_casts(change):
    memory = make()
    memory.keep_gradient_beside_autograd()
    changed = CHANGES[change](memory)
    assert list(changed.state_dict()) == list(make().state_dict())
    assert changed.table.values is changed.values
    assert changed.table.values is changed.get_parameter("values")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.normal_()
    changed(torch.randn(TOKENS, WIDTH).to(changed.values.dtype)).sum().backward()
    assert changed.table.values.grad.is_sparse
    if changed is not memory:
        assert changed.table is not memory.table
        assert memory.values.grad is None


def held_by(slots, beside, sparse=True):
    """The sizes of all that a pass and its backward pass hold; the table's of a token's reads."""
    torch.manual_seed(1)
    memory = ProductKeyMemory(32, slots, heads=2, knn=8, query_dim=8, sparse=sparse)
    if beside:
        memory.keep_gradient_beside_autograd()
    # 64 tokens of 2 kinds: they read few rows
    x = torch.randn(2, 32).repeat(32, 1).requires_grad_()
    with Held() as held:
        memory(x).square().sum().backward()
    assert memory.values.grad.is_sparse == sparse
    return max(held.sizes)


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_grows_with_the_table_nor_with_reads_times_width(beside):
    tokens, reads, width = 64, 2 * 8, 32
    # the largest are the scores of 2·2·n sub-keys, or the outputs
    for n in (16, 60):
        assert held_by(n * n, beside) == max(tokens * width, tokens * 2 * 2 * n)
        assert tokens * 2 * 2 * n < min(tokens * reads * width, 60 * 60 * width)
    assert held_by(60 * 60, False, sparse=False) == 60 * 60 * width


@pytest.mark.parametrize("option", ["query_dropout", "input_dropout", "value_dropout"])
@pytest.mark.parametrize("value_dim", [None, 3])
def test_dropouts_act_in_training_and_not_in_evaluation(option, value_dim):
    plain, memory = (make(value_dim=value_dim, **how) for how in ({}, {option: 0.5}))
    x = draw(TOKENS, WIDTH)
    assert not torch.allclose(memory(x), plain(x))
    assert not torch.allclose(memory(x), memory(x))
    memory.eval()
    assert torch.equal(memory(x), plain(x))


def test_what_is_read_is_dropped_number_by_number_and_the_rest_scaled():
    plain, memory = make(), make(value_dropout=0.75)
    x = draw(TOKENS, WIDTH)
    kept = memory(x)
    assert 0 < (kept != 0).sum() < kept.numel()
    torch.testing.assert_close(kept, 4 * plain(x) * (kept != 0))


def test_what_enters_is_dropped_number_by_number_and_the_rest_scaled():
    plain, memory = make(), make(input_dropout=0.5)
    seen = []
    memory.query_network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = draw(TOKENS, WIDTH)
    out = memory(x)
    assert 0 < (seen[0] != 0).sum() < x.numel()
    torch.testing.assert_close(seen[0], 2 * x * (seen[0] != 0))
    torch.testing.assert_close(out, plain(seen[0]))


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_reads_are_recorded_with_the_weights_that_are_used(keys):
    memory = make(keys=keys)
    # each slot's value says which it is
    memory.values.data = torch.eye(SLOTS, dtype=torch.float64)[:, :WIDTH].contiguous()
    memory.usage = MemoryUsage(SLOTS, 2, by_head=True)
    x = draw(TOKENS, WIDTH)
    out = memory(x, torch.tensor(PADDING))
    assert memory.usage.tokens == PADDING.count(False)
    assert memory.usage.reads.sum(1).tolist() == pytest.approx([4.0, 4.0])
    torch.testing.assert_close(memory.usage.total()[:WIDTH], out.detach().sum(0))


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"keys": "flat"}, {"sparse": True}])
def test_half_precision_runs_and_comes_near_single_precision(options):
    memory = make(**options).bfloat16()
    x = torch.randn(3, TOKENS, WIDTH).bfloat16().requires_grad_()
    padding = torch.tensor(PADDING).expand(3, -1)
    out = memory(x, padding)
    assert out.dtype == torch.bfloat16
    out.square().sum().backward()
    for parameter in (x, *memory.parameters()):
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.to_dense().isfinite().all()
    # all slots are read: which of them are best is not a matter of rounding
    memory = make(**{**options, "knn": SLOTS}).bfloat16()
    single = copy.deepcopy(memory).float()
    torch.testing.assert_close(
        memory(x, padding).float(), single(x.float(), padding), rtol=0.05, atol=0.05
    )


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [*REFUSED, ({"query_hidden_dims": (4, 0)}, "{query_hidden_dims} has 0: widths are at least 1")],
)
def test_arguments_out_of_range_are_named_with_their_value_and_the_remedy(arguments, text):
    with pytest.raises(ValueError, match=naming(text, "`{}`".format)):
        make(**arguments)


def test_a_missing_faiss_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=naming(NO_FAISS, "`{}`".format)):
        make(search="faiss")


def test_flat_keys_take_any_number_of_slots_and_any_width():
    assert make(keys="flat", slots=26, query_dim=7)(draw(2, WIDTH)).shape == (2, WIDTH)


def test_faiss_reads_what_torch_reads():
    memory, x = make(), draw(TOKENS, WIDTH)
    expected = memory(x)
    memory.keys.search = "faiss"
    assert_same(memory(x), expected, [x, *memory.parameters()])


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("options", [{}, {"knn": SLOTS}, EVERYTHING])
def test_a_plain_memory_is_the_fast_one(options, keys):
    fast, plain = (make(keys=keys, search=search, **options) for search in ("torch", "plain"))
    assert plain.load_state_dict(fast.state_dict())
    x = draw(TOKENS, WIDTH)
    results = [memory(x, torch.tensor(PADDING)) for memory in (fast, plain)]
    torch.testing.assert_close(*results)
    weight = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(result, [x, *memory.parameters()], weight)
        for memory, result in zip((fast, plain), results, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_a_plain_memory_needs_no_loops(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "use_numba", None)
    for module in (search, values):
        monkeypatch.setattr(module, "use_numba", None)
    memory = make(search="plain")
    memory.keep_gradient_beside_autograd()
    memory(draw(TOKENS, WIDTH)).sum().backward()
    assert memory.values.grad.is_sparse


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_a_plain_memory_has_higher_derivatives(keys):
    memory = make(search="plain", keys=keys, query_batch_norm=True)
    x = draw(3, WIDTH)
    assert torch.autograd.gradgradcheck(memory, x)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"keys": "flat"}, True),
        ({"query_layer_norm": True, "value_dim": 3}, True),
        # whether the pass is recomputed is asked outside of the graph
        (EVERYTHING, False),
    ],
)
def test_a_compiled_plain_memory_is_the_same(options, whole):
    eager = make(search="plain", **options)
    twin = copy.deepcopy(eager)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=whole)
    x = draw(TOKENS, WIDTH)
    found = []
    for memory, module in ((eager, eager), (compiled, twin)):
        out = memory(x)
        of_all = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        found.append([out.detach(), *of_all])
    torch.testing.assert_close(*found)


LAYERS = "cpu_kernels keys memory numba_loops query search sharding usage values".split()


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_know_neither_options_nor_fairseq(layer):
    source = importlib.import_module(f"{PACKAGE}.{layer}").__file__
    text = Path(source).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) fairseq\b", text, re.MULTILINE)
    assert "--" not in text
