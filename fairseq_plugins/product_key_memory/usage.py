"""How much of a memory is read: usage, and the KL divergence of the reads from uniform ones.

Lample et al. 2019 (arXiv:1907.05242), section 4.2. Over a set of tokens, z'_i sums the weights with
which slot i is read, and z = z' / Σ z'. Usage is the fraction of slots with z_i > 0, and
``KL = log K + Σ z_i log z_i`` nats: 0 if all slots are read equally, log K if only one is read.

Shapes: N tokens, H heads, k slots read by a head, K slots.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_plugins.product_key_memory.sharding import several_workers


class MemoryUsage:
    """Sums the weights with which a memory's slots are read, over all heads or ``by_head``."""

    def __init__(self, slots: int, heads: int = 1, by_head: bool = False) -> None:
        self.heads = heads if by_head else 1
        self.reads = torch.zeros(self.heads, slots, dtype=torch.float64)  # (H or 1, K)
        self.tokens = 0

    def record(self, slots: Tensor, weights: Tensor, tokens: Tensor | None = None) -> None:
        """Add reads of ``slots`` with ``weights``, both (N, H, k).

        ``tokens`` (N,), if given, is false for padding, which does not count.
        """
        weights = weights.detach().double()
        if tokens is not None:
            weights = weights.masked_fill(~tokens[:, None, None], 0)
        self.reads = self.reads.to(weights.device)
        self.tokens += len(slots) if tokens is None else int(tokens.sum())
        for head in range(self.heads):
            part = (slice(None), head) if self.heads > 1 else slice(None)
            self.reads[head].index_add_(0, slots[part].flatten(), weights[part].flatten())

    def clear(self, device: torch.device | None = None) -> None:
        """Forget all reads; count the next ones on ``device``, if given."""
        self.reads = torch.zeros_like(self.reads, device=device)
        self.tokens = 0

    def total(self) -> Tensor:
        """Return z' (K,), summed over heads and workers."""
        reads = self.reads.sum(0)
        if several_workers():
            dist.all_reduce(reads)
        return reads


def usage(reads: Tensor) -> float:
    """Return the fraction of slots that were read, from z' (K,)."""
    return (reads > 0).double().mean().item()


def kl_from_uniform(reads: Tensor) -> float:
    """Return ``log K + Σ z log z`` in nats, from z' (K,); NaN if nothing was read."""
    z = reads.double() / reads.double().sum()
    return math.log(len(z)) + torch.special.xlogy(z, z).sum().item()
