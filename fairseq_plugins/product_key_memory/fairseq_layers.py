"""Memories from options, in fairseq's own transformer layers.

Lample et al. 2019 (arXiv:1907.05242), section 3.3 and figure 3. A memory replaces the feed-forward
sublayer, or follows it as a residual sublayer of its own (``--memory-interleave``).

Shapes: B sentences, T tokens, S tokens so far, d model width.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from types import MethodType
from typing import Any

from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import LayerNorm
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.options import check_range, flag, naming_options
from fairseq_plugins.product_key_memory.lazy_adam import LazyMemory
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


class _MemoryLayer(nn.Module):
    """Base class of both kinds of layers: fairseq's, with a memory; list it before fairseq's."""

    # the argument of fairseq's layer, (B, S), that is true for padding
    padding_mask: str

    def put(self, memory: ProductKeyMemory, interleave: bool) -> None:
        """Let ``memory`` replace the feed-forward sublayer, or follow it if ``interleave``."""
        self.interleave = interleave
        # modules are in the order of the computation
        if interleave:
            self.memory = memory
            self.memory_layer_norm = LayerNorm(self.embed_dim)
            return
        final_layer_norm = self.final_layer_norm
        del self.fc1, self.final_layer_norm
        # the norm between fc1 and fc2 (--scale-fc)
        self.ffn_layernorm = None
        self.fc2 = self.activation_fn = self.activation_dropout_module = nn.Identity()
        self.memory = memory
        self.final_layer_norm = final_layer_norm

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Map ``x`` (T, B, d) to (T, B, d), and return what else fairseq's layer returns."""
        padding_mask = options.get(self.padding_mask)
        if padding_mask is not None:
            # (B, S) -> (T, B)
            padding_mask = padding_mask[:, -len(x) :].t()
        read = partial(self.memory, padding_mask=padding_mask)
        if not self.interleave:
            # for one pass, a copy of the layer whose fc1 is the memory
            layer = copy.copy(self)
            layer.fc1 = read
            return super(_MemoryLayer, layer).forward(x, *args, **options)
        result = super().forward(x, *args, **options)
        x, *others = result if isinstance(result, tuple) else (result,)
        entering = self.memory_layer_norm(x) if self.normalize_before else x
        x = x + self.dropout_module(read(entering))
        x = x if self.normalize_before else self.memory_layer_norm(x)
        return (x, *others) if others else x


def _drop_replaced(_: nn.Module, state_dict: dict[str, Tensor], prefix: str, *__: Any) -> None:
    """Drop the feed-forward sublayer of a model without memories."""
    replaced = tuple(f"{prefix}{name}." for name in ("fc1", "fc2", "ffn_layernorm"))
    if not any(name.startswith(f"{prefix}memory.") for name in state_dict):
        for name in [name for name in state_dict if name.startswith(replaced)]:
            del state_dict[name]


class MemoryEncoderLayer(_MemoryLayer, TransformerEncoderLayerBase):
    """fairseq's encoder layer with a memory."""

    padding_mask = "encoder_padding_mask"


class MemoryDecoderLayer(_MemoryLayer, TransformerDecoderLayerBase):
    """fairseq's decoder layer with a memory."""

    padding_mask = "self_attn_padding_mask"


def put_memories(
    stack: TransformerEncoderBase | TransformerDecoderBase,
    options: MemoryOptions,
    option: str = "memory_layers",
    values: Values | None = None,
) -> Values | None:
    """Replace the layers of fairseq's ``stack`` that have a memory, for :class:`MemoryBuilder`.

    Returns the values that the next stack shares.
    """
    cfg, numbers = stack.cfg, getattr(options, option)
    part = "encoder" if isinstance(stack, TransformerEncoderBase) else "decoder"
    sizes = getattr(cfg, part)
    # both change the numbers of layers
    others = {f"{part}_layers_to_keep": sizes.layers_to_keep, "base_layers": cfg.base_layers}
    for name, value in others.items():
        if numbers and value:
            raise ValueError(
                f"{flag(name)} is {value} with {flag(option)} {numbers}: leave one of the two out"
            )
    builder = MemoryBuilder(options, sizes.embed_dim, len(stack.layers), option, values)
    for index in range(len(stack.layers)):
        memory = builder(index + 1)
        if memory is None:
            continue
        # iterating over the list may drop layers (--decoder-layerdrop)
        layer: MemoryEncoderLayer | MemoryDecoderLayer
        if part == "encoder":
            layer = MemoryEncoderLayer(cfg)
        else:
            layer = MemoryDecoderLayer(cfg, stack.layers[index].encoder_attn is None)
        layer.put(memory, options.memory_interleave)
        if options.memory_interleave:
            allow_new(layer.memory_layer_norm, options)
        elif options.memory_optimizer is not None:
            layer.register_load_state_dict_pre_hook(_drop_replaced)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        stack.layers[index] = layer
    return builder.values


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
            memory = self.build()
        allow_new(memory, self.options)
        UsageLog(memory, f"{self.option.removesuffix('memory_layers')}memory{number}")
        if self.options.memory_share_values:
            self.values = memory.values
        return memory

    def build(self) -> ProductKeyMemory:
        """Return a memory as the options say."""
        options, embed_dim = self.options, self.embed_dim
        heads, query_dim = options.memory_heads, options.memory_query_dim
        dropouts = (f"memory_{part}_dropout" for part in ("query", "input", "value"))
        check_range(options, 0, *dropouts, below=1)
        widths = "give widths with commas between them, such as 512,512"
        query = QueryNetwork(
            embed_dim,
            heads,
            query_dim,
            _parse_integers(options.memory_query_hidden_dims, "--memory-query-hidden-dims", widths),
            options.memory_query_batch_norm,
            options.memory_query_dropout,
            options.memory_input_dropout,
        )
        kind = LazyMemory if options.memory_optimizer == LAZY_OPTIMIZER else ProductKeyMemory
        memory = kind(
            embed_dim,
            options.memory_slots,
            heads,
            options.memory_knn,
            query_dim,
            options.memory_value_dim,
            options.memory_keys,
            options.memory_kernel,
            query=query,
            # initial values are drawn in the order of the computation: the output's are the last
            output=nn.Identity(),
            values=self.values,
        )
        gate, dropout = options.memory_output_gate, options.memory_value_dropout
        memory.output = MemoryOutput(embed_dim, memory.values.weight.size(1), gate, dropout)
        return memory


def allow_new(module: nn.Module, options: MemoryOptions) -> None:
    """Let a training put a module of a memory into a model that was trained without it."""
    if options.memory_optimizer is not None:
        module.register_load_state_dict_pre_hook(_keep_initial_values)


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
        # fairseq calls this before it evaluates, and looks at its __func__
        module.make_generation_fast_ = MethodType(_refuse_new, module)


def _refuse_new(*_: Any, **__: Any) -> None:
    """Refuse to evaluate a model whose checkpoint lacks a part of a memory."""
    raise ValueError(
        "--model-overrides gives the model memories that its checkpoint does not have: leave "
        "them out, or train them (--finetune-from-model)"
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
