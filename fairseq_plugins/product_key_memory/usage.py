"""How much of a memory is read: usage, and the KL divergence of the reads from uniform ones.

Lample et al. 2019 (arXiv:1907.05242), section 4.2. Over a set of tokens, z'_i sums the weights with
which slot i is read, and z = z' / Σ z'. Usage is the fraction of slots with z_i > 0, and
``KL = log K + Σ z_i log z_i`` nats: 0 if all slots are read equally, log K if only one is read.

Shapes: N tokens, H heads, k slots read by a head, K slots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class MemoryUsage:
    """Sums the weights with which each head reads each slot: ``reads`` (H, K).

    It is a forward hook of a memory's keys: ``memory.keys.register_forward_hook(usage)``. Tokens
    that are padding must be left out of the memory's input.
    """

    def __init__(self, slots: int, heads: int) -> None:
        self.reads = torch.zeros(heads, slots, dtype=torch.float64)
        self.tokens = 0

    def __call__(self, keys: object, inputs: object, selected: tuple[Tensor, Tensor]) -> None:
        """Record the scores and slots, both (N, H, k), that a memory's keys select."""
        scores, slots = selected
        self.record(slots, scores.detach().softmax(-1))

    def record(self, slots: Tensor, weights: Tensor) -> None:
        """Add reads of ``slots`` with ``weights``, both (N, H, k)."""
        self.reads = self.reads.to(weights.device)
        self.tokens += len(slots)
        for head, reads in enumerate(self.reads):
            reads.index_add_(0, slots[:, head].flatten(), weights[:, head].flatten().double())

    def total(self) -> Tensor:
        """Return z' (K,), summed over heads."""
        return self.reads.sum(0)


def usage(reads: Tensor) -> float:
    """Return the fraction of slots that were read, from z' (K,)."""
    return (reads > 0).double().mean().item()


def kl_from_uniform(reads: Tensor) -> float:
    """Return ``log K + Σ z log z`` in nats, from z' (K,); NaN if nothing was read."""
    z = reads.double() / reads.double().sum()
    return math.log(len(z)) + torch.special.xlogy(z, z).sum().item()
