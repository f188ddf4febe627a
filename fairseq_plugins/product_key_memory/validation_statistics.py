"""How much of each memory a validation pass reads, in fairseq's log and in TensorBoard.

Lample et al. 2019 (arXiv:1907.05242), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.logging import metrics
from torch import nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage

# behind the loss and what comes with it
_PRIORITY = 50


def watch_memories(model: nn.Module, memories: Mapping[str, ProductKeyMemory]) -> None:
    """Have validation log what ``model`` reads of its ``memories`` (by name).

    At the end of a pass over a validation set each memory logs ``NAME_usage``, the percentage of
    its slots that were read, and ``NAME_kl``, in nats, of all workers together. Training,
    evaluation and generation are not watched.

    Where the batches of a validation set cannot be shared out evenly, fairseq gives workers that
    have none left the first batch again, and its reads count twice.
    """
    if memories:
        _Watch(model, memories)


class _Watch:
    """Adds up the reads of a validation pass; the model's hooks hold it."""

    def __init__(self, model: nn.Module, memories: Mapping[str, ProductKeyMemory]) -> None:
        self.memories = dict(memories)
        self.reads = {
            name: MemoryUsage(len(memory.values), memory.heads)
            for name, memory in self.memories.items()
        }
        self._pass: Any = None
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: nn.Module, inputs: Any) -> None:
        # fairseq opens an aggregator for each pass over a validation set and reads it once, on all
        # workers, at the end; elsewhere the first one is that which sees everything
        root = next(iter(metrics.get_active_aggregators()), None)
        if model.training or root is None or root is metrics.get_meters("default"):
            return
        if root is not self._pass:
            self._pass = root
            for name, reads in self.reads.items():
                reads.clear(self.memories[name].values.device)
        for name, memory in self.memories.items():
            memory.usage = self.reads[name]
            self._log(name, self.reads[name])

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> None:
        # generation in validation (--eval-bleu) calls parts of the model by themselves
        for memory in self.memories.values():
            memory.usage = None

    def _log(self, name: str, reads: MemoryUsage) -> None:
        metrics.log_derived(
            f"{name}_usage", lambda _: round(100 * usage(reads.total()), 2), _PRIORITY
        )
        metrics.log_derived(
            f"{name}_kl", lambda _: round(kl_from_uniform(reads.total()), 4), _PRIORITY
        )
