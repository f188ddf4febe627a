"""Memories from options: which layers of a stack have one, and what it is made of."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.options import flag, naming_options
from fairseq_plugins.product_key_memory.fairseq_memory import FairseqMemory
from fairseq_plugins.product_key_memory.memory import MemoryOutput, ProductKeyMemory
from fairseq_plugins.product_key_memory.options import MemoryOptions
from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.product_key_memory.usage_log import UsageLog
from fairseq_plugins.product_key_memory.values import Values

logger = logging.getLogger(__name__)

LAZY_OPTIMIZER = "adam_with_memory"
# the options that set a memory's parameters
PARAMETERS = {
    name: f"memory_{name}"
    for name in ("slots", "heads", "knn", "query_dim", "value_dim", "keys", "kernel")
} | {"hidden_dims": "memory_query_hidden_dims"}
# Weights of options that memories had once.
_REMOVED = {
    "query.layer_norm.weight": "--memory-query-layer-norm",
    "output.norm.weight": "--memory-output-norm",
}


class MemoryBuilder:
    """Builds the memories of a stack of layers: ``builder(number)``, layer by layer.

    Args:
        options: options of memories.
        embed_dim: d.
        num_layers: the number of layers.
        option: name of the option that says which layers have a memory.
        values: values to share.
    """

    def __init__(
        self,
        options: MemoryOptions,
        embed_dim: int,
        num_layers: int,
        option: str = "memory_layers",
        values: Values | None = None,
    ) -> None:
        self.options, self.option = options, option
        self.embed_dim = embed_dim
        self.numbers = parse_memory_layers(getattr(options, option), num_layers, flag(option))
        self.values = values
        if self.numbers and options.memory_optimizer not in (None, LAZY_OPTIMIZER):
            logger.warning(
                "--optimizer %s updates all %d values of a memory at every step; --optimizer %s "
                "updates those that were read, at a rate of their own (--memory-lr)",
                *(options.memory_optimizer, options.memory_slots, LAZY_OPTIMIZER),
            )

    def __call__(self, number: int) -> ProductKeyMemory | None:
        """Return the memory of layer ``number``, from 1, or None if it has none."""
        if number not in self.numbers:
            return None
        with naming_options(PARAMETERS):
            memory = build_memory(self.options, self.embed_dim, self.values)
        allow_new(memory, self.options)
        slots, part = len(memory.values.weight), self.option.removesuffix("memory_layers")
        log = UsageLog(slots, memory.heads, f"{part}memory{number}")
        memory.keys.register_forward_hook(log)
        if self.options.memory_share_values:
            self.values = memory.values
        return memory


def allow_new(module: nn.Module, options: MemoryOptions) -> None:
    """Let a training put a module of a memory into a model that was trained without it."""
    if options.memory_optimizer is not None:
        module.register_load_state_dict_pre_hook(_keep_initial_values)


def build_memory(
    options: MemoryOptions, embed_dim: int, values: Values | None = None
) -> ProductKeyMemory:
    """Return a memory of width ``embed_dim``, perhaps with the ``values`` of another one."""
    for name in ("query_dropout", "input_dropout", "value_dropout"):
        rate = getattr(options, f"memory_{name}")
        if not 0 <= rate < 1:
            raise ValueError(f"{flag(f'memory_{name}')} is {rate}: it must be in [0, 1)")
    widths = "give widths with commas between them, such as 512,512"
    query = QueryNetwork(
        embed_dim,
        options.memory_heads,
        options.memory_query_dim,
        _parse_integers(options.memory_query_hidden_dims, "--memory-query-hidden-dims", widths),
        options.memory_query_batch_norm,
        options.memory_query_dropout,
        options.memory_input_dropout,
    )
    lazy = options.memory_optimizer == LAZY_OPTIMIZER
    memory = (FairseqMemory if lazy else ProductKeyMemory)(
        embed_dim,
        options.memory_slots,
        options.memory_heads,
        options.memory_knn,
        options.memory_query_dim,
        options.memory_value_dim,
        options.memory_keys,
        options.memory_kernel,
        query=query,
        # initial values are drawn in the order of the computation: the output's are the last
        output=nn.Identity(),
        values=values,
    )
    memory.output = MemoryOutput(
        embed_dim,
        memory.values.weight.size(1),
        options.memory_output_gate,
        options.memory_value_dropout,
    )
    memory.register_load_state_dict_pre_hook(_refuse_removed_options)
    return memory


def _keep_initial_values(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Keep a module's initial values if the state has none for it; drop what is in its place."""
    initial = {prefix + name: value for name, value in module.state_dict().items()}
    if initial.keys().isdisjoint(state_dict):
        replaced = [name for name in state_dict if name.startswith(prefix)]
        logger.warning(
            "the checkpoint has no %s, which keeps its initial values%s",
            prefix[:-1],
            f"; its {', '.join(replaced)} are not used" if replaced else "",
        )
        for name in replaced:
            del state_dict[name]
        state_dict.update(initial)
        module.keeps_initial_values = True


def refuse_new(model: nn.Module) -> None:
    """Refuse to evaluate a model whose checkpoint lacks a part of a memory."""
    if any(getattr(module, "keeps_initial_values", False) for module in model.modules()):
        raise ValueError(
            "--model-overrides gives the model memories that its checkpoint does not have: leave "
            "them out, or train them (--finetune-from-model)"
        )


def _refuse_removed_options(
    memory: ProductKeyMemory, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    for name, option in _REMOVED.items():
        if prefix + name in state_dict:
            raise ValueError(
                f"the checkpoint has a memory with {option}, which no longer exists: train "
                "the model anew"
            )


def parse_memory_layers(text: str | None, num_layers: int, option: str) -> list[int]:
    """Return the sorted numbers, from 1, of the layers with a memory; [] for None or ""."""
    numbers = _parse_integers(text, option, "give numbers of layers, such as 6,12")
    if len({*numbers} & {*range(1, num_layers + 1)}) < len(numbers):
        raise ValueError(f"{option} is {text!r}: name layers from 1 to {num_layers}, each once")
    return sorted(numbers)


def _parse_integers(text: str | int | None, option: str, remedy: str) -> list[int]:
    """Return the numbers in an option's text, such as "6,12"; [] for None or ""."""
    if text is None or text == "":
        return []
    try:
        # --model-overrides may give a number
        return [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}: {remedy}") from None
