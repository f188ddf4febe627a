"""Count what the memories of a model read over a split."""

import argparse
import math
import re
import warnings
from typing import Any

import numpy as np
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from fairseq_plugins.python_interface.loading import load
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.command_line import NamedFile
from scripts._shared.commands import short
from scripts.evaluate._scoring import choose_device

_LAYER = re.compile(r"(encoder|decoder)\.(?:network\.)?layers\.(\d+)\.")


class MemoryReads(MemoryUsage):
    """The weights with which the slots of one memory were read.

    ``counted`` (N,) is a mask of the tokens of the next batch that count; None for all.
    """

    counted: Tensor | None = None

    def record(self, slots: Tensor, weights: Tensor) -> None:
        """Add the reads of ``slots`` with ``weights``, both (N, H, k)."""
        if self.counted is not None:
            slots, weights = slots[self.counted], weights[self.counted]
        super().record(slots, weights)

    def describe(self) -> dict[str, Any]:
        """Return all statistics of the memory: shares as fractions of 1, the divergence in nats."""
        reads = self.total()
        return {
            "slots": len(reads),
            "heads": len(self.reads),
            "tokens": self.tokens,
            "usage": usage(reads),
            "kl": kl_from_uniform(reads),
            "usage_of_heads": [usage(head) for head in self.reads],
        }


def record_reads(model: nn.Module) -> dict[str, MemoryReads]:
    """Record what the memories of ``model`` read from now on, by name.

    The names are ``memory6`` for layer 6 of a language model, ``encoder_memory3`` or
    ``decoder_memory3`` if there is an encoder.
    """
    recorded = {}
    for path, memory in model.named_modules():
        if isinstance(memory, ProductKeyMemory):
            part, layer = _LAYER.search(path).groups()
            name = f"{part}_memory" if hasattr(model, "encoder") else "memory"
            reads = MemoryReads(len(memory.values.weight), memory.heads)
            recorded[f"{name}{int(layer) + 1}"] = reads
            memory.keys.register_forward_hook(reads)
    return recorded


def measure(checkpoint: NamedFile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a model's loss and the statistics of its memories over a split."""
    # load refuses the option for a translation model
    sizes = {"tokens_per_sample": arguments.tokens_per_sample}
    loaded = load(checkpoint.path, arguments.data, **sizes).to(choose_device(arguments.cpu))
    memories = record_reads(loaded.model)
    if not memories:
        raise ValueError(
            f"--checkpoint {short(checkpoint.path)} holds a model without product-key memories: "
            "name one that was trained with --memory-layers, --encoder-memory-layers or "
            "--decoder-memory-layers"
        )
    pad = loaded.task.source_dictionary.pad()
    # tokens are (B, T) in segment language models, (T, B) in fairseq's models
    by_row = isinstance(loaded.task, SegmentLanguageModelingTask)

    def count_only(batch: dict[str, Any], scored: Tensor) -> None:
        net_input = batch["net_input"]
        text = net_input.get("prev_output_tokens", net_input["src_tokens"]).ne(pad)
        for name, memory in memories.items():
            if not name.startswith("encoder"):
                memory.counted = scored[text] if by_row else scored.t()[text.t()]

    # torch warns about fairseq's own attention in every batch with padding
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    options = {"batch_size": arguments.batch_size} if arguments.batch_size else {}
    options |= {"before_batch": count_only, "description": f"scoring {checkpoint.label}"}
    losses = loaded.score_split(arguments.split, **options)
    loss = float(losses.mean(dtype=np.float64))
    return {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "tokens": len(losses),
        "loss": loss,
        "perplexity": math.exp(loss),
        "memories": {name: memory.describe() for name, memory in memories.items()},
    }
