"""The command files of examples: as published, and understood by fairseq."""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_plugins  # noqa: F401 (registers what the commands name)
from fairseq_plugins.models.product_key_memory import MemoryLanguageModel
from fairseq_plugins.modules.product_key_search import FlatKeys, ProductKeys
from tests.end_to_end.commands import ROOT, run, tokens_evaluated
from tests.saved_models import write_text
from tests.test_product_key_memory_presets import dictionary, parameters
from tests.tiny_memories import memories

# fairseq's use of hydra
HYDRA = r"ignore:[\s\S]*is validated against ConfigStore:UserWarning"
pytestmark = pytest.mark.filterwarnings(HYDRA)

EXAMPLES = ROOT / "examples"
# batch, segment, dropout, attention dropout, learning rate, warm-up, updates; evaluation: segment,
# memory, clamp
TRANSFORMER_XL = {
    "enwik8_base": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820),
    "enwik8_18l": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820),
    "enwik8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000),
    "text8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000),
    "wt103_base": (60, 150, 0.1, 0.0, 2.5e-4, 0, 200_000, 64, 640, 400),
    "wt103_large": (128, 384, 0.2, 0.2, 2.5e-4, 16_000, 4_000_000, 128, 1600, 1000),
    "lm1b_base": (224, 32, 0.0, 0.0, 2.5e-4, 20_000, 500_000, 32, 128, None),
    "lm1b_large": (512, 32, 0.05, 0.05, 1e-4, 30_000, 1_200_000, 32, 128, None),
}
# segment; penalty of spans, dropout of attention, of the feed-forward sublayer; updates, and with
# the final phase
ALL_ATTENTION = {
    "enwik8_small": (512, 1e-7, 0.3, 0.0, 450_000, 480_000),
    "enwik8_large": (512, 1e-7, 0.4, 0.0, 200_000, 210_000),
    "text8_small": (512, 1e-7, 0.3, 0.0, 450_000, 480_000),
    "text8_large": (512, 1e-7, 0.4, 0.0, 200_000, 210_000),
    "wt103": (256, 5e-7, 0.3, 0.0, 800_000, 850_000),
    "adaptive_span_enwik8_small": (512, 5e-7, 0.3, 0.3, 600_000, None),
    "adaptive_span_enwik8_large": (512, 5e-7, 0.4, 0.4, 150_000, 170_000),
    "adaptive_span_text8_small": (512, 5e-7, 0.3, 0.3, 900_000, None),
    "adaptive_span_text8_large": (512, 5e-7, 0.4, 0.4, 250_000, 270_000),
}
OTHERS = [
    *("transformer_xl/ptb", "transformer_xl/english_characters", "transformer_xl/english_words"),
    "all_attention/english_characters",
]
# layers and width; the layers with a memory, by the number of memories
PRODUCT_KEY_MEMORY = {
    f"product_key_memory/{layers}l_{width}d": (layers, width, places)
    for layers, places in [
        (12, ["", "6", "4,8", "3,6,9"]),
        (16, ["", "8", "6,12", "4,8,12"]),
        (24, ["", "12", "8,16", "6,12,18"]),
    ]
    for width in (1024, 1600)
}
# names of the arguments of train after CHECKPOINTS, and an example of them
ARGUMENTS = {
    **{name: ("MEMORIES", "2") for name in PRODUCT_KEY_MEMORY},
    "product_key_memory/ablation_size": ("SLOTS", "262k"),
    "product_key_memory/ablation_position": ("LAYER", "5"),
    "product_key_memory/ablation_heads": ("HEADS KNN", "4 32"),
    "product_key_memory/ablation_keys": ("SLOTS KEYS", "262k product"),
    "product_key_memory/english": ("SLOTS", "16k"),
}
RECIPES = [
    *(f"transformer_xl/{name}" for name in TRANSFORMER_XL),
    *(f"all_attention/{name}" for name in ALL_ATTENTION),
    *OTHERS,
    *ARGUMENTS,
]
SLOTS = {"16k": 128, "65k": 256, "147k": 384, "262k": 512, "590k": 768, "1M": 1024}
# what is not said otherwise: in layer 5, 512² slots, 4 heads, 32 slots a head, product keys
MEMORY_ABLATIONS = [
    ("ablation_size", "none", None),
    *(("ablation_size", name, {"slots": n * n}) for name, n in SLOTS.items()),
    ("ablation_size", "1M --memory-query-batch-norm", {"slots": 1024**2, "batch_norm": True}),
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
WITH_FINAL_PHASE = [name for name, (*_, last) in ALL_ATTENTION.items() if last]
# the points of the paper's figure 2: variant, persistent vectors, layers
ABLATIONS = {
    "--persistent-vectors 0": ("all", 0, 36),
    "--persistent-vectors 1024": ("all", 1024, 36),
    "--persistent-vectors 3072": ("all", 3072, 36),
    "--persistent-variant attn-split": ("attn-split", 2048, 36),
    "--persistent-variant single-head": ("single-head", 2048, 36),
    "--arch all_attention_lm_text8_large_ff_attn": ("ff-attn", 3072, 24),
    "--persistent-variant head-split": ("head-split", 2048, 36),
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder of commands that print their words as JSON, and of CHECKPOINTS that has one."""
    folder = tmp_path_factory.mktemp("commands")
    for name in ("fairseq-train", "fairseq-eval-lm"):
        path = folder / name
        program = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
        path.write_text(program, encoding="utf-8")
        path.chmod(0o755)
    (folder / "CHECKPOINTS").mkdir()
    (folder / "CHECKPOINTS" / "checkpoint_last.pt").touch()
    return folder


def words(stand_ins, recipe, action, *more, data="DATA", checkpoints=None):
    """What an action of a command file gives to fairseq."""
    places = (data, checkpoints or stand_ins / "CHECKPOINTS")
    done = subprocess.run(
        ["bash", EXAMPLES / f"{recipe}.sh", action, *places, *more],
        env={**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def parse(parser, given):
    """fairseq's reading of a command's words."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))


def training(stand_ins, recipe, *more, action="train"):
    return parse(options.get_training_parser(), words(stand_ins, recipe, action, *more))


def evaluation(stand_ins, recipe):
    return parse(options.get_eval_lm_parser(), words(stand_ins, recipe, "evaluate"))


def test_every_command_file_is_tested_and_in_its_readme():
    found = {path.relative_to(EXAMPLES) for path in EXAMPLES.glob("*/*.sh")}
    assert {path.with_suffix("").as_posix() for path in found} == set(RECIPES)
    for path in found:
        readme = (EXAMPLES / path.parent / "README.md").read_text(encoding="utf-8")
        assert f"[`{path.name}`]({path.name})" in readme, path


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_trains_as_published(stand_ins, name):
    batch, segment, dropout, attention, lr, warmup, updates, *_ = TRANSFORMER_XL[name]
    cfg = training(stand_ins, f"transformer_xl/{name}")
    assert (cfg.dataset.batch_size, cfg.task.tokens_per_sample) == (batch, segment)
    assert (cfg.model.dropout, cfg.model.attention_dropout) == (dropout, attention)
    assert (cfg.model.mem_len, cfg.model.positions) == (None, "transformer-xl")
    assert (cfg.optimization.lr, cfg.optimization.max_update) == ([lr], updates)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("cosine", warmup)
    assert (cfg.optimizer._name, cfg.optimization.clip_norm) == ("adam", 0.25)
    assert cfg.model.init_std == (0.005 if name in ("wt103_large", "lm1b_large") else 0.02)
    words_as_symbols = name.startswith(("wt103", "lm1b"))
    criterion = "exact_adaptive_loss" if words_as_symbols else "cross_entropy"
    assert cfg.criterion._name == criterion
    assert cfg.model._name == f"transformer_xl_{name}"


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_is_evaluated_as_published(stand_ins, name):
    *_, segment, memory, clamp = TRANSFORMER_XL[name]
    cfg = evaluation(stand_ins, f"transformer_xl/{name}")
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (segment, 1)
    expected = {"mem_len": memory, "same_length": True}
    if clamp:
        expected["clamp_len"] = clamp
    assert eval(cfg.common_eval.model_overrides) == expected
    assert cfg.dataset.gen_subset == "test"


@pytest.mark.parametrize("name", ALL_ATTENTION)
def test_all_attention_trains_as_published(stand_ins, name):
    segment, penalty, attention, activation, updates, _ = ALL_ATTENTION[name]
    cfg = training(stand_ins, f"all_attention/{name}")
    assert (cfg.dataset.batch_size, cfg.task.tokens_per_sample) == (64, segment)
    dropouts = (cfg.model.attention_dropout, cfg.model.activation_dropout)
    assert dropouts == (attention, activation)
    assert (cfg.model.adaptive_span, cfg.model.span_ramp, cfg.model.span_init) == (True, 32, 0)
    assert (cfg.model.mem_len, cfg.model.dropout) == (None, 0)
    assert cfg.criterion.span_loss == penalty
    assert cfg.optimization.max_update == updates
    assert cfg.lr_scheduler._name == "fixed"
    rule = (cfg.optimizer._name, *cfg.optimization.lr, cfg.lr_scheduler.warmup_updates)
    if name == "wt103":
        assert (cfg.criterion._name, cfg.model.attention_span) == ("span_exact_adaptive_loss", 2048)
        assert (*rule, cfg.optimization.clip_norm) == ("adam", 2.5e-4, 8000, 1)
        assert (cfg.model.embed_dropout, cfg.model.output_dropout) == (0.1, 0.1)
        assert cfg.distributed_training.ddp_backend == "legacy_ddp"
    else:
        assert (cfg.criterion._name, cfg.model.attention_span) == ("span_cross_entropy", 8192)
        assert (*rule, cfg.optimization.clip_norm) == ("adagrad_with_clip", 0.07, 32_000, 0)
        assert cfg.optimizer.adagrad_clip == 0.03
        assert (cfg.model.embed_dropout, cfg.model.output_dropout) == (0, 0)
    baseline = name.startswith("adaptive_span")
    assert cfg.model._name == (
        name.replace("adaptive_span", "adaptive_span_lm")
        if baseline
        else f"all_attention_lm_{name}"
    )


@pytest.mark.parametrize("name", WITH_FINAL_PHASE)
def test_the_final_phase_has_a_tenth_of_the_learning_rate(stand_ins, name):
    before, after = (
        words(stand_ins, f"all_attention/{name}", action) for action in ("train", "finish")
    )
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    (lr, last_lr), (updates, last_updates) = changed
    assert float(last_lr) == pytest.approx(float(lr) / 10)
    assert (int(updates), int(last_updates)) == ALL_ATTENTION[name][-2:]


@pytest.mark.parametrize("name", ALL_ATTENTION)
def test_all_attention_is_evaluated_as_published(stand_ins, name):
    cfg = evaluation(stand_ins, f"all_attention/{name}")
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (ALL_ATTENTION[name][0], 8)
    assert (cfg.common_eval.model_overrides, cfg.dataset.gen_subset) == ("{}", "test")


def test_the_final_phase_goes_on_from_the_last_checkpoint(stand_ins, tmp_path):
    for split in ("train", "valid"):
        write_text(tmp_path / "bin", 400, split)
    small = (
        "--decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2 --batch-size 4 "
        "--persistent-vectors 4 --attention-span 12 --tokens-per-sample 8 --warmup-updates 2 "
        "--log-interval 1 --log-format simple"
    )

    def rates(action, updates):
        given = words(
            *(stand_ins, "all_attention/enwik8_small", action, *small.split()),
            *("--max-update", str(updates)),
            data=tmp_path,
            checkpoints=tmp_path / "checkpoints",
        )
        return re.findall(r" num_updates=(\d+), lr=([\d.]+)", run("fairseq-train", *given))

    with pytest.raises(subprocess.CalledProcessError) as refused:
        rates("finish", 5)
    assert refused.value.stderr == (
        f"there is no checkpoint_last.pt in {tmp_path}/checkpoints to go on from: train first\n"
    )
    assert rates("train", 3)[-1] == ("3", "0.07")
    assert rates("finish", 5) == [("4", "0.007"), ("5", "0.007")]


@pytest.mark.parametrize("given", ABLATIONS)
def test_ablations_are_options_of_the_large_model(stand_ins, given):
    model = training(stand_ins, "all_attention/text8_large", *given.split()).model
    shape = (model.persistent_variant, model.persistent_vectors, model.decoder_layers)
    assert shape == ABLATIONS[given]
    assert (model.attention_dropout, model.adaptive_span, model.attention_span) == (0.4, True, 8192)


def test_ablations_are_those_of_the_readme():
    readme = (EXAMPLES / "all_attention" / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Ablations\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| [^|]* \| `(--[^`]*)` \|", section, re.MULTILINE) == list(ABLATIONS)


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
    row = [line for line in memory_readme().splitlines() if f"({Path(recipe).name}.sh)" in line][0]
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
    assert (cfg.common.cpu, cfg.common.seed, cfg.optimization.max_update) == (True, 1, 800)
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (256, 16)
    assert cfg.dataset.required_batch_size_multiple == 1
    assert cfg.common.log_file == str(stand_ins / "CHECKPOINTS" / "train.log")
    model = build(cfg, symbols=100)
    assert (len(model.decoder.layers), model.decoder.embed_dim) == (6, 256)
    assert model.decoder.layers[0].fc1.weight.shape == (1024, 256)
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
    assert sorted(saved) == ["checkpoint_best.pt", "train.log"]
    printed = run("fairseq-eval-lm", *words(stand_ins, recipe, "evaluate", *blocks, **places))
    assert tokens_evaluated(printed) == 91


def test_ablations_of_memories_are_those_of_the_readme():
    """Its commands are among those tested here."""
    known = {f"{name}.sh train DATA CHECKPOINTS {given}" for name, given, _ in MEMORY_ABLATIONS}
    told = set(re.findall(r"`(ablation_\w+\.sh train DATA CHECKPOINTS [^`]*)`", memory_readme()))
    assert told and told <= known


@pytest.mark.parametrize("recipe", OTHERS)
def test_the_other_command_files_are_understood(stand_ins, recipe):
    assert training(stand_ins, recipe).optimization.clip_norm == 0.25
    assert evaluation(stand_ins, recipe).dataset.gen_subset == "test"


def test_the_ptb_recipe_is_as_published(stand_ins):
    cfg = training(stand_ins, "transformer_xl/ptb")
    assert (cfg.task.tokens_per_sample, cfg.task.extended_context) == (70, 70)
    assert (cfg.optimization.lr, cfg.lr_scheduler.min_lr) == ([3e-4], 1e-4)
    assert (cfg.dataset.batch_size, cfg.lr_scheduler.warmup_updates) == (10, 3000)
    assert cfg.optimizer.weight_decay == 1.2e-6
    assert evaluation(stand_ins, "transformer_xl/ptb").task.tokens_per_sample == 10


def test_small_all_attention_models_learn_spans_or_have_fixed_ones(stand_ins):
    recipe = "all_attention/english_characters"
    feed_forward = ("--persistent-vectors", "0", "--decoder-ffn-embed-dim", "512")
    learned = training(stand_ins, recipe, *feed_forward)
    assert (learned.model.adaptive_span, learned.criterion._name) == (True, "span_cross_entropy")
    assert (learned.model.persistent_vectors, learned.model.decoder_ffn_embed_dim) == (0, 512)
    fixed = training(stand_ins, recipe, action="train-fixed")
    assert (fixed.model.adaptive_span, fixed.criterion._name) == (False, "cross_entropy")
    assert (fixed.model.persistent_vectors, fixed.model.attention_span) == (512, 256)
    assert fixed.common.log_file == str(stand_ins / "CHECKPOINTS" / "train.log")


def test_options_after_those_of_the_file_win(stand_ins):
    given = ("--batch-size", "6", "--mem-len", "0", "--bf16")
    for recipe in ("transformer_xl/enwik8_base", "all_attention/enwik8_small"):
        cfg = training(stand_ins, recipe, *given)
        assert (cfg.dataset.batch_size, cfg.model.mem_len, cfg.common.bf16) == (6, 0, True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arguments", [["train"], ["dance", "A", "B"]])
def test_what_is_missing_is_answered_with_the_usage(recipe, arguments):
    done = subprocess.run(
        ["bash", EXAMPLES / f"{recipe}.sh", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    given = " ".join(["train DATA CHECKPOINTS", *ARGUMENTS.get(recipe, [])[:1], "[options]"])
    assert f"bash examples/{recipe}.sh {given}" in done.stderr
    assert "set -euo" not in done.stderr
