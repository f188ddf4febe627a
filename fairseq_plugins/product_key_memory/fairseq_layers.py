"""Memories in models that fairseq trains, and in fairseq's own transformer layers.

Lample et al. 2019 (arXiv:1907.05242), section 3.3 and figure 3. A memory replaces the feed-forward
sublayer, or follows it as a residual sublayer of its own (``--memory-interleave``).

Shapes: B sentences, T tokens, S tokens so far, d model width.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
)
from fairseq.modules import LayerNorm
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.memory_options import MemoryOptions
from fairseq_plugins.fairseq_integration.options import flag
from fairseq_plugins.product_key_memory.memory import MemoryOutput, ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import hide_from_fairseq
from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.product_key_memory.values import Values

if TYPE_CHECKING:
    from typing_extensions import Self


class FairseqMemory(ProductKeyMemory):
    """A memory that fairseq trains; it notices updates that leave out its hidden values."""

    last_update = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; torch copies parameters without their marks."""
        super().__setstate__(state)
        if self.values.beside_autograd:
            hide_from_fairseq(self)

    def set_num_updates(self, num_updates: int) -> None:
        """Check before each batch that the last update used the gradient of the values."""
        unused = self.values.beside_autograd and self.values.weight.grad is not None
        if unused and num_updates > self.last_update:
            raise ValueError(
                "an update was made without the values of a product-key memory: --optimizer "
                "adam_with_memory has to see the model's parameters one by one; give "
                "--fp16-no-flatten-grads with --fp16, and do not wrap the optimizer"
            )
        self.last_update = num_updates


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
        self.options = options
        self.embed_dim = embed_dim
        self.numbers = parse_memory_layers(getattr(options, option), num_layers, flag(option))
        self.values = values

    def __call__(self, number: int) -> FairseqMemory | None:
        """Return the memory of layer ``number``, from 1, or None if it has none."""
        return self.build() if number in self.numbers else None

    def build(self) -> FairseqMemory:
        """Return the next memory."""
        options, embed_dim = self.options, self.embed_dim
        for name in ("heads", "query_dim", "value_dim"):
            size = getattr(options, f"memory_{name}")
            if size is not None and size < 1:
                raise ValueError(f"{flag(f'memory_{name}')} is {size}: it must be at least 1")
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
        memory = FairseqMemory(
            embed_dim,
            options.memory_slots,
            options.memory_heads,
            options.memory_knn,
            options.memory_query_dim,
            options.memory_value_dim,
            str(options.memory_keys),
            str(options.memory_kernel),
            query=query,
            # initial values are drawn in the order of the computation: the output's are the last
            output=nn.Identity(),
            values=self.values,
        )
        memory.output = MemoryOutput(
            embed_dim,
            memory.values.weight.size(1),
            options.memory_output_gate,
            options.memory_value_dropout,
        )
        if options.memory_optimizer == "adam_with_memory":
            hide_from_fairseq(memory)
        if options.memory_share_values:
            self.values = memory.values
        return memory


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


# --- fairseq's layers


class _MemoryLayer(nn.Module):
    """Base class of both kinds of layers: fairseq's, with a memory."""

    def _put(self, memory: ProductKeyMemory, interleave: bool) -> None:
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

    def _read(self, padding_mask: Tensor | None, x: Tensor) -> Tensor:
        """Map ``x`` (T, B, d) to (T, B, d), given the mask (B, S) of the padding so far."""
        if padding_mask is not None:
            # (B, S) -> (T, B)
            padding_mask = padding_mask[:, -len(x) :].t()
        return self.memory(x, padding_mask)

    def _with_mask(self, padding_mask: Tensor | None) -> Self:
        """Return the layer for one pass: a copy whose fc1 is the memory, called with the mask."""
        if self.interleave:
            return self
        layer = copy.copy(self)
        layer.fc1 = partial(self._read, padding_mask)
        return layer

    def _follow(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Add the sublayer of an interleaved memory to ``x`` (T, B, d)."""
        if not self.interleave:
            return x
        entering = self.memory_layer_norm(x) if self.normalize_before else x
        x = x + self.dropout_module(self._read(padding_mask, entering))
        return x if self.normalize_before else self.memory_layer_norm(x)


class MemoryEncoderLayer(_MemoryLayer, TransformerEncoderLayerBase):
    """fairseq's encoder layer with a memory instead of its feed-forward sublayer, or after it."""

    def __init__(self, cfg: TransformerConfig, memory: ProductKeyMemory, interleave: bool) -> None:
        super().__init__(cfg)
        self._put(memory, interleave)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None) -> Tensor:
        """Map ``x`` (T, B, d) to (T, B, d); ``encoder_padding_mask`` (B, T) is true for padding."""
        layer = self._with_mask(encoder_padding_mask)
        x = TransformerEncoderLayerBase.forward(layer, x, encoder_padding_mask)
        return self._follow(x, encoder_padding_mask)


class MemoryDecoderLayer(_MemoryLayer, TransformerDecoderLayerBase):
    """fairseq's decoder layer with a memory instead of its feed-forward sublayer, or after it."""

    def __init__(
        self,
        cfg: TransformerConfig,
        memory: ProductKeyMemory,
        interleave: bool,
        no_encoder_attn: bool = False,
    ) -> None:
        super().__init__(cfg, no_encoder_attn)
        self._put(memory, interleave)

    def forward(
        self, x: Tensor, *args: Any, self_attn_padding_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Map ``x`` (T, B, d) to (T, B, d), and return what else fairseq's layer returns.

        ``self_attn_padding_mask`` (B, S) is true for padding.
        """
        layer = self._with_mask(self_attn_padding_mask)
        options["self_attn_padding_mask"] = self_attn_padding_mask
        x, weights, state = TransformerDecoderLayerBase.forward(layer, x, *args, **options)
        return self._follow(x, self_attn_padding_mask), weights, state


def put_memories(
    stack: TransformerEncoderBase | TransformerDecoderBase,
    builder: MemoryBuilder,
    interleave: bool,
) -> None:
    """Replace the layers of fairseq's ``stack`` that have a memory."""
    cfg = stack.cfg
    for number in builder.numbers:
        # iterating over the list may drop layers (--decoder-layerdrop)
        layer, memory = stack.layers[number - 1], builder.build()
        if isinstance(layer, TransformerEncoderLayerBase):
            layer = MemoryEncoderLayer(cfg, memory, interleave)
        else:
            layer = MemoryDecoderLayer(cfg, memory, interleave, layer.encoder_attn is None)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        stack.layers[number - 1] = layer
