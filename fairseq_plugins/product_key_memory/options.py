"""Options of product-key memories, which all models with memories share, and how they are built."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II
from torch import nn

from fairseq_plugins.fairseq_integration.error_messages import (
    errors_name_options,
    flag,
    option,
    sizes_in_memory,
)
from fairseq_plugins.product_key_memory.added_memories import fit_to_memories
from fairseq_plugins.product_key_memory.fairseq_layers import (
    AFTER,
    INSTEAD,
    PARALLEL,
    FairseqMemory,
    WatchedReads,
    keep_shards_apart,
)
from fairseq_plugins.product_key_memory.memory import KEYS, MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.search import SEARCHES

logger = logging.getLogger(__name__)

# The optimizer that updates only the rows of a memory that were read.
OPTIMIZER = "adam_with_memory"

# Precision of the values, None for that of the model.
VALUES_DTYPES = {"model": None, "bf16": torch.bfloat16}

# Options that are arguments of the layer as they are.
ARGUMENTS = (
    *("slots", "heads", "knn", "query_dim", "value_dim", "query_batch_norm", "query_layer_norm"),
    *("query_dropout", "input_dropout", "value_dropout", "shard_values"),
    *("output_norm", "output_gate", "zero_init"),
)


@dataclass
class MemoryOptions(FairseqDataclass):
    """Options of memories, but for the layers that have one (Lample et al. 2019, section 3).

    Defaults are the published sizes (section 4.3), or those of the published code.
    """

    memory_interleave: bool = option(
        False,
        "add the memory as a residual sublayer of its own after the feed-forward sublayer, in "
        "place of replacing that one",
    )
    memory_parallel: bool = option(
        False,
        "add what the memory gives to what the feed-forward sublayer gives, of the same input, "
        "in place of replacing that one",
    )
    memory_slots: int = option(
        512**2, "number of values of a memory; a square number for product keys"
    )
    memory_heads: int = option(4, "queries a token, each with keys of its own")
    memory_knn: int = option(32, "slots that each head reads")
    memory_query_dim: int = option(256, "width of a query; even for product keys")
    memory_value_dim: Optional[int] = option(
        None,
        "width of the values, which are mapped to the model width (default: the model width, and "
        "no map)",
    )
    memory_query_hidden_dims: Optional[str] = option(
        None, "widths of the query network's hidden layers, such as 512,512 (default: a linear map)"
    )
    memory_query_batch_norm: bool = option(
        False,
        "normalise queries over the tokens of a batch, which makes more slots be used (section "
        "4.5); recommended by the paper's author",
    )
    memory_query_layer_norm: bool = option(False, "normalise each query over its dimensions")
    memory_query_dropout: float = option(0.0, "dropout of the queries")
    memory_input_dropout: float = option(0.0, "dropout of what enters a memory")
    memory_value_dropout: float = option(0.0, "dropout of what is read from a memory")
    memory_keys: ChoiceEnum(list(KEYS)) = option(
        "product", "product keys, or flat ones, all of which are searched (section 4.5)"
    )
    memory_search: ChoiceEnum(list(SEARCHES)) = option(
        "torch",
        "what finds the best keys: torch, faiss where it is installed, or plain, which is slow: "
        "the paper's equations as they stand, in torch's operations",
    )
    memory_values_dtype: ChoiceEnum(list(VALUES_DTYPES)) = option(
        "model",
        "precision of the values: that of the model, or bf16, rounded at random, with moments of "
        "the rows alone that were read; bf16 needs --optimizer adam_with_memory",
    )
    memory_shard_values: bool = option(
        False,
        "let each of several workers hold some columns of the values alone, for memories larger "
        "than a device; needs --optimizer adam_with_memory",
    )
    memory_share_values: bool = option(
        False,
        "one table of values for all memories of the model, each with queries and keys of its "
        "own (Berges et al. 2024, arXiv:2412.09764)",
    )
    memory_output_norm: bool = option(False, "normalise what is read from a memory")
    memory_output_gate: bool = option(
        False,
        "multiply what is read by SiLU of a map of the memory's input, and map the product to "
        "the model width (the Memory+ layer of arXiv:2412.09764)",
    )
    memory_zero_init: bool = option(
        False,
        "start with an output of zero: a memory that --memory-parallel or --memory-interleave "
        "adds to a trained model (--finetune-from-model) leaves its loss as it was, unless it "
        "reads a trained table of --memory-share-values as it is",
    )
    memory_trainable_slots: Optional[str] = option(
        None,
        "train the values of some slots alone, those in this file: rarely_read.npz of "
        "scripts.evaluate.memory_usage --rarely-read; needs --optimizer adam_with_memory",
    )
    # evaluation has no optimizer
    memory_optimizer: Optional[str] = II("oc.select:optimizer._name,null")


@dataclass
class MemoryLayersOptions(MemoryOptions):
    """Options of memories in a model with one stack of layers."""

    memory_layers: Optional[str] = option(
        None,
        "layers that have a product-key memory, counted from 1, such as 6,12 (default: none); "
        "goes with --optimizer adam_with_memory",
    )


def parse_integers(text: Any, name: str, remedy: str) -> list[int]:
    """Return the numbers in the text of an option, such as "6,12": [] for None or ""."""
    if text is None or text == "":
        return []
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}: {remedy}") from None


def parse_memory_layers(text: str | None, layers: int, option: str) -> list[int]:
    """Return the numbers of the layers that have a memory, from 1, rising: [] for None or ""."""
    remedy = "give numbers of layers with commas between them, such as 6,12"
    numbers = parse_integers(text, option, remedy)
    if len({*numbers} & {*range(1, layers + 1)}) < len(numbers):
        raise ValueError(f"{option} is {text!r}: name layers from 1 to {layers}, each once")
    return sorted(numbers)


def placement(options: MemoryOptions) -> str:
    """Return where the memories stand: ``INSTEAD``, ``AFTER`` or ``PARALLEL``."""
    if options.memory_interleave:
        return AFTER
    return PARALLEL if options.memory_parallel else INSTEAD


def check_placed(options: MemoryOptions, memories: bool, option: str) -> None:
    """Refuse memories without a place, and warn of their options where the model has none.

    It only warns since a baseline's ``--memory-layers ""`` may stand beside a preset's sizes.
    ``option`` is that of the layers that have a memory.
    """
    if options.memory_interleave and options.memory_parallel:
        raise ValueError(
            "--memory-interleave puts a memory after the feed-forward sublayer, and "
            "--memory-parallel beside it: leave one of the two out"
        )
    if memories:
        return
    without_effect = [
        flag(field.name)
        for field in dataclasses.fields(MemoryOptions)
        if field.name not in ("_name", "memory_optimizer")
        and getattr(options, field.name) != field.default
    ]
    if without_effect:
        logger.warning(
            "no layer has a memory, and options of memories are given (%s): give %s, such as %s 6, "
            "to have one",
            ", ".join(without_effect),
            option,
            option,
        )
    if placement(options) != INSTEAD:
        placed = "--memory-interleave" if options.memory_interleave else "--memory-parallel"
        raise ValueError(
            f"{placed} without a memory to place: give {option}, such as {option} 6, or leave it "
            "out"
        )


class MemoryBuilder:
    """Builds the memories of one model, which with ``--memory-share-values`` share their values.

    ``options`` are a :class:`MemoryOptions`, or a configuration with the same names.
    """

    def __init__(self, options: MemoryOptions) -> None:
        self.options = options
        self._first: ProductKeyMemory | None = None

    def build(self, embed_dim: int) -> ProductKeyMemory:
        """Build the next memory, for a layer of width ``embed_dim``."""
        options = self.options
        with sizes_in_memory(options):
            memory = self._build(embed_dim)
        self._check_optimizer(
            "memory_shard_values",
            memory.table.columns.sharded,
            "another one would average the columns of all workers",
            in_evaluation=False,
        )
        self._check_optimizer(
            "memory_values_dtype", memory.table.stays_bf16, "its steps would be lost in rounding"
        )
        if options.memory_optimizer == OPTIMIZER:
            memory.learn_beside_fairseq()
        if options.memory_share_values and self._first is None:
            self._first = memory
        return memory

    def _build(self, embed_dim: int) -> FairseqMemory:
        options = self.options
        widths = "give widths with commas between them, such as 512,512"
        hidden_dims = parse_integers(
            options.memory_query_hidden_dims, "--memory-query-hidden-dims", widths
        )
        with errors_name_options(lambda argument: flag(f"memory_{argument}")):
            return FairseqMemory(
                embed_dim,
                **{name: getattr(options, f"memory_{name}") for name in ARGUMENTS},
                query_hidden_dims=hidden_dims,
                keys=str(options.memory_keys),
                search=str(options.memory_search),
                values_dtype=VALUES_DTYPES[str(options.memory_values_dtype)],
                values_of=self._first,
            )

    def _check_optimizer(
        self, name: str, chosen: bool, reason: str, in_evaluation: bool = True
    ) -> None:
        """Refuse an option that was ``chosen`` with an optimizer that cannot do it."""
        optimizer = self.options.memory_optimizer
        if chosen and optimizer != OPTIMIZER and not (in_evaluation and optimizer is None):
            value = getattr(self.options, name)
            given = flag(name) if value is True else f"{flag(name)} {value}"
            raise ValueError(
                f"{given} with --optimizer {optimizer}: {reason}; give --optimizer {OPTIMIZER}"
            )

    def finish(self, model: nn.Module, memories: Mapping[str, ProductKeyMemory]) -> None:
        """Prepare ``model`` to be trained with its ``memories``, by the names that are logged."""
        keep_shards_apart(model)
        if memories:
            WatchedReads(model, memories)
        path = self.options.memory_trainable_slots
        self._check_optimizer("memory_trainable_slots", bool(path), "it updates all slots")
        for name, memory in memories.items():
            if path:
                memory.train_slots_of(path, name)


class MemorySublayers:
    """Gives some layers of a model a memory, as the ``added_sublayers`` of a segment model.

    A memory takes the place of the feed-forward sublayer (section 3.3), comes after it
    (``--memory-interleave``), or stands beside it (``--memory-parallel``).
    """

    def __init__(self, cfg: Any) -> None:
        option = "--memory-layers"
        self._numbers = parse_memory_layers(cfg.memory_layers, cfg.decoder_layers, option)
        check_placed(cfg, bool(self._numbers), option)
        self._cfg = cfg
        self._builder = MemoryBuilder(cfg)

    @property
    def parallel(self) -> bool:
        """Whether a memory adds to the feed-forward sublayer, in place of coming after it."""
        return placement(self._cfg) == PARALLEL

    def place(
        self, number: int, feed_forward: nn.Module | None
    ) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the feed-forward and the added sublayer of layer ``number``, from 1."""
        if number not in self._numbers:
            return feed_forward, None
        if self.parallel and feed_forward is None:
            raise ValueError(
                "--memory-parallel with --decoder-ffn-embed-dim 0: layers have no feed-forward "
                "sublayer to stand beside; leave one of the two out"
            )
        memory = MemorySublayer(self._builder.build(self._cfg.decoder_embed_dim))
        if placement(self._cfg) == INSTEAD:
            return memory, None
        return feed_forward, memory

    def finish(self, model: nn.Module) -> None:
        """Prepare the complete model to be trained with its memories."""
        memories = {
            f"memory{number}": module
            for number, layer in enumerate(model.decoder.layers, start=1)
            for module in layer.modules()
            if isinstance(module, ProductKeyMemory)
        }
        self._builder.finish(model, memories)

    def describe(self) -> str:
        """Return for the log which layers have memories."""
        layers = self._cfg.memory_layers
        return f", product-key memories in layers {layers}" if layers else ""

    fit_weights = staticmethod(fit_to_memories)
