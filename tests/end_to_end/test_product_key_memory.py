"""Product-key memories through fairseq's commands."""

import math
import re

import numpy as np
import pytest
import torch

from scripts.convert import average
from scripts.evaluate import memory_usage
from tests.end_to_end.commands import (
    ALL,
    NO_VALIDATION,
    USER_DIR,
    evaluate,
    loss,
    run,
    tokens_evaluated,
    train,
)
from tests.end_to_end.results import EXACT, assert_equal, parameters
from tests.end_to_end.trainings import training

TASK = (*USER_DIR, "--task", "language_modeling")
MEMORY = ("--memory-slots", 64, "--memory-heads", 2, "--memory-knn", 4, "--memory-query-dim", 8)
SMALL = ("--decoder-layers", 3, "--decoder-embed-dim", 16, "--decoder-attention-heads", 2)
OPTIMIZER = ("--optimizer", "adam_with_memory", "--lr", 0.003, "--memory-lr", 0.01)


def train_lm(data, folder, *options, updates=6):
    """Train a tiny language model on 8 blocks of 16 tokens in each update."""
    return run(
        "fairseq-train",
        data,
        *(*TASK, "--arch", "pkm_transformer_lm_tiny", *MEMORY),
        *(() if "--optimizer" in options else OPTIMIZER),
        *("--tokens-per-sample", 16, "--batch-size", 8, *ALL, "--max-update", updates),
        *("--save-dir", folder, "--log-format", "simple", "--no-epoch-checkpoints"),
        *options,
    )


def evaluate_lm(data, checkpoint, length=16, fails=False):
    """Run fairseq-eval-lm on the test split and return what it printed."""
    words = ("--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", length)
    return run("fairseq-eval-lm", data, *TASK, *words, *ALL, fails=fails)


def model_options(folder):
    """The model's options in the last checkpoint."""
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["cfg"]["model"]


def measured(printed):
    """Memory figures of each validation in a log, in order: dictionaries."""
    lines = [line for line in printed.splitlines() if "valid on 'valid' subset" in line]
    return [
        {key: float(value) for key, value in re.findall(r"(\w*memory\d+_\w+) ([\d.]+)", line)}
        for line in lines
    ]


def test_a_language_model_is_scored(data, trained, test_tokens):
    path = trained("product_key_memory") / "checkpoint_last.pt"
    printed = evaluate_lm(data, path)
    assert tokens_evaluated(printed) == test_tokens
    assert loss(printed) < math.log2(24)
    # fairseq would leave the blocks out, and report a perplexity of 1
    printed = evaluate_lm(data, path, length=1024, fails=True)
    assert "--tokens-per-sample is 1024" in printed


def test_other_optimizers_train_the_values_too(data, tmp_path, test_tokens):
    """By the model's own name, which fairseq loads in another way, and with dense gradients."""
    model = ("--arch", "pkm_transformer_lm", *SMALL, "--decoder-ffn-embed-dim", 32)
    placed = ("--memory-layers", "1,3", "--memory-interleave", "--memory-value-dim", 8)
    printed = train_lm(
        data,
        tmp_path,
        *model,
        *(*placed, "--optimizer", "adam", "--lr", 0.003),
        *("--no-decoder-learned-pos", "--checkpoint-activations"),
    )
    assert [sorted(figures) for figures in measured(printed)] == [
        ["memory1_kl", "memory1_usage", "memory3_kl", "memory3_usage"]
    ]
    options = model_options(tmp_path)
    assert (options["memory_optimizer"], options["decoder_learned_pos"]) == ("adam", False)
    values = parameters(tmp_path)["decoder.layers.2.memory_sublayer.memory.values"]
    assert values.shape == (64, 8)
    assert tokens_evaluated(evaluate_lm(data, tmp_path / "checkpoint_last.pt")) == test_tokens


SEGMENT_MODELS = {
    "transformer_xl": (
        *("--arch", "transformer_xl", *SMALL, "--decoder-ffn-embed-dim", 32),
        *("--memory-layers", "1,2", "--memory-interleave", *MEMORY),
    ),
    "adaptive span": (
        *("--arch", "all_attention_lm", *SMALL, "--persistent-vectors", 4),
        *("--adaptive-span", "--attention-span", 12, "--span-ramp", 4, "--span-init", 0.2),
        *("--criterion", "segment_loss", "--span-loss", 0.001),
        *("--memory-layers", "2", *MEMORY, "--memory-query-batch-norm"),
    ),
}


@pytest.mark.parametrize("name", SEGMENT_MODELS)
def test_segment_models_are_trained_and_scored(data, tmp_path, name, test_tokens):
    model = SEGMENT_MODELS[name]
    printed = train(data, tmp_path, *OPTIMIZER, "--max-update", 6, model=model)
    layers = model[model.index("--memory-layers") + 1]
    assert f"product-key memories in layers {layers}" in printed
    figures = [f"memory{layer}_{kind}" for layer in layers.split(",") for kind in ("kl", "usage")]
    assert [sorted(found) for found in measured(printed)] == [figures]
    assert model_options(tmp_path)["memory_optimizer"] == "adam_with_memory"
    printed = evaluate(data, tmp_path / "checkpoint_last.pt", "--tokens-per-sample", 5)
    assert tokens_evaluated(printed) == test_tokens


def test_the_slots_that_were_rarely_read_are_trained_alone(corpora, data, trained, tmp_path):
    model, tuned, reads = trained("product_key_memory"), tmp_path / "tuned", tmp_path / "reads"
    before, file = model / "checkpoint_last.pt", reads / "rarely_read.npz"
    words = ("--data", data, "--checkpoint", f"model={before}", "--output", reads, "--cpu")
    assert memory_usage.main([*map(str, words), "--rarely-read", "0.25"]) == 0
    rare = np.load(file)["memory2"]
    assert rare.sum() == 16
    words = ("--finetune-from-model", before, "--memory-trainable-slots", file, "--max-update", 6)
    run(*training(corpora, "product_key_memory", tuned, *words))
    (table,) = (name for name in parameters(model) if name.endswith("memory.values"))
    changed = (parameters(model)[table] != parameters(tuned)[table]).any(1)
    assert changed.any()
    assert not changed[torch.from_numpy(~rare)].any()
    # the file is not needed any longer
    file.unlink()
    evaluate_lm(data, tuned / "checkpoint_last.pt")


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", ()),
        ("model", ("--memory-share-values", "--memory-parallel", "--memory-output-gate")),
    ],
)
def test_tables_are_trained_resumed_averaged_and_scored(
    data, tmp_path, test_tokens, dtype, options
):
    model = ("--memory-layers", "1,3", "--memory-values-dtype", dtype, *options)
    train_lm(data, tmp_path, *model, *NO_VALIDATION, "--save-interval-updates", 3)
    resumed = tmp_path / "resumed"
    start = ("--restore-file", tmp_path / "checkpoint_1_3.pt")
    train_lm(data, resumed, *model, *NO_VALIDATION, *start)
    assert_equal(parameters(resumed), parameters(tmp_path), **EXACT)
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    tables = [x for name, x in saved["model"].items() if name.endswith("memory.values")]
    assert len(tables) == len(saved["last_optimizer_state"]["tables"]) == (1 if options else 2)
    if dtype == "bf16":
        for table in saved["last_optimizer_state"]["tables"]:
            assert len(table["rows"]) == len(table["exp_avg"]) <= table["slots"] == 64
        # fairseq saves in single precision what has less
        assert tables[0].dtype == torch.float32
        assert torch.equal(tables[0], tables[0].bfloat16().float())
    mean = tmp_path / "average.pt"
    average.main([*map(str, sorted(tmp_path.glob("checkpoint_1_*.pt"))), "--output", str(mean)])
    for path in (tmp_path / "checkpoint_last.pt", mean):
        assert tokens_evaluated(evaluate_lm(data, path)) == test_tokens
