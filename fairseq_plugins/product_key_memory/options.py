"""Options of product-key memories, for all models that have them, and the building of memories."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II
from torch import nn

from fairseq_plugins.fairseq_integration.options import flag, option
from fairseq_plugins.product_key_memory.added_memories import fit_to_memories
from fairseq_plugins.product_key_memory.fairseq_layers import (
    AFTER,
    INSTEAD,
    PARALLEL,
    FairseqMemory,
    keep_shards_apart,
)
from fairseq_plugins.product_key_memory.memory import KEYS, MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.search import SEARCHES

logger = logging.getLogger(__name__)

# the optimizer that updates only the rows of a memory that were read
OPTIMIZER = "adam_with_memory"
VALUES_DTYPES = {"model": None, "bf16": torch.bfloat16}
# options that go to the layer unchanged
ARGUMENTS = (
    *("slots", "heads", "knn", "query_dim", "value_dim", "query_batch_norm", "query_layer_norm"),
    *("query_dropout", "input_dropout", "value_dropout", "shard_values"),
    *("output_norm", "output_gate", "zero_init"),
)


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
    memory_parallel: bool = option(
        False,
        "give the memory the feed-forward sublayer's input and add both outputs, instead of "
        "replacing the feed-forward sublayer",
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
    memory_query_layer_norm: bool = option(False, "normalise each query over its dimensions")
    memory_query_dropout: float = option(0.0, "dropout of the queries")
    memory_input_dropout: float = option(0.0, "dropout of a memory's input")
    memory_value_dropout: float = option(0.0, "dropout of the sum of values")
    memory_keys: ChoiceEnum(list(KEYS)) = option(
        "product", "product keys, or flat keys, all of which are searched (section 4.5)"
    )
    memory_search: ChoiceEnum(list(SEARCHES)) = option(
        "torch",
        "how the best keys are found: torch; faiss, if it is installed; or plain, the paper's "
        "equations in torch's operations, which is slow",
    )
    memory_values_dtype: ChoiceEnum(list(VALUES_DTYPES)) = option(
        "model",
        "precision of the values: the model's, or bf16, which rounds at random and keeps moments "
        "only of rows that were read; bf16 needs --optimizer adam_with_memory",
    )
    memory_shard_values: bool = option(
        False,
        "split the columns of the values over the workers, for memories larger than a device; "
        "needs --optimizer adam_with_memory",
    )
    memory_share_values: bool = option(
        False,
        "use one table of values for all memories of the model; queries and keys stay separate "
        "(Berges et al. 2024, arXiv:2412.09764)",
    )
    memory_output_norm: bool = option(False, "normalise the sum of values")
    memory_output_gate: bool = option(
        False,
        "multiply the sum of values by SiLU of a map of the memory's input, and map the product "
        "to the model width (the Memory+ layer of arXiv:2412.09764)",
    )
    memory_zero_init: bool = option(
        False,
        "start with an output of zero: a memory that --memory-parallel or --memory-interleave "
        "adds to a trained model (--finetune-from-model) does not change its loss, unless "
        "--memory-share-values gives it a trained table without a norm or map behind it",
    )
    memory_trainable_slots: Optional[str] = option(
        None,
        "train only the values of the slots in this file, the rarely_read.npz that "
        "scripts.evaluate.memory_usage --rarely-read writes; needs --optimizer adam_with_memory",
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


def parse_integers(text: Any, name: str, remedy: str) -> list[int]:
    """Return the numbers in an option's text, such as "6,12"; [] for None or ""."""
    if text is None or text == "":
        return []
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}: {remedy}") from None


def parse_memory_layers(text: str | None, layers: int, option: str) -> list[int]:
    """Return the sorted numbers, from 1, of the layers with a memory; [] for None or ""."""
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
    """Check the options of memories in a model with ``memories``, or without.

    Options without a memory only cause a warning, since a baseline's ``--memory-layers ""`` may
    override a preset with sizes. ``option`` is the one that names the layers.
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
            "options of memories are given (%s), but no layer has a memory: give %s, such as %s 6",
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
    """Builds the memories of one model; ``options`` may be a configuration with these names."""

    def __init__(self, options: MemoryOptions) -> None:
        self.options = options
        self._first: ProductKeyMemory | None = None

    def build(self, embed_dim: int) -> ProductKeyMemory:
        """Build the next memory, for a layer of width ``embed_dim``."""
        options = self.options
        widths = "give widths with commas between them, such as 512,512"
        hidden_dims = parse_integers(
            options.memory_query_hidden_dims, "--memory-query-hidden-dims", widths
        )
        memory = FairseqMemory(
            embed_dim,
            **{name: getattr(options, f"memory_{name}") for name in ARGUMENTS},
            query_hidden_dims=hidden_dims,
            keys=str(options.memory_keys),
            search=str(options.memory_search),
            values_dtype=VALUES_DTYPES[str(options.memory_values_dtype)],
            values_of=self._first,
        )
        self._check_optimizer(
            "memory_shard_values",
            memory.table.columns.sharded,
            "it would average the columns of all workers",
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

    def _check_optimizer(
        self, name: str, chosen: bool, reason: str, in_evaluation: bool = True
    ) -> None:
        """Refuse a ``chosen`` option if the optimizer does not support it."""
        optimizer = self.options.memory_optimizer
        if chosen and optimizer != OPTIMIZER and not (in_evaluation and optimizer is None):
            value = getattr(self.options, name)
            given = flag(name) if value is True else f"{flag(name)} {value}"
            raise ValueError(
                f"{given} with --optimizer {optimizer}: {reason}; give --optimizer {OPTIMIZER}"
            )

    def finish(self, model: nn.Module, memories: Mapping[str, ProductKeyMemory]) -> None:
        """Prepare ``model`` for training with its ``memories``, by the names in the log."""
        keep_shards_apart(model)
        path = self.options.memory_trainable_slots
        self._check_optimizer("memory_trainable_slots", bool(path), "it updates all slots")
        for name, memory in memories.items():
            if path:
                memory.train_slots_of(path, name)


class MemorySublayers:
    """Memories as the ``added_sublayers`` of a segment model.

    A memory replaces the feed-forward sublayer (section 3.3), follows it (``--memory-interleave``),
    or stands beside it (``--memory-parallel``).
    """

    def __init__(self, cfg: Any) -> None:
        option = "--memory-layers"
        self._numbers = parse_memory_layers(cfg.memory_layers, cfg.decoder_layers, option)
        check_placed(cfg, bool(self._numbers), option)
        self._cfg = cfg
        self._builder = MemoryBuilder(cfg)

    @property
    def parallel(self) -> bool:
        """Whether memories stand beside the feed-forward sublayer."""
        return placement(self._cfg) == PARALLEL

    def place(
        self, number: int, feed_forward: nn.Module | None
    ) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the feed-forward sublayer and the added one of layer ``number``, from 1."""
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
        """Prepare the complete model for training with its memories."""
        memories = {
            f"memory{number}": module
            for number, layer in enumerate(model.decoder.layers, start=1)
            for module in layer.modules()
            if isinstance(module, ProductKeyMemory)
        }
        self._builder.finish(model, memories)

    def describe(self) -> str:
        """Return which layers have memories, for the log."""
        layers = self._cfg.memory_layers
        return f", product-key memories in layers {layers}" if layers else ""

    fit_weights = staticmethod(fit_to_memories)
