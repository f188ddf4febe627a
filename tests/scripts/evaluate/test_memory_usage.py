"""Memory usage is correct for planned reads, and for models of each kind over a whole split."""

import json
import math

import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.product_key_memory.usage import kl_from_uniform, usage
from scripts.evaluate import memory_usage as measure_memory_usage
from scripts.evaluate._memory_reads import record_reads
from tests import tiny
from tests.product_key_memory.tiny import memories, tiny_language_model
from tests.scripts.evaluate.saved_memory_models import SOURCES, TARGETS, TOKENS

# 9 slots; each of 2 heads reads 2 of them
SMALL = {"memory_slots": 9, "memory_heads": 2, "memory_knn": 2, "memory_query_dim": 6}
PAIRS = {"encoder_memory2": SOURCES, "decoder_memory1": TARGETS}


class Planned(torch.nn.Module):
    """A query network that returns the next queries (N, H, d_q) of a plan, token by token."""

    def __init__(self, plan):
        super().__init__()
        self.plan, self.done = plan, 0

    def forward(self, x, tokens=None):
        start, self.done = self.done, self.done + len(x)
        return self.plan[start : self.done]


def test_planned_reads_are_counted_by_hand():
    """4 tokens read 9 slots; sub-keys are unit vectors, and i and j select slot 3i + j."""
    model = tiny_language_model(**SMALL, memory_layers="3").eval()
    (memory,) = memories(model)
    memory.keys.subkeys.data = torch.eye(3).expand(2, 2, 3, 3).clone()
    # the two slots that each head of a token reads, both with weight 1/2
    pairs = [[(0, 1), (1, 2)], [(0, 1), (0, 1)], [(3, 4), (6, 7)], [(4, 5), (4, 5)]]
    plan = torch.zeros(4, 2, 6)
    for token, heads in enumerate(pairs):
        for head, (one, two) in enumerate(heads):
            plan[token, head, one // 3] = 9
            plan[token, head, [3 + one % 3, 3 + two % 3]] = 5
    memory.query = Planned(plan)
    usages = record_reads(model)
    with torch.no_grad():
        # two batches of one stream
        for batch in tiny.tokens(1, 4).split(2, dim=1):
            model(batch)
    assert list(usages) == ["memory3"]
    figures = usages["memory3"].describe()
    reads = [1.5, 2.0, 0.5, 0.5, 1.5, 1.0, 0.5, 0.5, 0]
    assert usages["memory3"].total().tolist() == pytest.approx(reads)
    assert (figures["tokens"], figures["slots"]) == (4, 9)
    assert figures["usage"] == pytest.approx(8 / 9)
    assert figures["usage_of_heads"] == pytest.approx([5 / 9, 7 / 9])
    z = [read / 8 for read in reads if read]
    assert figures["kl"] == pytest.approx(math.log(9) + sum(p * math.log(p) for p in z))


def words(folder, name, data):
    checkpoint = f"{name}={folder}/{name}.pt"
    return ["--data", str(folder / data), "--checkpoint", checkpoint, "--cpu"]


def record(keys):
    """Return z' (K,) of a memory, to which all reads from now on are added."""
    reads = torch.zeros(49).double()

    def add(_, inputs, output):
        scores, slots = output
        reads.index_add_(0, slots.flatten(), scores.double().softmax(-1).flatten())

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
        assert memory["usage"] == usage(z)
        assert f" {100 * memory['usage']:.2f} |" in printed
        assert memory["kl"] == pytest.approx(kl_from_uniform(z), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("none", "text", "", "--checkpoint .*none.pt holds a model without .*--memory-layers"),
        ("pairs", "pairs", "--tokens-per-sample 5", "tokens_per_sample is 5, but .*pairs.pt holds"),
    ],
)
def test_what_cannot_be_is_refused(saved, refused, name, data, options, message):
    line = [*words(saved, name, data), *options.split()]
    refused(measure_memory_usage.main, line, message)
