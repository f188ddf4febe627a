"""Memory usage is correct for planned reads, and for models of each kind over a whole split."""

import math
import re

import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.product_key_memory.usage import kl_from_uniform, usage
from scripts.evaluate._memory_reads import record_reads
from tests import tiny
from tests.product_key_memory.tiny import memories, tiny_language_model
from tests.scripts.evaluate.saved_memory_models import (
    SMALL,
    SOURCES,
    TARGETS,
    TOKENS,
    measure,
    unit_keys,
)

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
    unit_keys(memory)
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
def test_reads_and_losses_cover_the_split(saved, tmp_path, name, options, alone, tokens):
    data = "pairs" if name == "pairs" else "text"
    loaded = load(saved / f"{name}.pt", saved / data)
    reads = [record(memory.keys) for memory in memories(loaded.model)]
    loss = loaded.score_split("test", **alone).mean()
    status, result = measure(saved, name, data, tmp_path / "out", *options.split())
    assert status == 0
    (model,) = result["models"]
    assert model["loss"] == pytest.approx(loss, abs=1e-5)
    assert model["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    figures = model["memories"]
    assert {memory: figures[memory]["tokens"] for memory in figures} == tokens
    for memory, z in zip(figures.values(), reads, strict=True):
        assert memory["usage"] == usage(z)
        assert memory["kl"] == pytest.approx(kl_from_uniform(z), abs=1e-5)


def test_figures_are_printed_and_written(saved, tmp_path, capsys):
    # all tokens read slots 0, 1 and 1, 2 with weights 1/2
    status, result = measure(saved, "alike", "text", tmp_path / "a" / "out")
    assert status == 0
    printed = capsys.readouterr().out
    (model,) = result["models"]
    kl = math.log(9) + 0.5 * math.log(0.25) + 0.5 * math.log(0.5)
    assert model["memories"]["memory2"]["kl"] == pytest.approx(kl)
    for figure in (f"{kl:.4f}", "33.33", "22.22 22.22", f"{model['loss']:.4f}"):
        assert f" {figure} |" in printed


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("none", "text", "", "--checkpoint .*none.pt holds a model without .*--memory-layers"),
        ("pairs", "pairs", "--tokens-per-sample 5", "tokens_per_sample is 5, but .*pairs.pt holds"),
    ],
)
def test_what_cannot_be_is_refused(saved, tmp_path, capsys, name, data, options, message):
    status, result = measure(saved, name, data, tmp_path / "out", *options.split())
    assert status == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)
    assert result is None
