"""Options of product-key memories: what is built from them, and what is refused."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf

from fairseq_plugins.fairseq_integration.parameters import update_rule
from fairseq_plugins.product_key_memory.fairseq_memory import MemoryBuilder
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.options import (
    MemoryLayersOptions,
    MemoryOptions,
    check_placed,
    parse_memory_layers,
)
from fairseq_plugins.product_key_memory.sharding import AllColumns
from fairseq_plugins.product_key_memory.value_table import ValueTable
from tests.product_key_memory import tiny
from tests.product_key_memory.tiny import NO_FAISS, REFUSED, naming, option_of

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "--memory-layers is '0': layers are counted from 1; the first one is 1"),
        ("-1,3", "--memory-layers is '-1,3': layers are counted from 1; the first one is 1"),
        ("3,13", "--memory-layers is '3,13': there is no layer 13; the last one is 12"),
        ("3,4,3", "--memory-layers is '3,4,3': layer 3 is named twice; name it once"),
        ("3;4", "--memory-layers is '3;4': give numbers of layers with commas between them"),
        ("3,", "--memory-layers is '3,': give numbers of layers with commas between them"),
        ("2.5", "--memory-layers is '2.5': give numbers of layers with commas between them"),
    ],
)
def test_other_layers_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_memory_layers(text, 12, "--memory-layers")


@pytest.mark.parametrize("place", ["interleave", "parallel"])
def test_a_place_needs_a_memory(place):
    placed = options(**{f"memory_{place}": True})
    check_placed(placed, True, "--memory-layers")
    check_placed(options(), False, "--memory-layers")
    message = f"--memory-{place} without a memory to place: give --memory-layers, such as"
    with pytest.raises(ValueError, match=message):
        check_placed(placed, False, "--memory-layers")


def test_a_memory_has_one_place():
    both = options(memory_interleave=True, memory_parallel=True)
    with pytest.raises(ValueError, match=r"^--memory-interleave puts .* leave one of the two out$"):
        check_placed(both, True, "--memory-layers")


def test_every_option_reaches_the_memory(monkeypatch):
    """Each has a value of its own, which the memory is then built with."""
    built = {}
    of_module = ProductKeyMemory.__init__

    def record(self, embed_dim, **arguments):
        built.update(arguments, embed_dim=embed_dim)
        of_module(self, embed_dim, **arguments)

    monkeypatch.setattr(ProductKeyMemory, "__init__", record)
    build_memory(
        options(
            memory_slots=25,
            memory_heads=3,
            memory_knn=7,
            memory_query_dim=6,
            memory_value_dim=9,
            memory_query_hidden_dims="8,10",
            memory_query_batch_norm=True,
            memory_query_layer_norm=True,
            memory_query_dropout=0.1,
            memory_input_dropout=0.2,
            memory_value_dropout=0.3,
            memory_keys="flat",
            memory_search="torch",
            memory_values_dtype="bf16",
            memory_shard_values=True,
            memory_output_norm=True,
            memory_output_gate=True,
            memory_zero_init=True,
        ),
        5,
    )
    assert built == {
        "embed_dim": 5,
        "slots": 25,
        "heads": 3,
        "knn": 7,
        "query_dim": 6,
        "value_dim": 9,
        "query_hidden_dims": [8, 10],
        "query_batch_norm": True,
        "query_layer_norm": True,
        "query_dropout": 0.1,
        "input_dropout": 0.2,
        "value_dropout": 0.3,
        "keys": "flat",
        "search": "torch",
        "values_dtype": torch.bfloat16,
        "shard_values": True,
        "output_norm": True,
        "output_gate": True,
        "zero_init": True,
        "values_of": None,
    }
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


def test_values_of_two_widths_cannot_be_shared():
    builder = MemoryBuilder(options(memory_share_values=True))
    builder.build(8)
    message = "^--memory-value-dim is 6, and 8 in the memory whose values are shared: give both"
    with pytest.raises(ValueError, match=message):
        builder.build(6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [*REFUSED, ({"query_hidden_dims": "4,0"}, "{query_hidden_dims} has 0: widths are at least 1")],
)
def test_values_that_no_memory_has_are_refused_by_their_options(arguments, text):
    given = {f"memory_{name}": value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=naming(text, option_of)):
        build_memory(options(**given), 8)


@pytest.mark.parametrize("text", ["8;9", "8,", "wide"])
def test_widths_of_hidden_layers_are_numbers(text):
    message = f"^--memory-query-hidden-dims is {text!r}: give widths with commas between them"
    with pytest.raises(ValueError, match=message):
        build_memory(options(memory_query_hidden_dims=text), 8)


def test_a_missing_faiss_is_named_by_its_option(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=naming(NO_FAISS, option_of)):
        build_memory(options(memory_search="faiss"), 8)


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


def test_options_of_memories_without_a_memory_are_told(caplog):
    check_placed(MemoryOptions(memory_slots=64, memory_knn=3), False, "--memory-layers")
    check_placed(MemoryOptions(memory_knn=3), False, "--memory-layers")
    remedy = "of memories: give --memory-layers, such as --memory-layers 6, to have one"
    assert caplog.messages == [
        f"no layer has a memory, and --memory-slots, --memory-knn are options {remedy}",
        f"no layer has a memory, and --memory-knn is an option {remedy}",
    ]
    caplog.clear()
    check_placed(MemoryOptions(), False, "--memory-layers")
    check_placed(MemoryOptions(memory_slots=64), True, "--memory-layers")
    assert caplog.messages == []


def test_shards_need_the_optimizer_that_knows_of_them(monkeypatch):
    monkeypatch.setattr(AllColumns, "sharded", True)
    with pytest.raises(ValueError, match=r"^--memory-shard-values with --optimizer adam: another"):
        build_memory(options(memory_shard_values=True, memory_optimizer="adam"), 4)


def test_workers_of_a_sharded_memory_do_not_translate_in_validation(monkeypatch):
    monkeypatch.setattr(AllColumns, "sharded", True)
    choices = {"encoder_memory_layers": "1", "optimizer": "adam_with_memory"}
    with pytest.raises(ValueError, match=r"^--eval-bleu with --memory-shard-values: workers read"):
        tiny.tiny_transformer(
            task_cfg=SimpleNamespace(eval_bleu=True), memory_shard_values=True, **choices
        )


SLOTS = {"memory6": np.arange(49) < 9}


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (None, "cannot be read ([Errno 2] No such file or directory"),
        (b"no archive", "cannot be read ("),
        (b"", "cannot be read ("),
        ({"memory2": SLOTS["memory6"]}, "has no memory6: give the rarely_read.npz that"),
        ({"memory6": np.arange(49)}, "has int64 of shape (49,), and the memory 49 slots"),
        ({"memory6": np.ones(48, bool)}, "has bool of shape (48,), and the memory 49 slots"),
        ({"memory6": np.array([print] * 49)}, "cannot be read (Object arrays cannot be loaded"),
    ],
)
def test_a_file_of_other_slots_is_refused_when_training_begins(arrays, text, tmp_path):
    path = tmp_path / "slots.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        np.savez(path, **arrays)
    model = tiny.tiny_language_model(memory_layers="2", memory_trainable_slots=str(path))
    (memory,) = tiny.memories(model)
    memory.train_slots_of(str(path), "memory6")
    memory.eval()(torch.zeros(1, 16))
    with pytest.raises(ValueError, match=f"^--memory-trainable-slots is {path}") as refusal:
        memory.train()(torch.zeros(1, 16))
    assert text in str(refusal.value)


def test_slots_are_trained_from_the_first_update_on(tmp_path):
    path = tmp_path / "slots.npz"
    np.savez(path, memory2=SLOTS["memory6"])
    model = tiny.tiny_language_model(memory_layers="2", memory_trainable_slots=str(path))
    (memory,) = tiny.memories(model)
    memory(torch.zeros(1, 16))
    assert memory.frozen_slots.tolist() == [False] * 9 + [True] * 40
    assert not any("frozen" in name for name in model.state_dict())
    memory.train_only(None)
    memory(torch.zeros(1, 16))
    assert memory.frozen_slots is None


def test_an_optimizer_that_updates_all_rows_is_refused():
    with pytest.raises(ValueError, match=r"^--memory-trainable-slots with --optimizer adam, which"):
        tiny.tiny_language_model(
            memory_layers="2", memory_trainable_slots="slots.npz", memory_optimizer="adam"
        )
