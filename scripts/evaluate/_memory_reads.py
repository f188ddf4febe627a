"""Count what the memories of a model read over a split."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from fairseq_plugins.python_interface.loading import load
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.checkpoints import checkpoint_options, read_checkpoint
from scripts._shared.command_line import NamedFile
from scripts._shared.commands import short

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


@contextmanager
def record_usage(model: nn.Module) -> Iterator[dict[str, MemoryReads]]:
    """Record what the memories of ``model`` read in the block, by name.

    The names are ``memory6`` for layer 6 of a language model, ``encoder_memory3`` or
    ``decoder_memory3`` if there is an encoder.
    """
    recorded: dict[str, MemoryReads] = {}
    with ExitStack() as stack:
        for path, memory in model.named_modules():
            if isinstance(memory, ProductKeyMemory):
                part, layer = _LAYER.search(path).groups()
                name = f"{part}_memory" if hasattr(model, "encoder") else "memory"
                reads = MemoryReads(len(memory.values.weight), memory.heads)
                recorded[f"{name}{int(layer) + 1}"] = reads
                stack.enter_context(memory.keys.register_forward_hook(reads))
        yield recorded


def check_inputs(checkpoint: NamedFile, tokens_per_sample: int | None) -> None:
    """Raise ValueError if a checkpoint has no memory or a given --tokens-per-sample is wrong."""
    label = f"--checkpoint {short(checkpoint.path)}"
    state = read_checkpoint(checkpoint.path)
    keys = (".keys.subkeys", ".keys.keys")
    if not any(weight.endswith(keys) for weight in state.get("model") or ()):
        raise ValueError(
            f"{label} holds a model without product-key memories: name one that was trained with "
            "--memory-layers, --encoder-memory-layers or --decoder-memory-layers"
        )
    if tokens_per_sample and "source_lang" in checkpoint_options(state, "task"):
        raise ValueError(
            f"--tokens-per-sample is {tokens_per_sample} for a translation model, which reads "
            "sentence by sentence: leave it out"
        )


def measure(
    checkpoint: NamedFile, data: Path, split: str, options: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return a model's loss and the statistics of its memories over a split.

    The options are those of :meth:`LoadedModel.score_split`.
    """
    loaded = load(checkpoint.path, data).to(device)
    pad = loaded.task.source_dictionary.pad()
    # tokens are (B, T) in segment language models, (T, B) in fairseq's models
    by_row = isinstance(loaded.task, SegmentLanguageModelingTask)
    with record_usage(loaded.model) as memories:
        in_decoder = [memories[name] for name in memories if not name.startswith("encoder")]

        def count_only(batch: dict[str, Any], scored: Tensor) -> None:
            net_input = batch["net_input"]
            text = net_input.get("prev_output_tokens", net_input["src_tokens"]).ne(pad)
            counted = scored[text] if by_row else scored.t()[text.t()]
            for memory in in_decoder:
                memory.counted = counted

        label = f"scoring {checkpoint.label}"
        losses = loaded.score_split(split, before_batch=count_only, description=label, **options)
    loss = float(losses.mean(dtype=np.float64))
    return {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "tokens": len(losses),
        "loss": loss,
        "perplexity": math.exp(loss),
        "memories": {name: memory.describe() for name, memory in memories.items()},
    }
