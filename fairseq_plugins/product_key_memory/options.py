"""Options of product-key memories, which all models with feed-forward sublayers have."""

import logging
from dataclasses import dataclass, fields
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from fairseq_plugins.fairseq_integration.options import flag, option

logger = logging.getLogger(__name__)


@dataclass
class MemoryOptions(FairseqDataclass):
    """Options of memories, without those that say which layers have one.

    Defaults are the published sizes (Lample et al. 2019, section 4.3), or the published code's.
    """

    memory_interleave: bool = option(
        False,
        "put the memory after the feed-forward sublayer, as a residual sublayer of its own, "
        "instead of replacing the feed-forward sublayer",
    )
    memory_slots: int = option(
        512**2, "number of values in a memory; a square number for product keys"
    )
    memory_heads: int = option(4, "number of queries for each token; each head has its own keys")
    memory_knn: int = option(32, "number of slots that each head reads")
    memory_query_dim: int = option(256, "width of a query; even for product keys")
    memory_value_dim: Optional[int] = option(
        None,
        "width of the values; if it differs from the model width (the default), a linear map "
        "follows",
    )
    memory_query_hidden_dims: Optional[str] = option(
        None, "widths of the query network's hidden layers, such as 512,512 (default: a linear map)"
    )
    memory_query_batch_norm: bool = option(
        False,
        "normalise queries over the tokens of a batch, so that more slots are used (section 4.5); "
        "the paper's author recommends it",
    )
    memory_query_dropout: float = option(0.0, "dropout of the queries")
    memory_input_dropout: float = option(0.0, "dropout of a memory's input")
    memory_value_dropout: float = option(0.0, "dropout of the sum of values")
    memory_keys: str = option(
        "product", "product keys, or flat keys, all of which are searched (section 4.5)"
    )
    memory_kernel: str = option(
        "fast",
        "how slots are searched and summed: fast, or plain, the paper's equations in PyTorch's "
        "operations, which is slow",
    )
    memory_share_values: bool = option(
        False,
        "use one table of values for all memories of the model; queries and keys stay separate "
        "(Berges et al. 2024, arXiv:2412.09764)",
    )
    memory_output_gate: bool = option(
        False,
        "multiply the sum of values by SiLU of a map of the memory's input, and map the product "
        "to the model width (the Memory+ layer of arXiv:2412.09764)",
    )
    # evaluation has no optimizer
    memory_optimizer: Optional[str] = II("oc.select:optimizer._name,null")


@dataclass
class MemoryLayersOptions(MemoryOptions):
    """Options of memories in a model with one stack of layers."""

    memory_layers: Optional[str] = option(
        None,
        "layers that have a product-key memory, counted from 1, such as 6,12 (default: none); "
        "use it with --optimizer adam_with_memory",
    )


def warn_without_memories(options: MemoryOptions, option: str) -> None:
    """Warn of options that a model without memories ignores; ``option`` would give it some.

    It may be meant: a baseline's ``--memory-layers ""`` overrides a preset.
    """
    ignored = [
        flag(field.name)
        for field in fields(MemoryOptions)
        if field.name.startswith("memory_")
        and field.name != "memory_optimizer"
        and getattr(options, field.name) != field.default
    ]
    if ignored:
        logger.warning("no layer has a memory: give %s for %s", flag(option), ", ".join(ignored))
