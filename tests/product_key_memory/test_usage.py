"""Usage and KL divergence: their formulas, heads, workers, and their logs in validation."""

import math

import pytest
import torch

from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from tests.two_workers import on_two_workers

SLOTS = 8


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # section 4.2: perfect usage, very high KL
        ([1e-6] * 7 + [1.0], 1),
        ([2.25, 1.25, 0.5, 0, 0, 0, 0, 2], 0.5),
        ([0, 1, 1, 0, 0, 0, 0, 0], 0.25),
    ],
)
def test_figures_are_those_of_the_formulas(weights, expected):
    reads = torch.tensor(weights)
    assert usage(reads) == expected
    z = [weight / sum(weights) for weight in weights]
    kl = math.log(SLOTS) + sum(p * math.log(p) for p in z if p > 0)
    assert kl_from_uniform(reads) == pytest.approx(kl)


def test_weights_of_a_slot_are_summed_over_tokens_and_records_and_heads_apart_if_asked_for():
    slots = torch.tensor([[[0, 1], [1, 2]], [[3, 3], [0, 7]]])
    weights = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.5, 0.5], [0.125, 0.875]]])
    apart, together = MemoryUsage(SLOTS, 2, by_head=True), MemoryUsage(SLOTS, 2)
    one_head = MemoryUsage(SLOTS, 1, by_head=True)
    for _ in range(2):
        for recorded in (apart, together):
            recorded.record(slots, weights)
        one_head.record(slots[:, :1], weights[:, :1])
    assert apart.reads.tolist() == [[0.5, 1.5, 0, 2, 0, 0, 0, 0], [0.25, 1, 1, 0, 0, 0, 0, 1.75]]
    assert together.reads.tolist() == [[0.75, 2.5, 1, 2, 0, 0, 0, 1.75]]
    assert torch.equal(apart.total(), together.total())
    assert torch.equal(one_head.reads, apart.reads[:1])
    assert together.tokens == 4
    together.clear()
    # without reads, usage is 0 and the divergence is undefined
    assert (usage(together.total()), together.tokens) == (0, 0)
    assert math.isnan(kl_from_uniform(together.total()))


def record_on(rank):
    """Worker 0 reads slots 0 and 1, worker 1 nothing at first and then slots 1 and 5."""
    recorded = MemoryUsage(SLOTS, 2, by_head=True)
    weights = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    if rank == 0:
        recorded.record(torch.tensor([[[0, 1], [0, 7]]]), weights)
    first = recorded.total()
    if rank == 1:
        recorded.record(torch.tensor([[[5, 1], [5, 1]]]), weights)
    # asking again must not add the reads again
    return first, recorded.total(), recorded.total(), recorded.reads


def test_reads_of_two_workers_are_summed(tmp_path):
    for first, second, again, own in on_two_workers(record_on, tmp_path):
        assert first.tolist() == [1.25, 0.75, 0, 0, 0, 0, 0, 0]
        assert second.tolist() == [1.25, 1.5, 0, 0, 0, 1.25, 0, 0]
        assert torch.equal(again, second)
        assert own.sum().item() == 2
