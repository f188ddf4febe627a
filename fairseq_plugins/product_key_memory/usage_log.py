"""Usage and KL of each memory in fairseq's log of a validation, such as ``memory5_usage``.

Lample et al. 2019 (arXiv:1907.05242), section 4.2. With several workers they are of the first
worker's part of the data.

Shapes: N tokens, H heads, k slots read by a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from fairseq.logging import metrics
from fairseq.logging.meters import Meter, safe_round
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage

FIGURES = {"usage": usage, "kl": kl_from_uniform}
# fairseq saves these in checkpoints, and knows its own kinds of meters alone; the meters of one
# validation have no name
NAMED = ("default", "train", "train_inner", "valid")


class UsageLog:
    """A forward hook of a memory's keys; in validations it logs what the memory reads."""

    def __init__(self, slots: int, heads: int, name: str) -> None:
        self.slots, self.heads, self.name = slots, heads, name

    def __call__(self, keys: nn.Module, inputs: object, selected: tuple[Tensor, Tensor]) -> None:
        """Log the scores and slots, both (N, H, k), that the keys selected for a batch."""
        # first, lest a compiled layer depend on fairseq's meters
        if torch.compiler.is_compiling() or keys.training:
            return
        named = [metrics.get_meters(name) for name in NAMED]
        for meters in metrics.get_active_aggregators():
            if any(meters is other for other in named):
                continue
            if f"{self.name}_usage" not in meters:
                reads = MemoryUsage(self.slots, self.heads)
                for name, figure in FIGURES.items():
                    meters.add_meter(f"{self.name}_{name}", _Figure(reads, figure), 50)
            meters[f"{self.name}_usage"].reads(keys, inputs, selected)


class _Figure(Meter):
    """A figure of what a memory read in one validation."""

    def __init__(self, reads: MemoryUsage, figure: Callable[[Tensor], float]) -> None:
        self.reads, self.figure = reads, figure

    @property
    def smoothed_value(self) -> float:
        """Return the figure, rounded."""
        return safe_round(self.figure(self.reads.total()), 3)
