"""Memories from options."""

import dataclasses

import pytest
from fairseq.optim.fp16_optimizer import FP16Optimizer

from fairseq_plugins.product_key_memory.builder import MemoryBuilder, parse_memory_layers
from fairseq_plugins.product_key_memory.fairseq_memory import lazy_values
from fairseq_plugins.product_key_memory.options import MemoryLayersOptions
from tests.product_key_memory.layer import build_memory


def build_from_options(width=8, **choices):
    small = {"slots": 25, "knn": 2, "query_dim": 4, "optimizer": None, "layers": "1"}
    options = {f"memory_{name}": value for name, value in {**small, **choices}.items()}
    return MemoryBuilder(MemoryLayersOptions(**options), width, 3)(1)


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, []), ("", []), ("3", [3]), ("12, 6", [6, 12]), (7, [7])]
)
def test_parse_memory_layers_counts_from_1(text, numbers):
    assert parse_memory_layers(text, 12, "--memory-layers") == numbers


def test_memory_builder_passes_on_every_option():
    """Each option gets a value of its own."""
    same = {"slots": 20, "knn": 7, "value_dim": 9, "keys": "flat", "kernel": "plain"}
    choices = {
        **{"heads": 3, "query_dim": 6, "query_hidden_dims": "8,10", "query_dropout": 0.1},
        **{"query_batch_norm": True, "input_dropout": 0.2},
        **{"output_gate": True, "value_dropout": 0.3},
    }
    query = {"hidden_dims": (8, 10), "batch_norm": True}
    query |= {"dropout": 0.1, "input_dropout": 0.2}
    output = {"gate": True, "dropout": 0.3}
    built = build_from_options(5, **same, **choices)
    expected = build_memory(5, 3, 6, query, output, **same)
    shapes = [
        {name: x.shape for name, x in memory.state_dict().items()} for memory in (built, expected)
    ]
    assert shapes[0] == shapes[1]
    # modules with their sizes and rates
    assert str(built) == str(expected)
    assert (built.knn, built.keys.kernel, built.values.kernel) == (7, "plain", "plain")
    model_options = {"layers", "optimizer", "share_values", "interleave"}
    names = {option.name for option in dataclasses.fields(MemoryLayersOptions)} - {"_name"}
    assert names == {f"memory_{name}" for name in model_options | same.keys() | choices.keys()}


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("optimizer", [None, "adam", "adam_with_memory"])
def test_only_adam_with_memory_gets_the_values(optimizer, keys, caplog):
    """It also finds them through the copies in single precision that --bf16 makes."""
    memory = build_from_options(optimizer=optimizer, keys=keys).bfloat16()
    hidden = optimizer == "adam_with_memory"
    assert ("--optimizer adam updates all" in caplog.text) == (optimizer == "adam")
    assert memory.values.weight.requires_grad != hidden
    seen = [parameter for parameter in memory.parameters() if parameter.requires_grad]
    for parameters in (seen, FP16Optimizer.build_fp32_params(None, seen, flatten=False)):
        assert lazy_values(parameters) == [memory.values] * hidden


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("query.layer_norm.weight", "--memory-query-layer-norm"),
        ("output.norm.weight", "--memory-output-norm"),
    ],
)
def test_a_memory_refuses_weights_of_removed_options(name, option):
    memory = build_from_options()
    state = memory.state_dict()
    memory.load_state_dict(state)
    with pytest.raises(ValueError, match=f"{option}, which no longer exists"):
        memory.load_state_dict({**state, name: state["keys.subkeys"]})
