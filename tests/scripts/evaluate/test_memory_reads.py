"""What heads read, and what they have in common, on patterns of reads made by hand."""

import math

import numpy as np
import pytest
import torch

from scripts.evaluate._memory_reads import (
    MemoryReads,
    curve,
    describe,
    record_usage,
    slots_that_carry,
)
from tests import tiny
from tests.product_key_memory.tiny import memories, tiny_language_model
from tests.scripts.evaluate.saved_memory_models import SMALL, unit_keys


class Planned(torch.nn.Module):
    """Stands in for a query network: the next queries (N, H, d_q) of a plan, token by token."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.done = 0

    def forward(self, x):
        found = self.plan[self.done : self.done + len(x)]
        self.done += len(x)
        return found


def test_planned_reads_are_counted_by_hand():
    """Of 4 tokens, with 9 slots and sub-keys that are unit vectors: slot 3i + j."""
    model = tiny_language_model(**SMALL, memory_layers="3").eval()
    (memory,) = memories(model)
    unit_keys(memory)
    # the slots that a token reads with its heads, both with half of the weight
    pairs = [[(0, 1), (1, 2)], [(0, 1), (0, 1)], [(3, 4), (6, 7)], [(4, 5), (4, 5)]]
    plan = torch.zeros(4, 2, 6)
    for token, heads in enumerate(pairs):
        for head, slots in enumerate(heads):
            plan[token, head, slots[0] // 3] = 9
            for slot in slots:
                plan[token, head, 3 + slot % 3] = 5
    memory.query_network = Planned(plan)
    with record_usage(model) as found, torch.no_grad():
        # two batches of one stream
        for batch in tiny.tokens(1, 4).split(2, dim=1):
            model(batch)
    assert list(found) == ["memory3"]
    figures = describe(found["memory3"])
    reads = [1.5, 2.0, 0.5, 0.5, 1.5, 1.0, 0.5, 0.5, 0]
    assert found["memory3"].total().tolist() == pytest.approx(reads)
    assert (figures["tokens"], figures["slots"], figures["knn"]) == (4, 9, 2)
    assert figures["usage"] == pytest.approx(8 / 9)
    assert figures["usage_of_heads"] == pytest.approx([5 / 9, 7 / 9])
    z = [read / 8 for read in reads if read]
    assert figures["kl"] == pytest.approx(math.log(9) + sum(p * math.log(p) for p in z))
    # 2 + 1.5 of 8 reads are too few, and with 1.5 more there are 5; 90% are 7.2
    assert figures["slots_with_share"] == {"0.5": 3, "0.9": 7}
    # the tokens' heads share 1, 2, 0 and 2 slots of 2
    assert figures["overlap_of_tokens"] == [[1, 5 / 8], [5 / 8, 1]]
    # the first head reads 0, 1, 3, 4, 5, the other 0, 1, 2, 4, 5, 6, 7
    shares = figures["overlap_of_slots"]
    assert shares == [pytest.approx([1, 4 / 5]), pytest.approx([4 / 7, 1])]
    weights = sorted((9 * p for p in z), reverse=True)
    assert figures["curve"]["rank"] == list(range(1, 9))
    assert figures["curve"]["weight"] == pytest.approx(weights)


def test_overlap_is_that_of_sets():
    generator = torch.Generator().manual_seed(3)
    slots = torch.rand(20, 3, 12, generator=generator).topk(4).indices
    reads = MemoryReads(12, 3)
    for part in slots.split(7):
        reads.record(part, torch.full(part.shape, 0.25))
    for one in range(3):
        for other in range(3):
            shared = [len(set(token[one]) & set(token[other])) / 4 for token in slots.tolist()]
            assert reads.overlap_of_tokens()[one, other].item() == pytest.approx(np.mean(shared))
    reads.clear()
    reads.record(slots[:1], torch.full((1, 3, 4), 0.25))
    shared = len(set(slots[0, 0].tolist()) & set(slots[0, 1].tolist())) / 4
    assert reads.overlap_of_tokens()[0, 1].item() == shared


def test_slots_that_carry_a_share():
    assert slots_that_carry(torch.tensor([1.0, 1, 1, 1]), 0.5) == 2
    assert slots_that_carry(torch.tensor([0.0, 8, 1, 1]), 0.5) == 1
    assert slots_that_carry(torch.full((10,), 0.1, dtype=torch.float64), 0.9) == 9


def test_a_curve_has_few_points_of_many_slots():
    points = curve(torch.arange(10**5, dtype=torch.float64))
    assert points["rank"][0] == 1
    assert points["rank"][-1] == 10**5 - 1
    assert len(points["rank"]) < 201
    assert points["weight"][0] == pytest.approx(2, rel=1e-3)


def test_recording_ends_and_leaves_validation_alone():
    model = tiny_language_model(memory_layers="2").eval()
    (memory,) = memories(model)
    with record_usage(model) as found, torch.no_grad():
        model(tiny.tokens(2, 3))
        assert memory.usage is None
    with torch.no_grad():
        model(tiny.tokens(2, 3))
    assert found["memory2"].tokens == 6
    with (
        pytest.raises(ValueError, match="MemoryLanguageModel has no product-key memory to record"),
        record_usage(tiny_language_model()),
    ):
        pass
    # by itself a memory has its place in the model for a name
    with record_usage(torch.nn.Sequential(memory)) as found:
        assert list(found) == ["0"]


def test_reads_of_a_context_do_not_count():
    reads = MemoryReads(4, 1)
    reads.counted = torch.tensor([False, True])
    reads.record(torch.tensor([[[0]], [[2]]]), torch.ones(2, 1, 1))
    assert (reads.tokens, reads.total().tolist()) == (1, [0, 0, 1, 0])
