"""The command files of examples/transformer_xl: as published, and understood by fairseq."""

import json
import os
import subprocess
import sys

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_plugins  # noqa: F401 (registers what the commands name)
from tests.end_to_end.commands import ROOT

# fairseq's use of hydra
HYDRA = r"ignore:[\s\S]*is validated against ConfigStore:UserWarning"
pytestmark = pytest.mark.filterwarnings(HYDRA)

FOLDER = ROOT / "examples" / "transformer_xl"
# batch, segment, dropout, attention dropout, learning rate, warm-up, updates; evaluation: segment,
# memory, clamp
PUBLISHED = {
    "enwik8_base": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820),
    "enwik8_18l": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820),
    "enwik8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000),
    "text8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000),
    "wt103_base": (60, 150, 0.1, 0.0, 2.5e-4, 0, 200_000, 64, 640, 400),
    "wt103_large": (128, 384, 0.2, 0.2, 2.5e-4, 16_000, 4_000_000, 128, 1600, 1000),
    "lm1b_base": (224, 32, 0.0, 0.0, 2.5e-4, 20_000, 500_000, 32, 128, None),
    "lm1b_large": (512, 32, 0.05, 0.05, 1e-4, 30_000, 1_200_000, 32, 128, None),
}
OTHERS = ["ptb", "english_characters", "english_words"]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder of commands that print their words as JSON."""
    folder = tmp_path_factory.mktemp("commands")
    for name in ("fairseq-train", "fairseq-eval-lm"):
        path = folder / name
        program = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
        path.write_text(program, encoding="utf-8")
        path.chmod(0o755)
    return folder


def words(stand_ins, recipe, *arguments):
    """What a command file gives to fairseq."""
    done = subprocess.run(
        ["bash", FOLDER / f"{recipe}.sh", *arguments],
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


def training(stand_ins, recipe, *more):
    given = words(stand_ins, recipe, "train", "DATA", "CHECKPOINTS", *more)
    return parse(options.get_training_parser(), given)


def evaluation(stand_ins, recipe):
    given = words(stand_ins, recipe, "evaluate", "DATA", "CHECKPOINTS")
    return parse(options.get_eval_lm_parser(), given)


def test_every_command_file_is_tested():
    assert {path.stem for path in FOLDER.glob("*.sh")} == {*PUBLISHED, *OTHERS}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_training_is_as_published(stand_ins, recipe):
    batch, segment, dropout, attention, lr, warmup, updates, *_ = PUBLISHED[recipe]
    cfg = training(stand_ins, recipe)
    assert (cfg.dataset.batch_size, cfg.task.tokens_per_sample) == (batch, segment)
    assert (cfg.model.dropout, cfg.model.attention_dropout) == (dropout, attention)
    assert (cfg.model.mem_len, cfg.model.positions) == (None, "transformer-xl")
    assert (cfg.optimization.lr, cfg.optimization.max_update) == ([lr], updates)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("cosine", warmup)
    assert (cfg.optimizer._name, cfg.optimization.clip_norm) == ("adam", 0.25)
    assert cfg.model.init_std == (0.005 if recipe in ("wt103_large", "lm1b_large") else 0.02)
    words_as_symbols = recipe.startswith(("wt103", "lm1b"))
    criterion = "exact_adaptive_loss" if words_as_symbols else "cross_entropy"
    assert cfg.criterion._name == criterion
    assert cfg.model._name == f"transformer_xl_{recipe}"


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_evaluation_is_as_published(stand_ins, recipe):
    *_, segment, memory, clamp = PUBLISHED[recipe]
    cfg = evaluation(stand_ins, recipe)
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (segment, 1)
    expected = {"mem_len": memory, "same_length": True}
    if clamp:
        expected["clamp_len"] = clamp
    assert eval(cfg.common_eval.model_overrides) == expected
    assert cfg.dataset.gen_subset == "test"


@pytest.mark.parametrize("recipe", OTHERS)
def test_the_other_command_files_are_understood(stand_ins, recipe):
    assert training(stand_ins, recipe).optimization.clip_norm == 0.25
    assert evaluation(stand_ins, recipe).dataset.gen_subset == "test"


def test_the_ptb_recipe_is_as_published(stand_ins):
    cfg = training(stand_ins, "ptb")
    assert (cfg.task.tokens_per_sample, cfg.task.extended_context) == (70, 70)
    assert (cfg.optimization.lr, cfg.lr_scheduler.min_lr) == ([3e-4], 1e-4)
    assert (cfg.dataset.batch_size, cfg.lr_scheduler.warmup_updates) == (10, 3000)
    assert cfg.optimizer.weight_decay == 1.2e-6
    assert evaluation(stand_ins, "ptb").task.tokens_per_sample == 10


def test_options_after_those_of_the_file_win(stand_ins):
    cfg = training(stand_ins, "enwik8_base", "--batch-size", "6", "--mem-len", "0", "--bf16")
    assert (cfg.dataset.batch_size, cfg.model.mem_len, cfg.common.bf16) == (6, 0, True)


@pytest.mark.parametrize("recipe", [*PUBLISHED, *OTHERS])
@pytest.mark.parametrize("arguments", [["train"], ["dance", "A", "B"]])
def test_what_is_missing_is_answered_with_the_usage(recipe, arguments):
    done = subprocess.run(
        ["bash", FOLDER / f"{recipe}.sh", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert (
        f"bash examples/transformer_xl/{recipe}.sh train DATA CHECKPOINTS [options]" in done.stderr
    )
    assert "set -euo" not in done.stderr
