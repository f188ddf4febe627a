"""The layers that are compared of product-key memories, and the least that they must do."""

import pytest
import torch

from scripts.benchmark import _memory_layers as layers_module
from scripts.benchmark._memory_layers import (
    FIXED,
    FIXED_SEARCHED,
    INFERENCE,
    MODELS,
    SEARCH,
    STEP,
    TRAINING_STEP,
    Cost,
    MemoryCase,
    build_layers,
    costs,
    draw_fixed_slots,
    state_bytes,
    step_memory,
)
from scripts.benchmark._original import MEMORY
from scripts.benchmark._report import AUTOCAST, BF16, DTYPES, FP32, Entry
from tests.operations import multiply_adds_of

pytestmark = pytest.mark.usefixtures("small_memories")
CPU = torch.device("cpu")
OURS, DENSE, SPARSE, FEED_FORWARD, ORIGINAL, ORIGINAL_SPARSE = MODELS
PLAIN, PUBLISHED = (DENSE, SPARSE), (ORIGINAL, ORIGINAL_SPARSE)
WIDTH = 16
SLOTS, HEADS, KNN, TOKENS = 64, 2, 4, 6
CASE = MemoryCase(SLOTS, HEADS, KNN, TOKENS)
# of a query network with biases and of two sets of 8 sub-keys of width 4, for 2 heads
WEIGHTS = 16 * 16 + 16 + 2 * 2 * 8 * 4


@pytest.fixture
def published(memory_checkout):
    """The class of the stand-in."""
    return MEMORY.import_class(memory_checkout)


def layer_of(model, case=CASE, dtype=FP32, published=None):
    """An entry whose values no other one has."""
    (layer,) = build_layers(case, [Entry(model, dtype)], CPU, published)
    return layer


def values_of(layer):
    values = layer.module.values
    return values.weight if isinstance(values, torch.nn.Module) else values


def weights_of(layer):
    queries, keys = layer.module.query_network, layer.module.keys
    if layer.entry.model in PUBLISHED:
        linear, subkeys = queries.query_mlps[0], layer.module.memory.keys
    else:
        linear = queries.layers[0] if layer.entry.model == OURS else queries[0]
        subkeys = keys.subkeys
    return [linear.weight, linear.bias, subkeys, values_of(layer)]


@pytest.mark.parametrize("model", [*PLAIN, *PUBLISHED])
@pytest.mark.parametrize(
    "case", [CASE, MemoryCase(4, 1, 3, 1), MemoryCase(16, 3, 16, 2), MemoryCase(100, 1, 1, 5)]
)
def test_entries_compute_and_learn_the_same(published, case, model):
    ours, other = layer_of(OURS, case), layer_of(model, case, published=published)
    before = values_of(ours).detach().clone()
    assert torch.equal(before, values_of(other))
    slots = ours.search()[1]
    torch.testing.assert_close(ours.infer(), other.infer())
    for layer in (ours, other):
        layer.forward()
        torch.testing.assert_close(layer.output, ours.infer())
        layer.backward()
    torch.testing.assert_close(ours.x.grad, other.x.grad)
    gradients = [
        [w.grad.to_dense() if w.grad.is_sparse else w.grad for w in weights_of(layer)]
        for layer in (ours, other)
    ]
    torch.testing.assert_close(*gradients)
    for layer in (ours, other):
        layer.update()
        assert all(weight.grad is None for weight in [layer.x, *weights_of(layer)])
    for weight, same, grad in zip(weights_of(ours), weights_of(other), gradients[0], strict=True):
        # Adam makes whole steps of rounding errors, and torch adds epsilon in another place; what
        # has no gradient at all must not change in either
        sure = (grad.abs() > 1e-5) | (grad == 0)
        torch.testing.assert_close(weight[sure], same[sure], rtol=0, atol=2e-6)
    learned = (values_of(ours) != before).any(1)
    assert learned.nonzero().flatten().tolist() == slots.unique().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_compared_with_the_same_weights_and_tokens(published, dtype):
    layers = build_layers(CASE, [Entry(model, dtype) for model in MODELS], CPU, published)
    memories = [layer for layer in layers if layer.entry.model != FEED_FORWARD]
    assert len({values_of(layer).data_ptr() for layer in memories}) == 1
    for layer in layers:
        assert torch.equal(layer.x, layers[0].x)
        assert torch.equal(layer.grad, layers[0].grad)
        assert layer.x.dtype == (torch.bfloat16 if dtype == BF16 else torch.float32)
        layer.step()
        assert layer.infer().dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("searched", [False, True])
def test_fixed_slots_are_those_that_are_read(monkeypatch, searched):
    monkeypatch.setattr(layers_module, "FIXED_ROWS", 12)
    slots = draw_fixed_slots(CASE, torch.Generator().manual_seed(3))
    rows, counts = slots.unique(return_counts=True)
    assert slots.shape == (TOKENS, HEADS, KNN)
    assert counts.tolist() == [4] * 12
    layers = [layer_of(model) for model in (OURS, DENSE, SPARSE)]
    before = values_of(layers[0]).detach().clone()
    outputs = []
    for layer in layers:
        layer.fix_slots(slots, searched)
        layer.forward()
        outputs.append(layer.output.detach())
        torch.testing.assert_close(outputs[-1], outputs[0])
        layer.backward()
        found_by = [weight.grad is not None for weight in layer.module.query_network.parameters()]
        assert found_by == [True] * 2 * searched
        layer.update()
        learned = (values_of(layer) != before).any(1)
        assert learned.nonzero().flatten().tolist() == rows.tolist()


def test_fixed_slots_end_at_the_table(monkeypatch):
    monkeypatch.setattr(layers_module, "FIXED_ROWS", 1000)
    slots = draw_fixed_slots(MemoryCase(16, 2, 4, 4), torch.Generator().manual_seed(3))
    assert slots.unique().tolist() == list(range(16))


def test_costs_of_a_memory_by_hand():
    number, rows = 4, 20
    activations, reads, values = 6 * 16 * number, 48, 20 * 16 * number
    search = Cost(activations + WEIGHTS * number + 48 * 12, 6 * 16 * 16 + 6 * 2 * 2 * 8 * 4)
    forward = Cost(search.moved + 48 * 12 + values + activations, search[1] + reads * 16)
    backward = Cost(
        3 * activations + 2 * reads * 12 + reads * 4 + 2 * values + 8 * rows + 2 * WEIGHTS * number,
        2 * (6 * 16 * 16 + 6 * 2 * 2 * 4 * 4) + 2 * reads * 16,
    )
    update = Cost(7 * values + 8 * rows + 7 * WEIGHTS * number)
    of_parts = costs(CASE, OURS, rows, FP32)
    assert CASE.parameters == WEIGHTS
    assert of_parts[SEARCH] == search
    assert [of_parts[part] for part in STEP] == [forward, backward, update]
    step = tuple(map(sum, zip(forward, backward, update, strict=True)))
    assert of_parts[TRAINING_STEP] == of_parts[FIXED_SEARCHED] == step
    assert of_parts[INFERENCE] == forward
    read = 48 * 12 + values + activations
    unread = activations + 48 * 12 + 2 * values + 48 * 4 + 8 * rows
    assert of_parts[FIXED] == (read + unread + 7 * values + 8 * rows, 3 * reads * 16)
    assert costs(CASE, DENSE, rows, AUTOCAST) == of_parts
    assert costs(CASE, SPARSE, rows, BF16)[SEARCH].moved == 6 * 16 * 2 + WEIGHTS * 2 + 48 * 10


def test_costs_of_a_feed_forward_sublayer_by_hand():
    weights = 2 * 16 * 64 + 64 + 16
    of_parts = costs(CASE, FEED_FORWARD, 20, FP32)
    assert of_parts[INFERENCE] == (4 * (2 * 6 * 16 + weights), 6 * 2 * 16 * 64)
    assert of_parts["backward"] == (4 * (3 * 6 * 16 + 2 * weights), 2 * 6 * 2 * 16 * 64)
    assert of_parts["update"] == (4 * 7 * weights, 0)


def test_operations_are_those_that_pytorch_counts():
    memory, feed_forward = layer_of(OURS), layer_of(FEED_FORWARD)
    assert multiply_adds_of(memory.search) == costs(CASE, OURS, 9, FP32)[SEARCH].multiply_adds
    of_parts = costs(CASE, FEED_FORWARD, 9, FP32)
    assert multiply_adds_of(feed_forward.infer) == of_parts[INFERENCE].multiply_adds
    assert multiply_adds_of(feed_forward.step) == of_parts[TRAINING_STEP].multiply_adds


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_dense_gradients_take_a_tensor_of_the_tables_size(dtype):
    case = MemoryCase(1024, HEADS, KNN, TOKENS)
    table = case.table_bytes(dtype)
    assert table == values_of(layer_of(OURS, case, dtype)).nbytes
    largest = {
        model: step_memory(case, Entry(model, dtype), CPU)["largest_bytes"]
        for model in (OURS, DENSE, SPARSE)
    }
    assert largest[OURS] < table
    assert largest[DENSE] == table
    # a gradient for each read
    assert largest[SPARSE] >= case.reads * WIDTH * (2 if dtype == BF16 else 4)


def test_state_by_hand():
    table = 64 * 16
    assert state_bytes(CASE, OURS, FP32) == 2 * 4 * table
    assert state_bytes(CASE, OURS, BF16) == 3 * 4 * table
    assert state_bytes(CASE, DENSE, FP32) == 4 * 4 * table
    assert state_bytes(CASE, SPARSE, BF16) == 2 * (2 * table + 3 * 48 * 16)
    assert state_bytes(CASE, FEED_FORWARD, FP32) == 0
    for plain, published in zip(PLAIN, PUBLISHED, strict=True):
        assert state_bytes(CASE, published, BF16) == state_bytes(CASE, plain, BF16)
