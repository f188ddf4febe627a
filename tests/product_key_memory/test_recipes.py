"""The command files of product-key memory: they build and train what they say."""

import argparse
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

from fairseq_plugins.product_key_memory.model import MemoryLanguageModel
from fairseq_plugins.product_key_memory.search import FlatKeys, ProductKeys
from tests.command_files import (
    EXAMPLES,
    HYDRA,
    evaluation,
    training,
    words,
    write_stand_ins,
)
from tests.end_to_end.commands import run, tokens_evaluated
from tests.product_key_memory.recipes import ARGUMENTS, PRODUCT_KEY_MEMORY
from tests.product_key_memory.tiny import dictionary, memories, parameters
from tests.scripts.evaluate.saved_models import write_text

pytestmark = pytest.mark.filterwarnings(HYDRA)

SLOTS = {"16k": 128, "65k": 256, "147k": 384, "262k": 512, "590k": 768, "1M": 1024}
# what is not said otherwise: in layer 5, 512² slots, 4 heads, 32 slots a head, product keys
MEMORY_ABLATIONS = [
    ("ablation_size", "none", None),
    *(("ablation_size", name, {"slots": n * n}) for name, n in SLOTS.items()),
    *(
        ("ablation_size", f"{name} --memory-query-batch-norm", {"slots": n * n, "batch_norm": True})
        for name, n in SLOTS.items()
    ),
    *(("ablation_position", f"{n}", {"layer": n, "batch_norm": True}) for n in range(1, 7)),
    *(
        ("ablation_heads", f"{heads} {knn}", {"heads": heads, "knn": knn, "batch_norm": True})
        for heads, knn in [(1, 64), (2, 32), (4, 16), (8, 8), (1, 32), (8, 32), (4, 8), (4, 64)]
    ),
    *(
        ("ablation_keys", f"{name} {keys}", {"slots": n * n, "keys": keys, "batch_norm": True})
        for name, n in SLOTS.items()
        for keys in ("product", "flat")
    ),
]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    return write_stand_ins(tmp_path_factory.mktemp("commands"))


def build(cfg, symbols=60_000):
    """The model of a command, without its numbers."""
    source = dictionary(symbols)
    task = argparse.Namespace(source_dictionary=source, target_dictionary=source)
    with torch.device("meta"):
        return MemoryLanguageModel.build_model(cfg.model, task)


def of_memories(model):
    """What is known of each memory of a model, with its layer, from 1."""
    return [
        {
            "layer": number,
            "slots": len(memory.values),
            "heads": memory.heads,
            "knn": memory.knn,
            "keys": {ProductKeys: "product", FlatKeys: "flat"}[type(memory.keys)],
            "batch_norm": memory.query_network.batch_norm is not None,
        }
        for number, layer in enumerate(model.decoder.layers, start=1)
        for memory in memories(layer)
    ]


def assert_memories_are_trained_as_published(cfg):
    """Section 4.3; and what the optimizer, several GPUs and whole validations need."""
    optimizer = (cfg.optimizer._name, cfg.optimizer.adam_betas, cfg.optimizer.memory_lr)
    assert optimizer == ("adam_with_memory", "(0.9, 0.98)", 1e-3)
    assert (cfg.optimization.lr, cfg.lr_scheduler._name) == ([2.5e-4], "inverse_sqrt")
    assert (cfg.common.fp16, cfg.common.fp16_no_flatten_grads) == (True, True)
    assert cfg.distributed_training.ddp_backend == "legacy_ddp"
    assert cfg.dataset.required_batch_size_multiple == 1
    assert (cfg.task._name, cfg.task.tokens_per_sample) == ("language_modeling", 512)
    # blocks of the text as it is, not of sentences
    assert cfg.task.sample_break_mode == "none"
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (8, [32])
    assert cfg.model.memory_query_dim == 512


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("recipe", PRODUCT_KEY_MEMORY)
def test_models_with_memories_are_those_of_their_names(stand_ins, recipe, count):
    layers, width, places = PRODUCT_KEY_MEMORY[recipe]
    cfg = training(stand_ins, recipe, f"{count}")
    assert_memories_are_trained_as_published(cfg)
    model = build(cfg)
    assert (len(model.decoder.layers), model.decoder.embed_dim) == (layers, width)
    found = of_memories(model)
    assert ",".join(str(memory["layer"]) for memory in found) == places[count]
    # at regular intervals, the whole numbers that are not below L / (m + 1)
    interval = math.ceil(layers / (count + 1))
    assert [memory.pop("layer") for memory in found] == [
        number * interval for number in range(1, count + 1)
    ]
    published = {"slots": 512**2, "heads": 4, "knn": 32, "keys": "product", "batch_norm": True}
    assert all(memory == published for memory in found)
    row = next(line for line in memory_readme().splitlines() if f"({Path(recipe).name}.sh)" in line)
    told = row.split("|")[2 + count]
    told_layers = re.sub("[ ]", "", told.partition(":")[0]) if count else ""
    assert told_layers == places[count]
    assert told.split()[-1] == f"{parameters(model) / 1e6:,.0f}M"


def memory_readme():
    return (EXAMPLES / "product_key_memory" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "given", "changed"), MEMORY_ABLATIONS)
def test_ablations_of_memories_change_what_they_name(stand_ins, name, given, changed):
    cfg = training(stand_ins, f"product_key_memory/{name}", *given.split())
    assert_memories_are_trained_as_published(cfg)
    model = build(cfg, symbols=100)
    assert (len(model.decoder.layers), model.decoder.layers[0].self_attn.num_heads) == (6, 8)
    usual = {"layer": 5, "slots": 512**2, "heads": 4, "knn": 32, "keys": "product"}
    expected = [] if changed is None else [{**usual, "batch_norm": False, **changed}]
    assert of_memories(model) == expected


@pytest.mark.parametrize("recipe", ARGUMENTS)
def test_models_with_memories_are_evaluated_on_all_tokens(stand_ins, recipe):
    cfg = evaluation(stand_ins, recipe)
    assert (cfg.dataset.required_batch_size_multiple, cfg.dataset.gen_subset) == (1, "test")
    length = 256 if recipe.endswith("english") else 512
    assert (cfg.task.tokens_per_sample, cfg.common_eval.model_overrides) == (length, "{}")


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ("12l_1024d", ""),
        ("12l_1024d", "4"),
        ("24l_1600d", "--bf16"),
        ("ablation_size", "128k"),
        ("ablation_position", "7"),
        ("ablation_heads", "4"),
        ("ablation_keys", "16k"),
        ("ablation_keys", "none flat"),
        ("english", "1M"),
    ],
)
def test_arguments_that_no_model_has_are_answered_with_the_usage(stand_ins, recipe, arguments):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        words(stand_ins, f"product_key_memory/{recipe}", "train", *arguments.split())
    assert refused.value.returncode == 2
    assert "train DATA CHECKPOINTS" in refused.value.stderr


@pytest.mark.parametrize("slots", ["none", "16k", "262k"])
def test_small_models_with_memories(stand_ins, slots):
    recipe = "product_key_memory/english"
    cfg = training(stand_ins, recipe, slots, "--memory-query-batch-norm")
    assert (cfg.common.cpu, cfg.common.seed, cfg.optimization.max_epoch) == (True, 1, 2)
    assert (cfg.optimization.lr, cfg.optimizer.memory_lr, cfg.model.dropout) == ([4e-3], 4e-3, 0)
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (256, 16)
    assert cfg.dataset.required_batch_size_multiple == 1
    assert cfg.common.log_file == str(stand_ins / "CHECKPOINTS" / "train.log")
    model = build(cfg, symbols=100)
    assert (len(model.decoder.layers), model.decoder.embed_dim) == (6, 128)
    assert model.decoder.layers[0].fc1.weight.shape == (512, 128)
    usual = {"layer": 5, "heads": 4, "knn": 32, "keys": "product", "batch_norm": True}
    sizes = {"none": [], "16k": [128**2], "262k": [512**2]}[slots]
    assert of_memories(model) == [{**usual, "slots": size} for size in sizes]


def test_the_small_recipe_trains_and_scores_all_tokens(stand_ins, tmp_path):
    for split, length in [("train", 400), ("valid", 90), ("test", 91)]:
        write_text(tmp_path / "bin", length, split)
    places = {"data": tmp_path, "checkpoints": tmp_path / "checkpoints"}
    blocks = ("--tokens-per-sample", "8", "--batch-size", "4")
    small = (
        *("16k", "--memory-query-batch-norm", "--memory-slots", "64", "--memory-knn", "4"),
        *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
        *("--decoder-attention-heads", "2", "--max-update", "2"),
    )
    recipe = "product_key_memory/english"
    printed = run("fairseq-train", *words(stand_ins, recipe, "train", *small, *blocks, **places))
    assert '"valid_memory5_usage"' in printed
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(saved) == ["checkpoint_best.pt", "checkpoint_last.pt", "train.log"]
    printed = run("fairseq-eval-lm", *words(stand_ins, recipe, "evaluate", *blocks, **places))
    assert tokens_evaluated(printed) == 91


def test_ablations_of_memories_are_those_of_the_readme():
    """Its commands are among those tested here."""
    known = {f"{name}.sh train DATA CHECKPOINTS {given}" for name, given, _ in MEMORY_ABLATIONS}
    told = set(re.findall(r"`(ablation_\w+\.sh train DATA CHECKPOINTS [^`]*)`", memory_readme()))
    assert told
    assert told <= known
