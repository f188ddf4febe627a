"""What all models with product-key memories share: options, building, what validation logs."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from omegaconf import II
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.fairseq_integration.optimizers import set_update_rule
from fairseq_plugins.fairseq_integration.option_names import errors_name_options
from fairseq_plugins.product_key_memory.keys import KEY_SEARCHES
from fairseq_plugins.product_key_memory.memory import KEYS, ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage

logger = logging.getLogger(__name__)

# The optimizer that updates only the rows of a memory that were read.
OPTIMIZER = "adam_with_memory"


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
    memory_search: ChoiceEnum(list(KEY_SEARCHES)) = field(
        default="torch",
        metadata={
            "help": "what finds the best keys: torch, faiss where it is installed, or plain, which "
            "is slow: the paper's equations as they stand, in torch's operations"
        },
    )
    memory_shard_values: bool = field(
        default=False,
        metadata={
            "help": "let each of several workers hold some columns of the values alone, for "
            "memories larger than a device; needs --optimizer adam_with_memory"
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

    Args:
        text: such as "6,12".
        layers: number of layers.
        option: the option that the text is from, such as "--memory-layers".

    Raises:
        ValueError: the text is no list of numbers, there is no such layer, or one is named twice.
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
    """Warn of options of memories that have no effect, because the model has no memory.

    It only warns since a baseline's ``--memory-layers ""`` may stand beside a preset's sizes.

    Args:
        options: of the model.
        memories: whether it has memories.
        option: the option that says in which layers.

    Raises:
        ValueError: ``--memory-interleave`` is one of them.
    """
    if memories:
        return
    without_effect = [
        field.name
        for field in dataclasses.fields(MemoryOptions)
        if field.name not in ("_name", "memory_optimizer")
        and getattr(options, field.name) != field.default
    ]
    if without_effect:
        names = ", ".join("--" + name.replace("_", "-") for name in without_effect)
        logger.warning(
            "no layer has a memory, and %s of memories: give %s, such as %s 6, to have one",
            f"{names} " + ("is an option" if len(without_effect) == 1 else "are options"),
            option,
            option,
        )
    if options.memory_interleave:
        raise ValueError(
            f"--memory-interleave without a memory to place: give {option}, such as {option} 6, or "
            "leave it out"
        )


class FairseqMemory(ProductKeyMemory):
    """A memory in a model that fairseq trains; it refuses updates and checkpoints without it."""

    _num_updates = 0

    def set_num_updates(self, num_updates: int) -> None:
        """Check that the last update used the gradient of the values.

        fairseq calls it before each batch. Only ``adam_with_memory`` knows of that gradient.

        Args:
            num_updates: number of updates so far.

        Raises:
            ValueError: an update was made, and the gradient is still there.
        """
        unused = not self.values.requires_grad and self.values.grad is not None
        if unused and num_updates > self._num_updates:
            raise ValueError(
                "an update was made without the values of a product-key memory: --optimizer "
                "adam_with_memory has to see the model's parameters one by one; give "
                "--fp16-no-flatten-grads with --fp16, and no optimizer around it"
            )
        self._num_updates = num_updates

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_to_state_dict(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}; in fairseq, leave out --no-save-optimizer-state") from None


def build_memory(options: MemoryOptions, embed_dim: int) -> ProductKeyMemory:
    """Build a memory for a model of width ``embed_dim``.

    Args:
        options: a :class:`MemoryOptions`, or a configuration with the same names.
        embed_dim: width of the model.

    Raises:
        ValueError: an option has a value that no memory has.
    """
    hidden_dims = _parse_hidden_dims(options.memory_query_hidden_dims)
    with errors_name_options(lambda argument: "--memory-" + argument.replace("_", "-")):
        memory = FairseqMemory(
            embed_dim,
            slots=options.memory_slots,
            heads=options.memory_heads,
            knn=options.memory_knn,
            query_dim=options.memory_query_dim,
            value_dim=options.memory_value_dim,
            query_hidden_dims=hidden_dims,
            query_batch_norm=options.memory_query_batch_norm,
            query_layer_norm=options.memory_query_layer_norm,
            query_dropout=options.memory_query_dropout,
            input_dropout=options.memory_input_dropout,
            value_dropout=options.memory_value_dropout,
            keys=str(options.memory_keys),
            search=str(options.memory_search),
            shard_values=options.memory_shard_values,
        )
    if memory.table.shard is not None and options.memory_optimizer != OPTIMIZER:
        raise ValueError(
            f"--memory-shard-values with --optimizer {options.memory_optimizer}: another one would "
            f"average the columns of all workers; give --optimizer {OPTIMIZER}, or leave it out"
        )
    if options.memory_optimizer == OPTIMIZER:
        memory.keep_gradient_beside_autograd()
        # optimizers see only parameters that require a gradient, or fairseq's copies of them in
        # single precision: the keys, which each memory has, lead to the values
        set_update_rule(next(memory.keys.parameters()), memory.table)
    return memory


def keep_shards_apart(model: nn.Module) -> None:
    """Keep torch's data parallelism from giving all workers the columns of worker 0.

    Args:
        model: the model that fairseq wraps to train it on several workers.
    """
    shards = [
        f"{name}.values" if name else "values"
        for name, module in model.named_modules()
        if isinstance(module, ProductKeyMemory) and module.table.shard is not None
    ]
    if shards:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, shards)


def _parse_hidden_dims(text: Any) -> list[int]:
    if text is None or text == "":
        return []
    try:
        return [int(width) for width in str(text).split(",")]
    except ValueError:
        raise ValueError(
            f"--memory-query-hidden-dims is {text!r}: give widths with commas between them, such "
            "as 512,512"
        ) from None


# after the loss and what comes with it
_PRIORITY = 50


def watch_memories(model: nn.Module, memories: Mapping[str, ProductKeyMemory]) -> None:
    """Have validation log what ``model`` reads of its ``memories``, which are given by name.

    At the end of a pass over a validation set each memory logs ``NAME_usage``, the percentage of
    its slots that were read, and ``NAME_kl``, in nats, over all workers together (section 4.2).
    Training, evaluation and generation log nothing.

    Where the batches cannot be shared out evenly, fairseq gives workers that have none left the
    first batch again, and its reads count twice.
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
        # fairseq opens an aggregator for each pass over a validation set, which all workers read
        # once, at the end; elsewhere the first aggregator is the default one
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
        # generation during validation (--eval-bleu) calls parts of the model, without these hooks
        for memory in self.memories.values():
            memory.usage = None

    def _log(self, name: str, reads: MemoryUsage) -> None:
        metrics.log_derived(
            f"{name}_usage", lambda _: round(100 * usage(reads.total()), 2), _PRIORITY
        )
        metrics.log_derived(
            f"{name}_kl", lambda _: round(kl_from_uniform(reads.total()), 4), _PRIORITY
        )
