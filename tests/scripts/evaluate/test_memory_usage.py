"""Memory usage covers a whole split, for models of each kind."""

import json
import math
import re

import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.product_key_memory.usage import kl_from_uniform, usage
from scripts.evaluate import memory_usage as measure_memory_usage
from tests.product_key_memory.tiny import memories
from tests.scripts.evaluate.saved_memory_models import SOURCES, TARGETS, TOKENS

PAIRS = {"encoder_memory2": SOURCES, "decoder_memory1": TARGETS}


def words(folder, name, data):
    checkpoint = f"{name}={folder}/{name}.pt"
    return ["--data", str(folder / data), "--checkpoint", checkpoint, "--cpu"]


def record(keys):
    """Return z' of each head of a memory, (H, K), to which all reads from now on are added."""
    reads = torch.zeros(2, 49).double()

    def add(_, inputs, output):
        scores, slots = output
        for head in range(2):
            weights = scores[:, head].double().softmax(-1)
            reads[head].index_add_(0, slots[:, head].flatten(), weights.flatten())

    keys.register_forward_hook(add)
    return reads


@pytest.mark.parametrize(
    ("name", "options", "alone", "tokens"),
    [
        # the last of 10 blocks is shorter, and no batch has a multiple of 8 blocks
        ("blocks", "--batch-size 3", {"batch_size": 1}, {"memory2": TOKENS}),
        # sentences that are scored one at a time have no padding
        ("pairs", "--batch-size 4", {"batch_size": 1}, PAIRS),
        (
            *("streams", "--batch-size 3 --tokens-per-sample 8"),
            {"batch_size": 3, "tokens_per_sample": 8},
            {"memory1": TOKENS, "memory3": TOKENS},
        ),
    ],
)
def test_reads_and_losses_cover_the_split(saved, tmp_path, capsys, name, options, alone, tokens):
    data = "pairs" if name == "pairs" else "text"
    loaded = load(saved / f"{name}.pt", saved / data)
    reads = [record(memory.keys) for memory in memories(loaded.model)]
    loss = loaded.score_split("test", **alone).mean()
    output = tmp_path / "a" / "out"
    line = [*words(saved, name, data), "--output", str(output), *options.split()]
    assert measure_memory_usage.main(line) == 0
    (model,) = json.loads((output / "memory_usage.json").read_text())["models"]
    printed = capsys.readouterr().out
    assert f" {model['loss']:.4f} |" in printed
    assert model["loss"] == pytest.approx(loss, abs=1e-5)
    assert model["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    figures = model["memories"]
    assert {memory: figures[memory]["tokens"] for memory in figures} == tokens
    for memory, z in zip(figures.values(), reads, strict=True):
        assert memory["usage"] == usage(z.sum(0))
        assert memory["usage_of_heads"] == [usage(head) for head in z]
        assert f" {100 * memory['usage']:.2f} |" in printed
        assert memory["kl"] == pytest.approx(kl_from_uniform(z.sum(0)), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("none", "text", "", "--checkpoint .*none.pt holds a model without .*--memory-layers"),
        (
            "pairs",
            "pairs",
            "--tokens-per-sample 5",
            "tokens_per_sample is 5: no option of .*pairs",
        ),
    ],
)
def test_memory_usage_refuses_models_without_memories(
    saved, tmp_path, capsys, name, data, options, message
):
    line = [*words(saved, name, data), "--output", str(tmp_path / "out"), *options.split()]
    assert measure_memory_usage.main(line) == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
