"""What no memory can be: errors name the argument or option, its value and the remedy."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fairseq_plugins.product_key_memory.options import (
    MemoryBuilder,
    MemoryLayersOptions,
    check_placed,
    parse_memory_layers,
)
from fairseq_plugins.product_key_memory.sharding import AllColumns
from tests import tiny
from tests.product_key_memory.standalone import D, K, adam_with_memory, exact_memory, make_memory
from tests.product_key_memory.tiny import (
    MEMORY,
    memories,
    option_of,
    tiny_language_model,
    tiny_transformer,
)


def assert_refused(work, *words):
    """An error says all the words, of which it begins with the first."""
    with pytest.raises(ValueError, match=f"^{re.escape(words[0])}") as refusal:
        work()
    assert [word for word in words if word not in str(refusal.value)] == []


def build(given, width=8):
    sizes = {"memory_slots": 25, "memory_knn": 2, "memory_query_dim": 4, "memory_optimizer": None}
    return MemoryBuilder(MemoryLayersOptions(**{**sizes, **given})).build(width)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("slots", 0, "at least 1"),
        ("heads", 0, "at least 1"),
        ("knn", -1, "at least 1"),
        ("query_dim", 0, "at least 1"),
        ("value_dim", 0, "at least 1"),
        ("query_hidden_dims", "4,0", "at least 1"),
        ("knn", 26, "at most"),
        ("query_dropout", 1.0, "in [0, 1)"),
        ("input_dropout", -0.1, "in [0, 1)"),
        ("value_dropout", 2, "in [0, 1)"),
        ("keys", "round", "product, flat"),
        ("search", "luck", "torch, faiss, plain"),
        ("slots", 26, "25 or 36"),
        ("query_dim", 7, "must be even"),
    ],
)
def test_arguments_and_their_options(name, value, remedy):
    argument, said = value, str(value)
    if name == "query_hidden_dims":
        argument, said = (4, 0), "0"
    assert_refused(lambda: exact_memory(**{name: argument}), f"`{name}`", said, remedy)
    assert_refused(lambda: build({f"memory_{name}": value}), option_of(name), said, remedy)


def test_values_of_another_precision():
    words = "`values_dtype` is torch.float16", "give torch.bfloat16"
    assert_refused(lambda: make_memory(values_dtype=torch.float16), *words)


@pytest.mark.parametrize("change", [{"slots": 36}, {"value_dim": 4}])
def test_shared_values_of_another_shape(change):
    ((name, value),) = change.items()
    words = f"`{name}` is {value}", "whose values are shared: give both the same"
    assert_refused(lambda: exact_memory(values_of=exact_memory(), **change), *words)


def test_shared_values_of_two_widths():
    builder = MemoryBuilder(MemoryLayersOptions(memory_slots=16, memory_knn=2, memory_query_dim=4,
                            memory_optimizer=None, memory_share_values=True))  # fmt: skip
    builder.build(8)
    assert_refused(lambda: builder.build(6), "--memory-value-dim is 6, and 8 in the memory")


@pytest.mark.parametrize(
    ("x", "mask", "word"),
    [
        (torch.zeros(2, D + 1), None, f"must be {D}"),
        (torch.zeros(()), None, f"must be {D}"),
        (torch.zeros(2, D), torch.zeros(3, dtype=torch.bool), "`padding_mask` of torch.bool, (3,)"),
        (torch.zeros(2, D), torch.zeros(2).long(), "`padding_mask` of torch.int64"),
    ],
)
def test_inputs_of_another_shape(x, mask, word):
    assert_refused(lambda: exact_memory()(x.double(), mask), "a memory", str(tuple(x.shape)), word)


@pytest.mark.parametrize("slots", [torch.ones(K), torch.ones(K + 1, dtype=torch.bool)])
def test_trained_slots_of_another_shape(slots):
    assert_refused(lambda: exact_memory().train_only(slots), "`slots` are", str(slots.dtype))


def test_faiss_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    words = "--memory-search faiss needs faiss", "pip install faiss-cpu, or take --memory-search"
    assert_refused(lambda: build({"memory_search": "faiss"}), *words)


NUMBERS = "give numbers of layers with commas between them, such as 6,12"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", "name layers from 1 to 12, each once"),
        ("-1,3", "name layers from 1 to 12, each once"),
        ("3,13", "name layers from 1 to 12, each once"),
        ("3,4,3", "name layers from 1 to 12, each once"),
        ("3;4", NUMBERS),
        ("3,", NUMBERS),
        ("2.5", NUMBERS),
    ],
)
def test_layers(text, reason):
    words = f"--memory-layers is {text!r}: {reason}"
    assert_refused(lambda: parse_memory_layers(text, 12, "--memory-layers"), words)


@pytest.mark.parametrize("text", ["8;9", "8,", "wide"])
def test_widths_of_hidden_layers(text):
    words = f"--memory-query-hidden-dims is {text!r}: give widths with commas between them"
    assert_refused(lambda: build({"memory_query_hidden_dims": text}), words)


def all_attention(**options):
    return tiny.tiny_model(**{**MEMORY, **options})


def transformer_xl(**options):
    return tiny.tiny_transformer_xl(**{**MEMORY, **options})


PLACED = "--memory-interleave without a memory to place: give"
MODELS = [
    *(
        (model, options, words)
        for model in (tiny_language_model, transformer_xl, all_attention)
        for options, words in [
            ({"memory_layers": "4"}, ("--memory-layers is '4'", "layers from 1 to 3, each once")),
            ({"memory_interleave": True}, (f"{PLACED} --memory-layers",)),
            ({"memory_layers": "1", "memory_slots": 50}, ("--memory-slots is 50",)),
        ]
    ),
    (
        tiny_language_model,
        {"memory_parallel": True},
        ("--memory-parallel without a memory to place",),
    ),
    (
        tiny_language_model,
        {"memory_layers": "1", "memory_interleave": True, "memory_parallel": True},
        ("--memory-interleave puts", "--memory-parallel", "leave one of the two out"),
    ),
    *(
        (
            tiny_language_model,
            {"memory_layers": "1", name: "1"},
            (f"--{name.replace('_', '-')} is 1 with --memory-layers",),
        )
        for name in ("decoder_layers_to_keep", "base_layers")
    ),
    (
        tiny_language_model,
        {"memory_layers": "2", "memory_trainable_slots": "F", "memory_optimizer": "adam"},
        ("--memory-trainable-slots F with --optimizer adam", "give --optimizer adam_with_memory"),
    ),
    (
        tiny_language_model,
        {"memory_layers": "2", "memory_values_dtype": "bf16", "memory_optimizer": "adam"},
        ("--memory-values-dtype bf16 with --optimizer adam", "give --optimizer adam_with_memory"),
    ),
    (
        all_attention,
        {"memory_layers": "2", "memory_parallel": True},
        ("--memory-parallel with --decoder-ffn-embed-dim 0",),
    ),
    (
        tiny_transformer,
        {"encoder_memory_layers": "3"},
        ("--encoder-memory-layers is '3'", "layers from 1 to 2, each once"),
    ),
    (
        tiny_transformer,
        {"decoder_memory_layers": "1,1"},
        ("--decoder-memory-layers is '1,1': name layers from 1 to 2, each once",),
    ),
    (tiny_transformer, {"memory_interleave": True}, (f"{PLACED} --encoder-memory-layers",)),
    (
        tiny_transformer,
        {"decoder_memory_layers": "1", "decoder_layers_to_keep": "0"},
        ("--decoder-layers-to-keep is 0 with --decoder-memory-layers",),
    ),
]


@pytest.mark.parametrize(("model", "options", "words"), MODELS)
def test_models(model, options, words):
    assert_refused(lambda: model(**options), *words)


def test_options_without_a_memory_are_warned_of(caplog):
    """A baseline's --memory-layers "" may stand beside a preset's sizes."""
    for options, memory in [({"memory_slots": 64, "memory_knn": 3}, False), ({}, False),
                            ({"memory_slots": 64}, True)]:  # fmt: skip
        given = MemoryLayersOptions(**{"memory_optimizer": None, **options})
        check_placed(given, memory, "--memory-layers")
    (warning,) = caplog.messages
    assert "--memory-slots, --memory-knn" in warning
    assert "--memory-layers 6" in warning


def test_shards_without_their_optimizer_or_with_translation(monkeypatch):
    monkeypatch.setattr(AllColumns, "sharded", True)
    given = {"memory_shard_values": True, "memory_optimizer": "adam"}
    assert_refused(lambda: build(given), "--memory-shard-values with --optimizer adam: another")
    given = {"encoder_memory_layers": "1", "optimizer": "adam_with_memory"}
    task = SimpleNamespace(eval_bleu=True)
    words = "--eval-bleu with --memory-shard-values: workers read", "leave out --eval-bleu"
    assert_refused(
        lambda: tiny_transformer(task_cfg=task, memory_shard_values=True, **given), *words
    )


SLOTS = np.arange(49) < 9


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (None, "cannot be read ([Errno 2] No such file or directory"),
        (b"no archive", "cannot be read ("),
        (b"", "cannot be read ("),
        ({"memory2": SLOTS}, "has no memory6"),
        ({"memory6": np.arange(49)}, "has int64 of shape (49,), and the memory 49 slots"),
        ({"memory6": np.ones(48, bool)}, "has bool of shape (48,), and the memory 49 slots"),
        ({"memory6": np.array([print] * 49)}, "cannot be read (Object arrays cannot be loaded"),
    ],
)
def test_a_file_of_other_slots_when_training_begins(arrays, reason, tmp_path):
    path = tmp_path / "slots.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        np.savez(path, **arrays)
    model = tiny_language_model(memory_layers="2", memory_trainable_slots=str(path))
    (memory,) = memories(model)
    memory.train_slots_of(str(path), "memory6")
    memory.eval()(torch.zeros(1, 16))
    words = f"--memory-trainable-slots is {path}", reason, "give the rarely_read.npz"
    assert_refused(lambda: memory.train()(torch.zeros(1, 16)), *words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"memory_lr": float("inf")}, ("--memory-lr is inf", "0 or more, and finite")),
        ({"memory_lr": -1.0}, ("--memory-lr is -1.0", "0 or more, and finite")),
        ({"memory_weight_decay": -0.5}, ("--memory-weight-decay is -0.5", "0 or more")),
        ({"fp16_adam_stats": True}, ("--fp16-adam-stats with this --optimizer", "leave it out")),
    ],
)
def test_options_of_the_optimizer(values, words):
    assert_refused(lambda: adam_with_memory(make_memory(), **values), *words)


def test_the_optimizers_state_of_another_memory():
    memory = make_memory()
    memory(torch.randn(3, 8)).sum().backward()
    optimizer = adam_with_memory(memory)
    optimizer.step()
    state = optimizer.state_dict()
    words = "the checkpoint's optimizer state", "(64, 8), here (81, 8): give --reset-optimizer"
    assert_refused(lambda: adam_with_memory(make_memory(slots=81)).load_state_dict(state), *words)
    others = {**state, "tables": state["tables"] * 2}
    words = "the checkpoint's optimizer state is of 2 memories", "give --reset-optimizer"
    assert_refused(lambda: adam_with_memory(memory).load_state_dict(others), *words)
