"""The memory layer: the reference's values and gradients, padding, sparse gradients, dropout."""

import copy

import pytest
import torch

from fairseq_plugins.product_key_memory import memory as memory_layer
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage
from tests.gradients import assert_same
from tests.product_key_memory.standalone import (
    EVERYTHING,
    PADDING,
    TOKENS,
    D,
    K,
    draw,
    exact_memory,
)
from tests.reference.product_key_memory import product_key_memory


@pytest.mark.parametrize("padding", [None, "packed", "in place"])
@pytest.mark.parametrize("keys", ["product", "flat"])
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
    x, padding = draw(TOKENS, D), padding and PADDING
    slow = product_key_memory(memory, x, padding)
    fast = memory(x, padding and torch.tensor(padding))
    assert_same(fast, slow, [x, *memory.parameters()])


@pytest.mark.parametrize("search", ["torch", "plain"])
@pytest.mark.parametrize("keys", ["product", "flat"])
def test_evaluation_equals_the_reference(keys, search):
    memory = exact_memory(keys=keys, search=search, **EVERYTHING).eval()
    x = draw(TOKENS, D)
    slow = product_key_memory(memory, x, PADDING)
    assert_same(memory(x, torch.tensor(PADDING)), slow, [x, *memory.parameters()])


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (3, 1, 2), (0,), (2, 0, 3)])
def test_any_leading_shape_is_read_token_by_token(shape, mask, keys):
    memory = exact_memory(keys=keys, value_dim=3)
    x = draw(*shape, D)
    padding = torch.rand(shape) < 0.4 if mask else torch.zeros(shape, dtype=torch.bool)
    rows = [
        row * 0 if pad else memory(row)
        for row, pad in zip(x.view(-1, D), padding.flatten(), strict=True)
    ]
    expected = torch.stack(rows).view(x.shape) if rows else x * 0
    assert_same(memory(x, padding if mask else None), expected, [x, *memory.parameters()])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 2)])
def test_no_tokens_or_padding_alone_have_zero_gradients(shape, keys, sparse):
    memory = exact_memory(keys=keys, sparse=sparse, **EVERYTHING)
    state = copy.deepcopy(memory.state_dict())
    x = draw(*shape, D)
    out = memory(x, torch.ones(shape, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(x))
    out.sum().backward()
    assert not x.grad.any()
    for parameter in memory.parameters():
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


def outcome(padded, padding, **options):
    """Everything that a pass gives with these inputs in the place of padding."""
    memory = exact_memory(query_batch_norm=True, query_hidden_dims=(5,), **options)
    x = draw(TOKENS, D)
    x.data[padding] = padded
    memory.usage = MemoryUsage(K)
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
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("padded", [1.0, 1e4, float("inf"), float("nan")])
def test_padding_changes_nothing(padded, packed, keys, monkeypatch):
    monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, training: packed)
    padding = torch.tensor(PADDING)
    before, after = (outcome(value, padding, keys=keys) for value in (0.0, padded))
    assert not before["out"][padding].any()
    assert not before["x"][padding].any()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_recomputed_pass_does_as_the_first_one(training, monkeypatch):
    """Without gradients first, as --checkpoint-activations has it, on an accelerator."""
    rule = memory_layer.packs_tokens
    monkeypatch.setattr(memory_layer, "packs_tokens", lambda x, mode: rule(x.to("meta"), mode))
    memory = exact_memory(value_dropout=0.3).train(training)
    x, found = draw(TOKENS, D), []
    for grad in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(grad):
            found.append(memory(x, torch.tensor(PADDING)).detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("option", ["query_dropout", "input_dropout", "value_dropout"])
@pytest.mark.parametrize("value_dim", [None, 3])
def test_dropouts_act_in_training_and_not_in_evaluation(option, value_dim):
    plain, memory = (exact_memory(value_dim=value_dim, **how) for how in ({}, {option: 0.5}))
    x = draw(TOKENS, D)
    assert not torch.allclose(memory(x), plain(x))
    assert not torch.allclose(memory(x), memory(x))
    memory.eval()
    assert torch.equal(memory(x), plain(x))


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_reads_are_recorded_with_the_weights_that_are_used(keys):
    memory = exact_memory(keys=keys)
    # each slot's value says which it is
    memory.values.data = torch.eye(K, dtype=torch.float64)[:, :D].contiguous()
    memory.usage = MemoryUsage(K, 2, by_head=True)
    x = draw(TOKENS, D)
    out = memory(x, torch.tensor(PADDING))
    assert memory.usage.tokens == PADDING.count(False)
    assert memory.usage.reads.sum(1).tolist() == pytest.approx([4.0, 4.0])
    torch.testing.assert_close(memory.usage.total()[:D], out.detach().sum(0))


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"keys": "flat"}, {"sparse": True}])
def test_half_precision_runs_and_comes_near_single_precision(options):
    memory = exact_memory(**options).bfloat16()
    x = torch.randn(3, TOKENS, D).bfloat16().requires_grad_()
    padding = torch.tensor(PADDING).expand(3, -1)
    out = memory(x, padding)
    assert out.dtype == torch.bfloat16
    out.square().sum().backward()
    for parameter in (x, *memory.parameters()):
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.to_dense().isfinite().all()
    # all slots are read: which of them are best is not a matter of rounding
    memory = exact_memory(**{**options, "knn": K}).bfloat16()
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
