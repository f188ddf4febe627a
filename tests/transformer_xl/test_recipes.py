"""The command files of Transformer-XL: as published, and understood by fairseq."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_plugins.segment_language_model.segment_jitter import Jitter
from fairseq_plugins.transformer_xl.model import PRESETS, TransformerXLLanguageModel
from tests.command_files import (
    ABSENT,
    EXAMPLES,
    HYDRA,
    ROOT,
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
from tests.scripts.evaluate.saved_models import write_checkpoint, write_text

pytestmark = pytest.mark.filterwarnings(HYDRA)

# batch, segment, dropout, attention dropout, learning rate, warm-up, updates; evaluation: segment,
# memory, clamp, streams
TRANSFORMER_XL = {
    "enwik8_base": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820, 10),
    "enwik8_18l": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820, 10),
    "enwik8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000, 16),
    "text8_base": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820, 10),
    "text8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000, 16),
    "wt103_base": (60, 150, 0.1, 0.0, 2.5e-4, 0, 200_000, 64, 640, 400, 10),
    "wt103_ablation": (60, 128, 0.1, 0.0, 2.5e-4, 0, 200_000, 64, 500, None, 10),
    "wt103_large": (128, 384, 0.2, 0.2, 2.5e-4, 16_000, 4_000_000, 128, 1600, 1000, 16),
    "lm1b_base": (224, 32, 0.0, 0.0, 2.5e-4, 20_000, 500_000, 32, 128, None, 64),
    "lm1b_20l": (224, 32, 0.0, 0.0, 2.5e-4, 20_000, 500_000, 32, 128, None, 64),
    "lm1b_large": (512, 32, 0.05, 0.05, 1e-4, 30_000, 1_200_000, 32, 128, None, 16),
    "lm1b_ablation": (224, 32, 0.0, 0.0, 2.5e-4, 20_000, 400_000, 32, 128, None, 64),
}
# those that follow a script of the published codes: of PyTorch, and of TensorFlow
FOLLOWING = [name for name in TRANSFORMER_XL if name.endswith(("_base", "_large"))]
TRAINING, EVALUATION = tables("transformer_xl", "Flags beside the sources'")
# what no source has: names of files, the loss, and what follows from other options
NOT_IN_THE_TABLE = {
    *("--user-dir", "--task", "--arch", "--criterion", "--ddp-backend"),
    *("--save-dir", "--no-epoch-checkpoints", "--keep-interval-updates"),
    *("--adaptive-input", "--tie-adaptive-weights", "--output-bias"),
    "--share-decoder-input-output-embed",
}
WT103_ABLATIONS, LM1B_ABLATIONS = tables("transformer_xl", "Ablations")
ABLATIONS = [
    *(("wt103_ablation", *row[2:]) for row in WT103_ABLATIONS[1:]),
    *(("lm1b_ablation", *row[2:]) for row in LM1B_ABLATIONS[1:]),
]
# recurrence in training, positions, whether half of the loss counts, segment
ROWS = [
    (128, "transformer-xl", False, 128),
    (128, "shaw", False, 128),
    (128, "transformer-xl", True, 128),
    (0, "transformer-xl", False, 128),
    (0, "transformer-xl", True, 128),
    (0, "shaw", False, 128),
    (0, "shaw", True, 128),
    (0, "sinusoidal-absolute", True, 128),
    (0, "learned-absolute", True, 128),
    (0, "transformer-xl", False, 176),
    (0, "transformer-xl", True, 172),
    (32, "transformer-xl", False, 32),
    (32, "shaw", False, 32),
    (0, "transformer-xl", False, 32),
]
OTHERS = ["ptb", "english_characters", "english_ptb", "english_words"]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    return write_stand_ins(tmp_path_factory.mktemp("commands"))


def test_every_command_file_is_tested():
    assert of_room("transformer_xl") == sorted([*TRANSFORMER_XL, *OTHERS])


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_trains_as_published(stand_ins, name):
    batch, segment, dropout, attention, lr, warmup, updates, *_ = TRANSFORMER_XL[name]
    tensorflow = name.endswith("_large")
    cfg = training(stand_ins, f"transformer_xl/{name}")
    assert (cfg.dataset.batch_size, cfg.task.tokens_per_sample) == (batch, segment)
    assert (cfg.model.dropout, cfg.model.attention_dropout) == (dropout, attention)
    assert (cfg.model.mem_len, cfg.model.positions) == (None, "transformer-xl")
    assert (cfg.optimization.lr, cfg.optimization.max_update) == ([lr], updates)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("cosine", warmup)
    assert (cfg.optimizer._name, cfg.optimization.clip_norm) == ("adam", 0.25)
    assert cfg.model.init_std == (0.005 if name in ("wt103_large", "lm1b_large") else 0.02)
    assert (cfg.model.initial_values == "tensorflow", cfg.model.zero_memory) == (tensorflow,) * 2
    assert cfg.model.untie_r is (name in ("wt103_large", "lm1b_large"))
    assert cfg.lr_scheduler.min_lr == pytest.approx(lr / 100 if tensorflow else 0)
    assert cfg.task.shuffle_sentences is name.startswith("lm1b")
    words_as_symbols = name.startswith(("wt103", "lm1b"))
    criterion = "exact_adaptive_loss" if words_as_symbols else "cross_entropy"
    assert cfg.criterion._name == criterion
    assert cfg.model._name == f"transformer_xl_{name}"


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_chooses_the_best_checkpoint_as_its_source_validates(stand_ins, name):
    """Every so many updates, not at the ends of epochs, in the source's streams and segments."""
    cfg = training(stand_ins, f"transformer_xl/{name}")
    of_words = name.startswith(("wt103", "lm1b"))
    shorter = not of_words or name == "wt103_large"
    assert cfg.task.tokens_per_sample_valid == (128 if shorter else None)
    large = 8 if of_words else 16
    assert cfg.dataset.batch_size_valid == (large if name.endswith("_large") else 10)
    every = 10_000 if name.endswith("_large") else 4000
    assert cfg.checkpoint.save_interval_updates == every
    assert cfg.dataset.validate_interval == 1_000_000
    assert evaluation(stand_ins, f"transformer_xl/{name}").common_eval.path.endswith("_best.pt")


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_is_evaluated_as_published(stand_ins, name):
    *_, segment, memory, clamp, streams = TRANSFORMER_XL[name]
    cfg = evaluation(stand_ins, f"transformer_xl/{name}")
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (segment, streams)
    expected = {"mem_len": memory, "same_length": True}
    if clamp:
        expected["clamp_len"] = clamp
    assert ast.literal_eval(cfg.common_eval.model_overrides) == expected
    assert cfg.dataset.gen_subset == "test"


def test_the_table_of_flags_has_the_command_files_of_a_source():
    for head, *_ in (TRAINING, EVALUATION):
        assert sorted(head[2:]) == sorted(f"`{name}`" for name in FOLLOWING)


@pytest.mark.parametrize("name", FOLLOWING)
def test_training_has_the_flags_of_the_table(stand_ins, name):
    recipe = f"transformer_xl/{name}"
    given, table = words(stand_ins, recipe, "train"), flags(TRAINING, name)
    cfg = training(stand_ins, recipe)
    preset = {f"--{option.replace('_', '-')}" for option in PRESETS[cfg.model._name]}
    set_here = {word for word in given if word.startswith("--")} | preset
    assert set_here - NOT_IN_THE_TABLE <= set(table)
    for flag, cell in table.items():
        if cell == ABSENT:
            assert flag not in set_here
        elif flag == "--mem-len":
            # by default as long as a segment; validation's segments are, too
            assert (cfg.model.mem_len, cfg.task.tokens_per_sample) == (None, int(cell))
        elif flag == "--tokens-per-sample-valid":
            assert (value(cfg, flag) or cfg.task.tokens_per_sample) == int(cell)
        else:
            assert same(value(cfg, flag), cell), (flag, value(cfg, flag))


@pytest.mark.parametrize("name", FOLLOWING)
def test_evaluation_has_the_flags_of_the_table(stand_ins, name):
    cfg = evaluation(stand_ins, f"transformer_xl/{name}")
    overrides = ast.literal_eval(cfg.common_eval.model_overrides)
    table = flags(EVALUATION, name)
    assert set(overrides) <= set(table)
    for flag, cell in table.items():
        if cell == ABSENT:
            assert flag not in overrides
        else:
            found = value(cfg, flag) if flag.startswith("--") else overrides[flag]
            assert same(found, cell), (flag, found)


@pytest.mark.parametrize(("row", "expected"), zip(ABLATIONS, ROWS, strict=True))
def test_rows_of_the_ablations_are_options_of_their_command_files(stand_ins, row, expected):
    name, *given, _, length = row
    to_train, to_evaluate = (shlex.split(words.strip("`")) for words in given)
    memory, positions, half, segment = expected
    cfg = training(stand_ins, f"transformer_xl/{name}", *to_train)
    trained = TransformerXLLanguageModel.recurrence_length(cfg.model)
    assert (trained, cfg.model.positions) == (memory, positions)
    loss = "half_exact_adaptive_loss" if half else "exact_adaptive_loss"
    assert (cfg.criterion._name, cfg.task.tokens_per_sample) == (loss, segment)
    # what the last token of a segment sees in evaluation
    cfg = evaluation(stand_ins, f"transformer_xl/{name}", *to_evaluate)
    overrides = ast.literal_eval(cfg.common_eval.model_overrides)
    if memory:
        assert overrides == {"mem_len": int(length), "same_length": True}
    else:
        assert overrides == {}
        assert cfg.task.tokens_per_sample + cfg.task.extended_context == int(length)
        assert "absolute" not in positions or int(length) <= segment


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_command_files_are_understood(stand_ins, name):
    recipe = f"transformer_xl/{name}"
    assert training(stand_ins, recipe).optimization.clip_norm == 0.25
    assert evaluation(stand_ins, recipe).dataset.gen_subset == "test"


def test_the_ptb_recipe_is_as_published(stand_ins):
    recipe = "transformer_xl/ptb"
    trained = training(stand_ins, recipe)
    finished = training(stand_ins, recipe, action="finish")
    for cfg in (trained, finished):
        task, dataset = cfg.task, cfg.dataset
        assert (task.tokens_per_sample, task.extended_context, task.segment_jitter) == (70, 70, 5)
        assert cfg.criterion._name == "penalized_cross_entropy"
        penalties = (cfg.criterion.activation_penalty, cfg.criterion.temporal_penalty)
        assert (*penalties, cfg.optimizer.weight_decay) == (0.2, 0.1, 1.2e-6)
        assert (dataset.batch_size, cfg.optimization.clip_norm) == (10, 0.25)
    assert (trained.optimization.lr, trained.lr_scheduler.min_lr) == ([3e-4], 1e-4)
    assert trained.lr_scheduler.warmup_updates == 3000
    # at the learning rate that the cosine ends with; each of the last 50 epochs is kept
    assert (finished.optimization.lr, finished.lr_scheduler._name) == ([1e-4], "fixed")
    epochs = (trained.optimization.max_epoch, finished.optimization.max_epoch)
    assert (*epochs, finished.checkpoint.keep_last_epochs) == (125, 175, 50)
    assert (trained.checkpoint.no_epoch_checkpoints, finished.checkpoint.no_epoch_checkpoints) == (
        True,
        False,
    )
    cfg = evaluation(stand_ins, recipe)
    assert (cfg.task.tokens_per_sample, cfg.task.softmax_temperature) == (10, 1.08)
    assert cfg.common_eval.path.endswith("/checkpoint_average.pt")


def test_the_cosine_of_the_ptb_recipe_has_as_many_updates_as_its_epochs(stand_ins):
    cfg = training(stand_ins, "transformer_xl/ptb")
    streams = -(-929_589 // cfg.dataset.batch_size)  # tokens of Penn Treebank, line ends too
    epochs = range(1, cfg.optimization.max_epoch + 1)
    updates = sum(len(Jitter(5, 1, epoch).draw_starts(streams, 70)) - 1 for epoch in epochs)
    assert cfg.optimization.max_update == pytest.approx(updates, rel=1e-3)


def test_the_ptb_recipe_runs_from_training_to_the_evaluated_average(stand_ins, tmp_path):
    for split in ("train", "valid", "test"):
        write_text(tmp_path / "bin", 300, split)
    places = {"data": tmp_path, "checkpoints": tmp_path / "checkpoints"}
    small = (
        "--decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2 "
        "--decoder-ffn-embed-dim 16 --tokens-per-sample 10 --segment-jitter 1 --extended-context 4 "
        "--batch-size 4 --log-format simple"
    )

    def train(action, epochs):
        options = (*small.split(), "--max-epoch", str(epochs))
        given = words(stand_ins, "transformer_xl/ptb", action, *options, **places)
        return run("fairseq-train", *given)

    assert " penalty " in train("train", 2)
    finished = train("finish", 4)
    rates = re.findall(r"epoch 0*(\d+) \| .* lr ([\d.]+)", finished)
    assert rates == [("3", "0.0001"), ("4", "0.0001")]
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {f"checkpoint{name}.pt" for name in (3, 4, "_last", "_best")}
    average("ptb", tmp_path / "checkpoints")
    given = words(stand_ins, "transformer_xl/ptb", "evaluate", **places)
    printed = run("fairseq-eval-lm", *given)
    assert "Evaluated 300 tokens" in printed
    assert ", softmax temperature 1.08" in printed


def average(recipe, checkpoints):
    """Run a recipe's average, whose command is Python's."""
    subprocess.run(
        ["bash", EXAMPLES / f"transformer_xl/{recipe}.sh", "average", "DATA", checkpoints],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
    )


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("ptb", ["checkpoint126.pt", "checkpoint175.pt"]),
        ("english_ptb", ["checkpoint_4_4750.pt", "checkpoint_5_6500.pt"]),
    ],
)
def test_the_checkpoints_that_finish_keeps_are_averaged_and_no_others(recipe, names, tmp_path):
    for number, name in enumerate([*names, "checkpoint_best.pt", "checkpoint_last.pt"]):
        write_checkpoint(tmp_path / name, "transformer_xl", seed=number)
        state = torch.load(tmp_path / name, weights_only=True)
        state["optimizer_history"][-1]["num_updates"] = number
        torch.save(state, tmp_path / name)
    average(recipe, tmp_path)
    models = [torch.load(tmp_path / name, weights_only=True)["model"] for name in names]
    averaged = torch.load(tmp_path / "checkpoint_average.pt", weights_only=True)["model"]
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, (models[0][name] + models[1][name]) / 2)
