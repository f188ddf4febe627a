"""Options of product-key memories: what is built from them, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf

from fairseq_plugins.fairseq_integration.parameters import update_rule
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.options import (
    MemoryBuilder,
    MemoryLayersOptions,
    MemoryOptions,
    parse_memory_layers,
)
from fairseq_plugins.product_key_memory.value_table import ValueTable
from tests.product_key_memory import tiny

SMALL = {"memory_slots": 16, "memory_knn": 2, "memory_query_dim": 4}


def build_memory(given, width):
    return MemoryBuilder(given).build(width)


def options(**given):
    return MemoryLayersOptions(**{**SMALL, "memory_optimizer": None, **given})


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(None, []), ("", []), ("3", [3]), ("6,12", [6, 12]), ("12, 6", [6, 12]), ("1,12", [1, 12])],
)
def test_layers_are_numbers_from_1(text, numbers):
    assert parse_memory_layers(text, 12, "--memory-layers") == numbers


def test_every_option_reaches_the_memory(monkeypatch):
    """Each has a value of its own, which the memory is then built with."""
    built = {}
    of_module = ProductKeyMemory.__init__

    def record(self, embed_dim, **arguments):
        built.update(arguments, embed_dim=embed_dim)
        of_module(self, embed_dim, **arguments)

    monkeypatch.setattr(ProductKeyMemory, "__init__", record)
    given = {
        **{"slots": 25, "heads": 3, "knn": 7, "query_dim": 6, "value_dim": 9},
        **{"query_hidden_dims": "8,10", "query_batch_norm": True, "query_layer_norm": True},
        **{"query_dropout": 0.1, "input_dropout": 0.2, "value_dropout": 0.3},
        **{"keys": "flat", "search": "plain", "values_dtype": "bf16", "shard_values": True},
        **{"output_norm": True, "output_gate": True, "zero_init": True},
    }
    build_memory(options(**{f"memory_{name}": value for name, value in given.items()}), 5)
    layers = {"query_hidden_dims": [8, 10], "values_dtype": torch.bfloat16}
    assert built == {**given, **layers, "embed_dim": 5, "values_of": None}
    of_models = {f"memory_{name}" for name in ("layers", "optimizer", "share_values")}
    of_models |= {"memory_interleave", "memory_parallel", "memory_trainable_slots"}
    known = {option.name for option in dataclasses.fields(MemoryLayersOptions)}
    of_memories = {f"memory_{name}" for name in built if name not in ("embed_dim", "values_of")}
    assert known - of_models - {"_name"} == of_memories


@pytest.mark.parametrize("share", [False, True])
def test_memories_of_a_model_share_their_values_if_asked_to(share):
    builder = MemoryBuilder(options(memory_share_values=share, memory_value_dim=4))
    first, *others = (builder.build(width) for width in (8, 6, 8))
    assert [other.values is first.values for other in others] == [share, share]
    assert all(other.keys is not first.keys for other in others)


def test_the_optimizer_is_that_of_the_training():
    """The option takes it from the rest of the configuration, where there is one."""
    cfg = OmegaConf.create({"model": MemoryOptions(), "optimizer": {"_name": "adam_with_memory"}})
    assert cfg.model.memory_optimizer == "adam_with_memory"
    for others in ({}, {"optimizer": None}, {"optimizer": {"lr": [0.1]}}):
        cfg = OmegaConf.create({"model": MemoryOptions(), **others})
        assert cfg.model.memory_optimizer is None


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_other_optimizers_see_the_values_as_a_parameter(optimizer):
    memory = build_memory(options(memory_optimizer=optimizer), 8)
    assert memory.values.requires_grad
    assert not any(update_rule(parameter, ValueTable) for parameter in memory.parameters())


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_adam_with_memory_finds_the_values(keys):
    """Also through the copies in single precision that it sees with --bf16."""
    memory = build_memory(options(memory_optimizer="adam_with_memory", memory_keys=keys), 8)
    assert not memory.values.requires_grad
    seen = [parameter for parameter in memory.bfloat16().parameters() if parameter.requires_grad]
    copies = FP16Optimizer.build_fp32_params(None, seen, flatten=False)
    for parameters in (seen, copies):
        rules = [update_rule(parameter, ValueTable) for parameter in parameters]
        (table,) = [rule for rule in rules if rule is not None]
        assert table is memory.table
        assert table.values is memory.values


def test_slots_are_trained_from_the_first_update_on(tmp_path):
    path = tmp_path / "slots.npz"
    np.savez(path, memory2=np.arange(49) < 9)
    model = tiny.tiny_language_model(memory_layers="2", memory_trainable_slots=str(path))
    (memory,) = tiny.memories(model)
    memory(torch.zeros(1, 16))
    assert memory.frozen_slots.tolist() == [False] * 9 + [True] * 40
    assert not any("frozen" in name for name in model.state_dict())
    memory.train_only(None)
    memory(torch.zeros(1, 16))
    assert memory.frozen_slots is None
