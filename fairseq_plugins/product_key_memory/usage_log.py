"""Usage and KL of each memory in fairseq's log of a validation, such as ``memory5_usage``.

Lample et al. 2019 (arXiv:1907.05242), section 4.2. With several workers they are of the first
worker's part of the data.

Shapes: N tokens, H heads, k slots read by a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fairseq.logging import metrics
from fairseq.logging.meters import Meter, MetersDict, safe_round
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage


class UsageLog:
    """A forward hook of a memory's keys; in validations it logs what the memory reads."""

    def __init__(self, slots: int, heads: int, name: str) -> None:
        self.slots, self.heads, self.name = slots, heads, name

    def __call__(self, keys: nn.Module, inputs: object, selected: tuple[Tensor, Tensor]) -> None:
        """Log the scores and slots, both (N, H, k), that the keys selected for a batch."""
        # only a validation has meters of its own
        others = metrics.get_meters("default")
        validates = all(meters is not others for meters in metrics.get_active_aggregators())
        if keys.training or not validates or torch.compiler.is_compiling():
            return
        reads = f"_reads_{self.name}"  # fairseq prints no meter with an underscore
        metrics.log_custom(partial(_Reads, self.slots, self.heads), reads, selected)
        for figure, name in ((usage, "usage"), (kl_from_uniform, "kl")):
            metrics.log_derived(f"{self.name}_{name}", partial(_compute, figure, reads))


class _Reads(Meter):
    """The reads of a memory in one validation."""

    def __init__(self, slots: int, heads: int) -> None:
        self.usage = MemoryUsage(slots, heads)

    def update(self, selected: tuple[Tensor, Tensor]) -> None:
        """Add the scores and slots of a batch."""
        self.usage(None, None, selected)


def _compute(figure: Callable[[Tensor], float], reads: str, meters: MetersDict) -> float:
    return safe_round(figure(meters[reads].usage.total()), 3)
