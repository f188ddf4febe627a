"""Options of product-key memories: the layers built from them, and errors for bad values."""

import dataclasses
import functools
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq_plugins.fairseq_integration.error_messages import flag
from omegaconf import OmegaConf

from fairseq_plugins.fairseq_integration.parameters import update_rule
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.options import (
    MemoryBuilder,
    MemoryLayersOptions,
    MemoryOptions,
    check_placed,
    parse_memory_layers,
)
from fairseq_plugins.product_key_memory.sharding import AllColumns
from fairseq_plugins.product_key_memory.value_table import ValueTable
from tests.product_key_memory.layer import D, K, adam_with_memory, exact_memory, learn, make_memory
from tests.product_key_memory.tiny import build, memories, tiny_language_model, tiny_transformer


def builder(**given):
    small = {"slots": 25, "knn": 2, "query_dim": 4, "optimizer": None}
    options = {f"memory_{name}": value for name, value in {**small, **given}.items()}
    return MemoryBuilder(MemoryLayersOptions(**options))


def from_options(**given):
    return builder(**given).build(8)


SLOTS = np.arange(49) < 9
language_model = functools.partial(tiny_language_model, memory_layers="2")
segments = functools.partial(build, "transformer_xl")
persistent = functools.partial(build, "all_attention", decoder_ffn_embed_dim=0)
layers_of = functools.partial(parse_memory_layers, layers=12, option="--memory-layers")


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, []), ("", []), ("3", [3]), ("12, 6", [6, 12]), ("1,12", [1, 12])]
)
def test_layers_are_numbers_from_1(text, numbers):
    assert layers_of(text) == numbers


def test_every_option_reaches_the_memory():
    """Each option gets a value of its own, and the memory is built with these values."""
    given = {
        **{"slots": 25, "heads": 3, "knn": 7, "query_dim": 6, "value_dim": 9},
        **{"query_hidden_dims": "8,10", "query_batch_norm": True, "query_layer_norm": True},
        **{"query_dropout": 0.1, "input_dropout": 0.2, "value_dropout": 0.3},
        **{"keys": "flat", "search": "plain", "values_dtype": "bf16", "shard_values": True},
        **{"output_norm": True, "output_gate": True, "zero_init": True},
    }
    real = ProductKeyMemory.__init__
    with mock.patch.object(ProductKeyMemory, "__init__", autospec=True, side_effect=real) as built:
        memory = builder(**given).build(5)
    parsed = {"query_hidden_dims": [8, 10], "values_dtype": torch.bfloat16, "values_of": None}
    built.assert_called_once_with(memory, 5, **{**given, **parsed})
    of_models = {"layers", "optimizer", "share_values", "interleave", "parallel", "trainable_slots"}
    names = {option.name for option in dataclasses.fields(MemoryLayersOptions)} - {"_name"}
    assert names == {f"memory_{name}" for name in of_models | given.keys()}


@pytest.mark.parametrize("share", [False, True])
def test_memories_of_a_model_share_their_values_if_asked_to(share):
    builds = builder(share_values=share, value_dim=4)
    first, *others = (builds.build(width) for width in (8, 6, 8))
    assert [other.values is first.values for other in others] == [share, share]
    assert all(other.keys is not first.keys for other in others)


def test_the_optimizer_is_that_of_the_training():
    """The option takes it from the rest of the configuration, if it names one."""
    for others, expected in [
        ({"optimizer": {"_name": "adam_with_memory"}}, "adam_with_memory"),
        ({}, None),
        ({"optimizer": None}, None),
        ({"optimizer": {"lr": [0.1]}}, None),
    ]:
        cfg = OmegaConf.create({"model": MemoryOptions(), **others})
        assert cfg.model.memory_optimizer == expected


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("optimizer", [None, "adam", "adam_with_memory"])
def test_adam_with_memory_alone_finds_the_values(optimizer, keys):
    """It also finds them through the copies in single precision that --bf16 makes."""
    memory = builder(optimizer=optimizer, keys=keys).build(8).bfloat16()
    beside = optimizer == "adam_with_memory"
    assert memory.values.requires_grad != beside
    seen = [parameter for parameter in memory.parameters() if parameter.requires_grad]
    copies = FP16Optimizer.build_fp32_params(None, seen, flatten=False)
    for parameters in (seen, copies):
        rules = [update_rule(parameter, ValueTable) for parameter in parameters]
        assert [rule for rule in rules if rule is not None] == [memory.table] * beside


def test_options_without_a_memory_are_warned_of(caplog):
    """A baseline may combine --memory-layers "" with a preset's sizes."""
    sizes = {"memory_slots": 64, "memory_knn": 3}
    for options, memory in [(sizes, False), ({}, False), (sizes, True)]:
        given = MemoryLayersOptions(**{"memory_optimizer": None, **options})
        check_placed(given, memory, "--memory-layers")
    (warning,) = caplog.messages
    assert "--memory-slots, --memory-knn" in warning
    assert "--memory-layers 6" in warning


# --- errors: each begins with the option, and names its value and the remedy


def assert_refused(make, options, start, *words):
    with pytest.raises(ValueError, match=r".") as refusal:
        make(**options)
    message = str(refusal.value)
    assert message.startswith(start)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("slots", 0, "at least 1"),
        ("heads", 0, "at least 1"),
        ("knn", -1, "at least 1"),
        ("query_dim", 0, "at least 1"),
        ("value_dim", 0, "at least 1"),
        ("query_hidden_dims", "4,0", "at least 1"),
        ("knn", 26, "25"),
        ("query_dropout", 1.0, "[0, 1)"),
        ("input_dropout", -0.1, "[0, 1)"),
        ("value_dropout", 2, "[0, 1)"),
        ("keys", "round", "product, flat"),
        ("search", "luck", "torch, faiss, plain"),
        ("slots", 26, "25 or 36"),
        ("query_dim", 7, "even"),
    ],
)
def test_arguments_and_their_options(name, value, remedy):
    named = "0" if name == "query_hidden_dims" else str(value)
    argument = (4, 0) if name == "query_hidden_dims" else value
    assert_refused(exact_memory, {name: argument}, f"`{name}`", named, remedy)
    assert_refused(from_options, {name: value}, flag(f"memory_{name}"), named, remedy)


def build_two_widths():
    builds = builder(share_values=True)
    return builds.build(8), builds.build(6)


def call_memory(*inputs):
    return lambda: exact_memory()(*inputs)


ONCE, SUCH_AS = "layers from 1 to 12, each once", "such as 6,12"
INTERLEAVE, PARALLEL = {"memory_interleave": True}, {"memory_parallel": True}
NONE, ADAM = {"memory_layers": ""}, {"memory_optimizer": "adam"}
KEPT = {"decoder_memory_layers": "1", "decoder_layers_to_keep": "0"}
memory_optimizer = functools.partial(adam_with_memory, make_memory())
REFUSED = [
    (make_memory, {"values_dtype": torch.float16}, "`values_dtype` is", "float16", "bfloat16"),
    (lambda: exact_memory(values_of=exact_memory(), slots=36), {}, "`slots` is 36", "25"),
    (lambda: exact_memory(values_of=exact_memory(), value_dim=4), {}, "`value_dim` is 4", "6"),
    (build_two_widths, {}, "--memory-value-dim is 6", "8"),
    (call_memory(torch.zeros(2, D + 1)), {}, "a memory", "(2, 7)", "must be 6"),
    (call_memory(torch.zeros(())), {}, "a memory", "()", "must be 6"),
    (call_memory(torch.zeros(2, D), torch.zeros(3) > 0), {}, "a memory", "`padding_mask`", "(3,)"),
    (call_memory(torch.zeros(2, D), torch.zeros(2)), {}, "a memory", "`padding_mask`", "float32"),
    (exact_memory().train_only, {"slots": torch.ones(K)}, "`slots` are torch.float32", "booleans"),
    (exact_memory().train_only, {"slots": torch.ones(K + 1) > 0}, "`slots` are", "(26,)", "25"),
    *((layers_of, {"text": x}, f"--memory-layers is {x!r}", ONCE) for x in ("0", "3,13", "3,4,3")),
    *((layers_of, {"text": x}, f"--memory-layers is {x!r}", SUCH_AS) for x in ("3;4", "3,", "2.5")),
    (from_options, {"query_hidden_dims": "8;9"}, "--memory-query-hidden-dims is '8;9'", "512,512"),
    (language_model, {"memory_layers": "4"}, "--memory-layers is '4'", "from 1 to 3"),
    (language_model, NONE | INTERLEAVE, "--memory-interleave", "give --memory-layers"),
    (language_model, NONE | PARALLEL, "--memory-parallel", "give --memory-layers"),
    (language_model, INTERLEAVE | PARALLEL, "--memory-interleave", "--memory-parallel"),
    (language_model, {"memory_slots": 50}, "--memory-slots is 50", "49 or 64"),
    (language_model, {"decoder_layers_to_keep": "1"}, "--decoder-layers-to-keep is 1", "leave one"),
    (language_model, {"base_layers": 1}, "--base-layers is 1 with --memory-layers", "leave one"),
    (language_model, ADAM | {"memory_trainable_slots": "F"}, "--memory-trainable-slots F", "adam_"),
    (language_model, ADAM | {"memory_values_dtype": "bf16"}, "--memory-values-dtype bf16", "adam_"),
    (segments, {"memory_layers": "4"}, "--memory-layers is '4'", "from 1 to 3"),
    (segments, NONE | INTERLEAVE, "--memory-interleave", "give --memory-layers"),
    (persistent, PARALLEL, "--memory-parallel", "--decoder-ffn-embed-dim 0"),
    (tiny_transformer, {"encoder_memory_layers": "3"}, "--encoder-memory-layers is '3'", "1 to 2"),
    (tiny_transformer, {"decoder_memory_layers": "1,1"}, "--decoder-memory-layers is '1,1'"),
    (tiny_transformer, INTERLEAVE, "--memory-interleave", "give --encoder-memory-layers"),
    (tiny_transformer, KEPT, "--decoder-layers-to-keep is 0 with --decoder-memory-layers"),
    (memory_optimizer, {"memory_lr": float("inf")}, "--memory-lr is inf", "finite"),
    (memory_optimizer, {"memory_lr": -1.0}, "--memory-lr is -1.0", "0 or more"),
    (memory_optimizer, {"memory_weight_decay": -0.5}, "--memory-weight-decay is -0.5", "0 or more"),
    (memory_optimizer, {"fp16_adam_stats": True}, "--fp16-adam-stats", "leave it out"),
]


BF16 = {"values_dtype": torch.bfloat16}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case[2:]))
def test_what_no_memory_can_be(case):
    assert_refused(*case)


@pytest.mark.parametrize(
    ("before", "after", "times", "words"),
    [
        ({}, {"slots": 81}, 1, ["(64, 8)", "(81, 8)"]),
        ({}, {}, 2, ["2 memories", "has 1"]),
        ({}, BF16, 1, ["another dtype"]),
        (BF16, {}, 1, ["another dtype"]),
    ],
)
def test_the_optimizers_state_of_another_memory(before, after, times, words):
    memory = make_memory(**before)
    optimizer, other = adam_with_memory(memory), adam_with_memory(make_memory(**after))
    learn(memory, optimizer, 1)
    state = optimizer.state_dict()
    given = {"state_dict": {**state, "tables": state["tables"] * times}}
    words = "the checkpoint's optimizer state", *words, "give --reset-optimizer"
    assert_refused(other.load_state_dict, given, *words)


def test_faiss_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    words = "--memory-search faiss", "pip install faiss-cpu", "--memory-search torch"
    assert_refused(from_options, {"search": "faiss"}, *words)


def test_shards_without_their_optimizer_or_with_translation(monkeypatch):
    monkeypatch.setattr(AllColumns, "sharded", True)
    words = "--memory-shard-values with --optimizer adam", "give --optimizer adam_with_memory"
    assert_refused(from_options, {"shard_values": True, "optimizer": "adam"}, *words)
    given = {"encoder_memory_layers": "1", "memory_shard_values": True}
    given |= {"optimizer": "adam_with_memory", "task_cfg": SimpleNamespace(eval_bleu=True)}
    words = "--eval-bleu with --memory-shard-values", "leave out --eval-bleu"
    assert_refused(tiny_transformer, given, *words)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (None, "No such file"),
        (b"no archive", "cannot be read"),
        (b"", "cannot be read"),
        ({"memory2": SLOTS}, "has no memory6"),
        ({"memory6": np.arange(49)}, "int64"),
        ({"memory6": np.ones(48, bool)}, "(48,)"),
        ({"memory6": np.array([print] * 49)}, "Object arrays cannot be loaded"),
    ],
)
def test_a_file_of_other_slots_when_training_begins(arrays, reason, tmp_path):
    path = tmp_path / "slots.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        np.savez(path, **arrays)
    (memory,) = memories(language_model(memory_trainable_slots=str(path)))
    memory.train_slots_of(str(path), "memory6")
    memory.eval()(torch.zeros(1, 16))
    words = f"--memory-trainable-slots is {path}", reason, "rarely_read.npz"
    assert_refused(memory.train(), {"x": torch.zeros(1, 16)}, *words)
