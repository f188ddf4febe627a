"""The command files of examples: as published, and understood by fairseq."""

import re
import subprocess

import pytest

import fairseq_plugins  # noqa: F401 (registers what the commands name)
from tests.command_files import (
    EXAMPLES,
    HYDRA,
    evaluation,
    training,
    words,
    write_stand_ins,
)
from tests.end_to_end.commands import run
from tests.product_key_memory.recipes import ARGUMENTS
from tests.scripts.saved_models import write_text
from tests.weighted_transformer.test_recipes import ARGUMENTS as WEIGHTED_ARGUMENTS
from tests.weighted_transformer.test_recipes import RECIPES as WEIGHTED_RECIPES

pytestmark = pytest.mark.filterwarnings(HYDRA)

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
RECIPES = [
    *(f"transformer_xl/{name}" for name in TRANSFORMER_XL),
    *(f"all_attention/{name}" for name in ALL_ATTENTION),
    *OTHERS,
    *ARGUMENTS,
    *WEIGHTED_RECIPES,
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
    return write_stand_ins(tmp_path_factory.mktemp("commands"))


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
    given = " ".join(
        [
            "train DATA CHECKPOINTS",
            *{**ARGUMENTS, **WEIGHTED_ARGUMENTS}.get(recipe, [])[:1],
            "[options]",
        ]
    )
    assert f"bash examples/{recipe}.sh {given}" in done.stderr
    assert "set -euo" not in done.stderr
