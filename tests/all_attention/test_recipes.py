"""The command files of all-attention and adaptive span: as published, understood by fairseq."""

import re
import subprocess

import pytest

from fairseq_plugins.all_attention.model import PRESETS
from tests.command_files import (
    ABSENT,
    EXAMPLES,
    HYDRA,
    evaluation,
    flags,
    of_room,
    same,
    tables,
    training,
    value,
    words,
    write_stand_ins,
)
from tests.end_to_end.commands import run
from tests.scripts.evaluate.saved_models import write_text

pytestmark = pytest.mark.filterwarnings(HYDRA)

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
    "adaptive_span_enwik8_8l": (256, 2e-6, 0.0, 0.0, 150_000, None),
    "adaptive_span_text8_small": (512, 5e-7, 0.3, 0.3, 900_000, None),
    "adaptive_span_text8_large": (512, 5e-7, 0.4, 0.4, 250_000, 270_000),
}
(FLAGS,) = tables("all_attention", "Flags beside the sources'")
# text8 has scripts of the baselines only
FOLLOWING = [name for name in ALL_ATTENTION if name not in ("text8_small", "text8_large")]
# what no source has: names of files, the loss, and what follows from other options
NOT_IN_THE_TABLE = {
    *("--user-dir", "--task", "--arch", "--criterion", "--ddp-backend"),
    *("--save-dir", "--no-epoch-checkpoints", "--keep-interval-updates"),
    *("--save-interval-updates", "--adaptive-input", "--output-bias"),
}
SMALL = "all_attention/english_characters"
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


def test_every_command_file_is_tested():
    assert of_room("all_attention") == sorted([*ALL_ATTENTION, "english_characters"])


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
        span, warmup = (1024, 8000) if name.endswith("8l") else (8192, 32_000)
        assert (cfg.criterion._name, cfg.model.attention_span) == ("span_cross_entropy", span)
        assert (*rule, cfg.optimization.clip_norm) == ("adagrad_with_clip", 0.07, warmup, 0)
        assert cfg.optimizer.adagrad_clip == 0.03
        assert (cfg.model.embed_dropout, cfg.model.output_dropout) == (0, 0)
    baseline = name.startswith("adaptive_span")
    assert cfg.model._name == (
        name.replace("adaptive_span", "adaptive_span_lm")
        if baseline
        else f"all_attention_lm_{name}"
    )


@pytest.mark.parametrize("name", FOLLOWING)
def test_training_has_the_flags_of_the_table(stand_ins, name):
    recipe = f"all_attention/{name}"
    given, table = words(stand_ins, recipe, "train"), flags(FLAGS, name)
    cfg = training(stand_ins, recipe)
    preset = {f"--{option.replace('_', '-')}" for option in PRESETS[cfg.model._name]}
    set_here = {word for word in given if word.startswith("--")} | preset
    assert set_here - NOT_IN_THE_TABLE <= set(table)
    for flag, cell in table.items():
        if cell == ABSENT:
            assert flag not in set_here
        else:
            assert same(value(cfg, flag), cell), (flag, value(cfg, flag))


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
    # the published scripts keep and evaluate no other
    assert cfg.common_eval.path.endswith("/checkpoint_last.pt")


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


def test_the_small_recipe_is_understood(stand_ins):
    assert training(stand_ins, SMALL).optimization.clip_norm == 0.25
    assert evaluation(stand_ins, SMALL).dataset.gen_subset == "test"


def test_small_all_attention_models_learn_spans_or_have_fixed_ones(stand_ins):
    feed_forward = "--decoder-layers 4 --persistent-vectors 0 --decoder-ffn-embed-dim 512"
    learned = training(stand_ins, SMALL, *feed_forward.split())
    assert (learned.model.adaptive_span, learned.criterion._name) == (True, "span_cross_entropy")
    assert (learned.model.persistent_vectors, learned.model.decoder_ffn_embed_dim) == (0, 512)
    fixed = training(stand_ins, SMALL, action="train-fixed")
    assert (fixed.model.adaptive_span, fixed.criterion._name) == (False, "cross_entropy")
    assert (fixed.model.persistent_vectors, fixed.model.attention_span) == (256, 256)
    # 1.5 times the layers with half of the vectors, as the paper's 36 beside 24
    assert (fixed.model.decoder_layers, learned.model.decoder_layers) == (6, 4)
    assert fixed.common.log_file == str(stand_ins / "CHECKPOINTS" / "train.log")
