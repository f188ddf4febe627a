"""Product-key memories through fairseq's commands."""

import json
import math
import re

import pytest
import torch

from fairseq_plugins import load
from tests.end_to_end.commands import ALL, USER_DIR, loss, run, tokens_evaluated
from tests.end_to_end.trainings import logged, parameters, training_command

TASK = (*USER_DIR, "--task", "language_modeling")


def train_lm(corpora, folder, *options):
    """Train a language model with memories for 6 updates."""
    words = training_command(corpora, "product_key_memory", folder, "--max-update", 6, *options)
    # only adam_with_memory has this option
    without = ("--memory-lr", "0.01") if "adam" in options else ()
    run(*(word for word in words if word not in without))


def evaluate_lm(data, checkpoint, length=16, fails=False):
    words = ("--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", length)
    return run("fairseq-eval-lm", data, *TASK, *words, *ALL, fails=fails)


def test_a_language_model_is_scored_and_continues_prompts(data, trained, test_tokens):
    path = trained("product_key_memory") / "checkpoint_last.pt"
    printed = evaluate_lm(data, path)
    assert tokens_evaluated(printed) == test_tokens
    assert loss(printed) < math.log2(24)
    # fairseq would drop all blocks and report a perplexity of 1
    assert "--tokens-per-sample is 1024" in evaluate_lm(data, path, length=1024, fails=True)
    words = ("--path", path, "--tokens-per-sample", 16, "--beam", 2, "--max-len-b", 9)
    printed = run("fairseq-interactive", data, *TASK, *words, *ALL, text="the cat\n")
    assert re.search(r"^H-0\t\S+\tthe cat", printed, re.MULTILINE)


def test_finetuning_with_another_optimizer_trains_the_values(corpora, trained, tmp_path):
    start = trained("product_key_memory")
    options = ("--optimizer", "adam", "--finetune-from-model", start / "checkpoint_last.pt")
    train_lm(corpora, tmp_path, *options)
    before, after = (
        parameters(folder)["decoder.layers.0.memory.values.weight"] for folder in (start, tmp_path)
    )
    moved = (after - before).abs()
    # six steps of Adam from these very values
    assert 0 < moved.max() < 6.01 * 0.003


def test_other_optimizers_train_the_values_too(corpora, data, tmp_path, test_tokens):
    """Adam trains them with dense gradients."""
    options = """--memory-layers 1,2 --memory-interleave --memory-value-dim 8 --optimizer adam
    --no-decoder-learned-pos --checkpoint-activations"""
    train_lm(corpora, tmp_path, *options.split())
    path = tmp_path / "checkpoint_last.pt"
    options = torch.load(path, weights_only=True)["cfg"]["model"]
    assert (options["memory_optimizer"], options["decoder_learned_pos"]) == ("adam", False)
    values = parameters(tmp_path)["decoder.layers.1.memory.values.weight"]
    assert values.shape == (64, 8)
    assert tokens_evaluated(evaluate_lm(data, path)) == test_tokens


@pytest.mark.parametrize("interleave", [(), ("--memory-interleave",)])
@pytest.mark.parametrize("paper", ["product_key_memory", "transformer_xl"])
def test_a_memory_is_put_into_a_trained_model(corpora, tmp_path, paper, interleave):
    """All that the trained model has stays, except the feed-forward sublayer that is replaced."""
    sizes = "--memory-slots 64 --memory-heads 2 --memory-knn 4 --memory-query-dim 8"
    options = ("--max-update", 1, *sizes.split(), *interleave, "--memory-layers")
    run(*training_command(corpora, paper, tmp_path / "plain", *options, ""))
    start = tmp_path / "plain" / "checkpoint_last.pt"
    options = (*options, "2", "--finetune-from-model", start, "--optimizer", "adam_with_memory")
    options += ("--lr", 0, "--memory-lr", 0)
    printed = run(*training_command(corpora, paper, tmp_path / "new", *options))
    assert "keeps its initial values" in printed
    before, after = parameters(tmp_path / "plain"), parameters(tmp_path / "new")
    replaced = {name for name in before if re.search(r"layers\.1\.(feed_forward\.)?fc[12]\.", name)}
    for name in before.keys() - (set() if interleave else replaced):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)
    added = after.keys() - before.keys()
    assert any("values.weight" in name for name in added)
    assert all("layers.1." in name for name in added)
    assert replaced.isdisjoint(after) != bool(interleave)
    # only a training may do this
    if paper == "product_key_memory":
        with pytest.raises(ValueError, match="memory"):
            load(start, corpora["text"], memory_layers="2", memory_slots=64)
        words = (
            "--path",
            start,
            "--model-overrides",
            {"memory_layers": "2"},
            "--gen-subset",
            "test",
        )
        words += ("--tokens-per-sample", 16, *ALL)
        printed = run("fairseq-eval-lm", corpora["text"], *TASK, *words, fails=True)
        assert "memories that its checkpoint does not have" in printed


def test_a_validation_logs_the_usage_of_each_memory(corpora, data, tmp_path):
    """It is what scripts.evaluate.memory_usage measures."""
    words = ("--max-update", 6, "--validate-interval-updates", 3, "--valid-subset", "test")
    words = training_command(corpora, "product_key_memory", tmp_path, *words)
    printed = run(*words).replace("| test |", "| valid |").replace('"test_', '"valid_')
    numbers = {
        name: float(x) for name, x in logged(printed)["valid", 6].items() if "memory" in name
    }
    words = ("--data", data, "--checkpoint", tmp_path / "checkpoint_last.pt", "--split", "test")
    run("scripts.evaluate.memory_usage", *words, "--output", tmp_path / "usage", "--cpu")
    measured = json.loads((tmp_path / "usage" / "memory_usage.json").read_text())
    (model,) = measured["models"]
    assert numbers == {
        f"{memory}_{name}": pytest.approx(figures[name], abs=5e-4)
        for memory, figures in model["memories"].items()
        for name in ("usage", "kl")
    }
    assert len(numbers) == 4
