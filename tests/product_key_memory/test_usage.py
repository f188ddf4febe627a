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


def test_usage_without_reads_is_0_and_the_divergence_undefined():
    assert usage(torch.zeros(SLOTS)) == 0
    assert math.isnan(kl_from_uniform(torch.zeros(SLOTS)))


@pytest.mark.parametrize("keys", ["product", "flat"])
def test_a_hook_sums_the_reads_of_each_head_without_those_of_padding(keys):
    memory, x = exact_memory(keys=keys), draw(TOKENS, D)
    recorded, expected = MemoryUsage(K, 2), torch.zeros(2, K, dtype=torch.float64)
    hook = memory.keys.register_forward_hook(recorded)
    memory(x, PADDING)
    memory(x[:3])
    hook.remove()
    memory(x)
    read = torch.cat([x[~PADDING], x[:3]])
    assert recorded.tokens == len(read)
    for scores, slots in zip(*memory.keys(memory.query(read, None), memory.knn), strict=True):
        for head in range(2):
            for slot, weight in zip(slots[head], scores[head].softmax(0), strict=True):
                expected[head, slot] += weight.item()
    torch.testing.assert_close(recorded.reads, expected)
    torch.testing.assert_close(recorded.total(), expected.sum(0))
