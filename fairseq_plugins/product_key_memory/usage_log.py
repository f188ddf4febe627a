"""What each memory does, in fairseq's log of a validation, such as ``memory5_usage``.

Usage and KL: Lample et al. 2019 (arXiv:1907.05242), section 4.2. The lag: by how many running
standard deviations the mean of the queries differs from batch norm's running mean, on average over
their dimensions. With several workers they are of the first worker's part of the data.

Shapes: N tokens, H heads, k slots read by a head, F dimensions of all heads' queries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from fairseq.logging import metrics
from fairseq.logging.meters import safe_round
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.query import SyncBatchNorm1d
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage

logger = logging.getLogger(__name__)

# a lag that a training warns of; one of 0.58 cost 0.24 bits a token (the paper's details.md)
LARGE_LAG = 0.5


class UsageLog:
    """Forward hooks of a memory's keys and batch norm; in validations they log all batches."""

    def __init__(self, memory: ProductKeyMemory, name: str) -> None:
        self.name, self.warned = name, False
        self.sizes = len(memory.values.weight), memory.heads
        memory.keys.register_forward_hook(self.add_reads)
        if memory.query.batch_norm is not None:
            memory.query.batch_norm.register_forward_hook(self.add_queries)

    def add_reads(self, keys: nn.Module, inputs: object, selected: tuple[Tensor, Tensor]) -> None:
        """Add the scores and slots, both (N, H, k), that the keys selected for a batch."""
        if not _is_validation(keys):
            return
        if self._begins("usage", lambda _: safe_round(usage(self.reads.total()), 3)):
            self.reads = MemoryUsage(*self.sizes)
        self._begins("kl", lambda _: safe_round(kl_from_uniform(self.reads.total()), 3))
        self.reads(keys, inputs, selected)

    def add_queries(self, norm: SyncBatchNorm1d, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        """Add a batch's queries (N, F) before batch norm."""
        if not _is_validation(norm):
            return
        if self._begins("lag", lambda _: self._lag(norm)):
            self.total, self.tokens = 0.0, 0
        self.total = self.total + inputs[0].sum(0, dtype=torch.float64)
        self.tokens += len(inputs[0])

    def _begins(self, figure: str, compute: Callable[[object], float]) -> bool:
        """Return whether this batch is the first of a validation, and have the figure logged."""
        key = f"{self.name}_{figure}"
        begins = key not in metrics.get_active_aggregators()[0]
        metrics.log_derived(key, compute, 50)
        return begins

    def _lag(self, norm: SyncBatchNorm1d) -> float:
        """Return the lag, and warn if it is large, once."""
        distance = (self.total / self.tokens - norm.running_mean).abs()
        lag = (distance * (norm.running_var + norm.eps).rsqrt()).mean().item()
        if lag > LARGE_LAG and not self.warned:
            self.warned = True
            logger.warning(
                "batch norm's running statistics lag behind the queries of %s by %.1f standard "
                "deviations: validation and evaluation use them, so their losses are higher than "
                "what was learned; train with norms before the sublayers "
                "(--decoder-normalize-before or --encoder-normalize-before), evaluate an average "
                "of the last checkpoints, or measure the statistics anew (docs/training.md)",
                self.name,
                lag,
            )
        return safe_round(lag, 3)


def _is_validation(module: nn.Module) -> bool:
    """Return whether a batch of a validation runs; fairseq's evaluations log to "default"."""
    # first, lest a compiled layer depend on fairseq's meters
    if torch.compiler.is_compiling() or module.training:
        return False
    return metrics.get_active_aggregators()[0] is not metrics.get_meters("default")
