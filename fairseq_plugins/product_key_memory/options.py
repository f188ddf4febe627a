"""Options of product-key memories, which all models that take them share.

:mod:`.fairseq_memory` makes memories of them.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.fairseq_integration.error_messages import flag
from fairseq_plugins.product_key_memory.memory import KEYS
from fairseq_plugins.product_key_memory.search import SEARCHES

logger = logging.getLogger(__name__)

# Where a memory stands beside the feed-forward sublayer.
INSTEAD, AFTER, PARALLEL = "instead", "after", "parallel"

# Precision of the values, None for that of the model.
VALUES_DTYPES = {"model": None, "bf16": torch.bfloat16}

# what torch says of a tensor that there is no memory for
TOO_LARGE = ("allocate", "size calculation overflowed")


@dataclass
class MemoryOptions(FairseqDataclass):
    """Options of memories, but for the layers that have one (Lample et al. 2019, section 3).

    Defaults are the published sizes (section 4.3), or those of the published code where the paper
    has none.
    """

    memory_interleave: bool = field(
        default=False,
        metadata={
            "help": "add the memory as a residual sublayer of its own after the feed-forward "
            "sublayer, in place of replacing that one"
        },
    )
    memory_parallel: bool = field(
        default=False,
        metadata={
            "help": "add what the memory gives to what the feed-forward sublayer gives, of the "
            "same input, in place of replacing that one"
        },
    )
    memory_slots: int = field(
        default=512**2,
        metadata={"help": "number of values of a memory; a square number for product keys"},
    )
    memory_heads: int = field(
        default=4, metadata={"help": "queries a token, each with keys of its own"}
    )
    memory_knn: int = field(default=32, metadata={"help": "slots that each head reads"})
    memory_query_dim: int = field(
        default=256, metadata={"help": "width of a query; even for product keys"}
    )
    memory_value_dim: Optional[int] = field(
        default=None,
        metadata={
            "help": "width of the values, which are mapped to the model width (default: the model "
            "width, and no map)"
        },
    )
    memory_query_hidden_dims: Optional[str] = field(
        default=None,
        metadata={
            "help": "widths of the query network's hidden layers, such as 512,512 (default: a "
            "linear map)"
        },
    )
    memory_query_batch_norm: bool = field(
        default=False,
        metadata={
            "help": "normalise queries over the tokens of a batch, which makes more slots be used "
            "(section 4.5); recommended by the paper's author"
        },
    )
    memory_query_layer_norm: bool = field(
        default=False, metadata={"help": "normalise each query over its dimensions"}
    )
    memory_query_dropout: float = field(default=0.0, metadata={"help": "dropout of the queries"})
    memory_input_dropout: float = field(
        default=0.0, metadata={"help": "dropout of what enters a memory"}
    )
    memory_value_dropout: float = field(
        default=0.0, metadata={"help": "dropout of what is read from a memory"}
    )
    memory_keys: ChoiceEnum(list(KEYS)) = field(
        default="product",
        metadata={"help": "product keys, or flat ones, all of which are searched (section 4.5)"},
    )
    memory_search: ChoiceEnum(list(SEARCHES)) = field(
        default="torch",
        metadata={
            "help": "what finds the best keys: torch, faiss where it is installed, or plain, which "
            "is slow: the paper's equations as they stand, in torch's operations"
        },
    )
    memory_values_dtype: ChoiceEnum(list(VALUES_DTYPES)) = field(
        default="model",
        metadata={
            "help": "precision of the values: that of the model, or bf16, rounded at random, with "
            "moments of the rows alone that were read; bf16 needs --optimizer adam_with_memory"
        },
    )
    memory_shard_values: bool = field(
        default=False,
        metadata={
            "help": "let each of several workers hold some columns of the values alone, for "
            "memories larger than a device; needs --optimizer adam_with_memory"
        },
    )
    memory_share_values: bool = field(
        default=False,
        metadata={
            "help": "one table of values for all memories of the model, each with queries and keys "
            "of its own (Berges et al. 2024, arXiv:2412.09764)"
        },
    )
    memory_output_norm: bool = field(
        default=False, metadata={"help": "normalise what is read from a memory"}
    )
    memory_output_gate: bool = field(
        default=False,
        metadata={
            "help": "multiply what is read by SiLU of a map of the memory's input, and map the "
            "product to the model width (the Memory+ layer of arXiv:2412.09764)"
        },
    )
    memory_zero_init: bool = field(
        default=False,
        metadata={
            "help": "start with an output of zero: a memory that --memory-parallel or "
            "--memory-interleave adds to a trained model (--finetune-from-model) leaves its loss "
            "as it was, unless it reads a trained table of --memory-share-values as it is"
        },
    )
    memory_trainable_slots: Optional[str] = field(
        default=None,
        metadata={
            "help": "train the values of some slots alone, those in this file: rarely_read.npz of "
            "scripts.evaluate.memory_usage --rarely-read; needs --optimizer adam_with_memory"
        },
    )
    # evaluation has no optimizer
    memory_optimizer: Optional[str] = II("oc.select:optimizer._name,null")


@dataclass
class MemoryLayersOptions(MemoryOptions):
    """Options of memories in a model with one stack of layers."""

    memory_layers: Optional[str] = field(
        default=None,
        metadata={
            "help": "layers that have a product-key memory, counted from 1, such as 6,12 (default: "
            "none); goes with --optimizer adam_with_memory"
        },
    )


def parse_memory_layers(text: str | None, layers: int, option: str) -> list[int]:
    """Return the numbers of the layers that have a memory, from 1, rising: [] for None or "".

    ``text`` is that of ``option``, such as "6,12" of "--memory-layers".
    """
    if text is None or text == "":
        return []
    try:
        numbers = [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(
            f"{option} is {text!r}: give numbers of layers with commas between them, such as 6,12"
        ) from None
    for number in numbers:
        if number < 1:
            raise ValueError(f"{option} is {text!r}: layers are counted from 1; the first one is 1")
        if number > layers:
            raise ValueError(
                f"{option} is {text!r}: there is no layer {number}; the last one is {layers}"
            )
        if numbers.count(number) > 1:
            raise ValueError(f"{option} is {text!r}: layer {number} is named twice; name it once")
    return sorted(numbers)


def check_placed(options: MemoryOptions, memories: bool, option: str) -> None:
    """Refuse memories without a place, and warn of their options where the model has none.

    It only warns since a baseline's ``--memory-layers ""`` may stand beside a preset's sizes.
    ``option`` says in which layers memories are.
    """
    if options.memory_interleave and options.memory_parallel:
        raise ValueError(
            "--memory-interleave puts a memory after the feed-forward sublayer, and "
            "--memory-parallel beside it: leave one of the two out"
        )
    if memories:
        return
    without_effect = [
        field.name
        for field in dataclasses.fields(MemoryOptions)
        if field.name not in ("_name", "memory_optimizer")
        and getattr(options, field.name) != field.default
    ]
    if without_effect:
        names = ", ".join(flag(name) for name in without_effect)
        logger.warning(
            "no layer has a memory, and %s of memories: give %s, such as %s 6, to have one",
            f"{names} " + ("is an option" if len(without_effect) == 1 else "are options"),
            option,
            option,
        )
    if placement(options) != INSTEAD:
        placed = "--memory-interleave" if options.memory_interleave else "--memory-parallel"
        raise ValueError(
            f"{placed} without a memory to place: give {option}, such as {option} 6, or leave it "
            "out"
        )


def placement(options: MemoryOptions) -> str:
    """Return where the memories stand: ``INSTEAD``, ``AFTER`` or ``PARALLEL``."""
    if options.memory_interleave:
        return AFTER
    return PARALLEL if options.memory_parallel else INSTEAD


def parse_hidden_dims(text: Any) -> list[int]:
    """Return the widths of ``--memory-query-hidden-dims``, such as "512,512": [] for None or ""."""
    if text is None or text == "":
        return []
    try:
        return [int(width) for width in str(text).split(",")]
    except ValueError:
        raise ValueError(
            f"--memory-query-hidden-dims is {text!r}: give widths with commas between them, such "
            "as 512,512"
        ) from None
