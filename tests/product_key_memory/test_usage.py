"""Usage and KL divergence: their formulas, heads, and what a hook records."""

import math

import pytest
import torch

from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from tests.product_key_memory.layer import PADDING, TOKENS, D, K, draw, exact_memory

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
def test_usage_and_divergence_equal_their_formulas(weights, expected):
    reads = torch.tensor(weights)
    assert usage(reads) == expected
    z = [weight / sum(weights) for weight in weights]
    kl = math.log(SLOTS) + sum(p * math.log(p) for p in z if p > 0)
    assert kl_from_uniform(reads) == pytest.approx(kl)


def test_records_are_summed_over_tokens_for_each_head():
    slots = torch.tensor([[[0, 1], [1, 2]], [[3, 3], [0, 7]]])
    weights = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.5, 0.5], [0.125, 0.875]]])
    recorded, one_head = MemoryUsage(SLOTS, 2), MemoryUsage(SLOTS, 1)
    for _ in range(2):
        recorded.record(slots, weights)
        one_head.record(slots[:, :1], weights[:, :1])
    assert recorded.reads.tolist() == [
        [0.5, 1.5, 0, 2, 0, 0, 0, 0],
        [0.25, 1, 1, 0, 0, 0, 0, 1.75],
    ]
    assert recorded.total().tolist() == [0.75, 2.5, 1, 2, 0, 0, 0, 1.75]
    assert torch.equal(one_head.reads, recorded.reads[:1])
    assert recorded.tokens == 4


def test_usage_without_reads_is_0_and_the_divergence_undefined():
    assert usage(torch.zeros(SLOTS)) == 0
    assert math.isnan(kl_from_uniform(torch.zeros(SLOTS)))


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_a_hook_records_the_reads_without_those_of_padding(keys):
    memory, x = exact_memory(keys=keys), draw(TOKENS, D)
    # one-hot values, so the output shows which slots were read
    memory.values.weight.data = torch.eye(K, dtype=torch.float64)[:, :D].contiguous()
    recorded = MemoryUsage(K, 2)
    hook = memory.keys.register_forward_hook(recorded)
    summed = memory(x, PADDING).detach().sum(0)
    hook.remove()
    memory(x)
    assert recorded.tokens == (~PADDING).sum()
    assert recorded.reads.sum(1).tolist() == pytest.approx([4.0, 4.0])
    torch.testing.assert_close(recorded.total()[:D], summed)
