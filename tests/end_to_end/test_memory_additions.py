"""Memories beside what the paper has, through fairseq's commands."""

import re

import numpy as np
import pytest
import torch

from scripts.convert import average
from scripts.evaluate import memory_usage
from tests.end_to_end.commands import (
    ALL,
    USER_DIR,
    evaluate,
    log_probabilities,
    run,
    tokens_evaluated,
    train,
    train_together,
)
from tests.end_to_end.results import assert_equal, parameters

TASK = (*USER_DIR, "--task", "language_modeling")
MEMORY = ("--memory-slots", 64, "--memory-heads", 2, "--memory-knn", 4, "--memory-query-dim", 8)
OPTIMIZER = ("--optimizer", "adam_with_memory", "--memory-lr")
SMALL = ("--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-attention-heads", 2)
TRANSFORMER_XL = ("--arch", "transformer_xl", *SMALL, "--decoder-ffn-embed-dim", 32)
ADDED = ("--memory-parallel", "--memory-output-gate", "--memory-output-norm")


def train_lm(data, folder, *options, updates, lr=0.003):
    """Train the tiny language model on blocks of 16 tokens."""
    return run(
        "fairseq-train",
        data,
        *(*TASK, "--arch", "pkm_transformer_lm_tiny", *MEMORY, *OPTIMIZER, lr, "--lr", lr),
        *("--tokens-per-sample", 16, "--batch-size", 8, *ALL, "--max-update", updates),
        *("--save-dir", folder, "--log-format", "simple", "--no-epoch-checkpoints", *options),
    )


def evaluate_lm(data, checkpoint):
    """Run fairseq-eval-lm on the test split and return what it printed."""
    path = ("--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", 16)
    return run("fairseq-eval-lm", data, *TASK, *path, *ALL)


def valid_loss(printed):
    """The loss of the last validation, to three places."""
    return float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", printed)[-1])


def test_a_table_that_layers_share_is_trained_saved_and_resumed(data, tmp_path, test_tokens):
    shared = ("--memory-layers", "1,3", "--memory-share-values", *ADDED)
    printed = train_lm(data, tmp_path, *shared, updates=4)
    first = parameters(tmp_path)
    tables = [name for name in first if name.endswith("memory.values")]
    assert tables == ["decoder.layers.0.memory_sublayer.memory.values"]
    assert "lazy Adam updates the values of memories: 64 x 128 numbers" in printed
    printed = train_lm(data, tmp_path, *shared, updates=6)
    assert "(epoch 1 @ 4 updates)" in printed
    assert not torch.equal(parameters(tmp_path)[tables[0]], first[tables[0]])
    assert tokens_evaluated(evaluate_lm(data, tmp_path / "checkpoint_last.pt")) == test_tokens


@pytest.mark.parametrize("place", ["--memory-interleave", "--memory-parallel"])
def test_a_trained_language_model_gets_a_memory(data, tmp_path, place):
    """Before its first update the loss is that of the model without: an update of nothing."""
    plain = train_lm(data, tmp_path / "plain", "--memory-layers", "", updates=4)
    start = ("--finetune-from-model", tmp_path / "plain" / "checkpoint_last.pt")
    added = (*start, "--memory-layers", "2,3", place, "--memory-zero-init")
    printed = train_lm(data, tmp_path / "added", *added, updates=1, lr=0)
    assert valid_loss(printed) == pytest.approx(valid_loss(plain), abs=0.0011)
    assert printed.count("is added, its output zero, so that the loss stays what it was") == 2
    values = parameters(tmp_path / "added")["decoder.layers.1.memory_sublayer.memory.values"]
    assert not values.any()
    train_lm(data, tmp_path / "learned", *added, updates=3)
    values = parameters(tmp_path / "learned")["decoder.layers.1.memory_sublayer.memory.values"]
    assert values.any()


def test_a_trained_segment_model_gets_a_gated_memory(data, tmp_path):
    plain, added = tmp_path / "plain", tmp_path / "added"
    train(data, plain, "--max-update", 4, model=TRANSFORMER_XL)
    memory = ("--memory-layers", "1,2", "--memory-share-values", "--memory-zero-init", *ADDED)
    start = ("--finetune-from-model", plain / "checkpoint_last.pt", "--lr", 0, "--max-update", 1)
    model = (*TRANSFORMER_XL, *memory, *MEMORY)
    train(data, added, *OPTIMIZER, 0, *start, model=model)
    found = [
        log_probabilities(evaluate(data, folder / "checkpoint_last.pt", "--output-word-probs"))
        for folder in (plain, added)
    ]
    assert found[0] == pytest.approx(found[1], abs=3e-4)


def test_the_slots_that_were_rarely_read_are_trained_alone(data, tmp_path):
    trained, tuned, reads = (tmp_path / name for name in ("trained", "tuned", "reads"))
    train_lm(data, trained, "--memory-layers", "2", updates=3)
    before = trained / "checkpoint_last.pt"
    measured = ("--data", data, "--checkpoint", f"model={before}", "--output", reads, "--cpu")
    assert memory_usage.main([*map(str, measured), "--rarely-read", "0.25"]) == 0
    rare = np.load(reads / "rarely_read.npz")["memory2"]
    assert rare.sum() == 16
    start = ("--finetune-from-model", before, "--memory-layers", "2")
    train_lm(data, tuned, *start, "--memory-trainable-slots", reads / "rarely_read.npz", updates=6)
    table = next(key for key in parameters(trained) if key.endswith("memory.values"))
    changed = (parameters(trained)[table] != parameters(tuned)[table]).any(1)
    assert changed.any()
    assert not changed[torch.from_numpy(~rare)].any()
    # the file is not needed any longer
    (reads / "rarely_read.npz").unlink()
    evaluate_lm(data, tuned / "checkpoint_last.pt")


BF16 = ("--memory-layers", "1,3", "--memory-values-dtype", "bf16")


def test_values_in_bfloat16_are_trained_resumed_averaged_and_scored(data, tmp_path, test_tokens):
    kept = ("--save-interval-updates", 3, "--disable-validation")
    train_lm(data, tmp_path, *BF16, *kept, updates=6)
    resumed = tmp_path / "resumed"
    start = ("--restore-file", tmp_path / "checkpoint_1_3.pt")
    train_lm(data, resumed, *BF16, *start, "--disable-validation", updates=6)
    assert_equal(parameters(resumed), parameters(tmp_path), rtol=0, atol=0)
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    for table in saved["last_optimizer_state"]["tables"]:
        assert len(table["rows"]) == len(table["exp_avg"]) <= table["slots"] == 64
    values = saved["model"]["decoder.layers.0.fc1.memory.values"]
    # fairseq saves in single precision what has less
    assert values.dtype == torch.float32
    assert torch.equal(values, values.bfloat16().float())
    mean = tmp_path / "average.pt"
    average.main([*map(str, sorted(tmp_path.glob("checkpoint_1_*.pt"))), "--output", str(mean)])
    for path in (tmp_path / "checkpoint_last.pt", mean):
        assert tokens_evaluated(evaluate_lm(data, path)) == test_tokens


def test_two_workers_with_sharded_memories_learn_the_translations_that_one_learns(
    make_pairs, tmp_path
):
    pairs = make_pairs("small", "large", change=str.upper)
    words = (
        *(pairs, *USER_DIR, "--arch", "pkm_transformer_tiny", *MEMORY, *OPTIMIZER, 0.01),
        *("--lr", 0.003, "--adam-eps", 1e-3, "--max-tokens", 100, *ALL, "--max-update", 6),
        *("--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64, "--dropout", 0),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--log-format", "simple", "--log-interval", 1, "--no-epoch-checkpoints"),
    )
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    printed = [
        run("fairseq-train", *words, "--save-dir", alone, "--update-freq", 2),
        train_together(*words, "--save-dir", sharded, "--memory-shard-values"),
    ]
    losses = [
        [float(loss) for loss in re.findall(r"epoch 001: .* loss=([\d.]+),", log)]
        for log in printed
    ]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=0.0011)
    assert valid_loss(printed[1]) == pytest.approx(valid_loss(printed[0]), abs=0.0011)
    assert_equal(parameters(sharded), parameters(alone), rtol=1e-3, atol=1e-4)
    translations = []
    for folder in (alone, sharded):
        path = ("--path", folder / "checkpoint_last.pt", "--beam", 2, "--batch-size", 8)
        found = run("fairseq-generate", pairs, *USER_DIR, *path, *ALL)
        translations.append(re.findall(r"^H-(\d+)\t\S+\t(.*)$", found, re.MULTILINE))
    assert len(translations[0]) == 31
    assert translations[1] == translations[0]
