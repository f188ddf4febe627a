"""fairseq's own transformer layers with a product-key memory.

Lample et al. 2019 (arXiv:1907.05242), section 3.3 and figure 3.

Shapes: B sentences, T tokens, S tokens so far, d model width.
"""

from __future__ import annotations

from typing import Any

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

from fairseq_plugins.product_key_memory.fairseq_memory import MemoryBuilder
from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.options import AFTER, INSTEAD, PARALLEL, placement


class _MemoryAsFc1(MemorySublayer):
    """A memory that fairseq's layer calls as its ``fc1``, with nothing but the input.

    fairseq's forward pass has no place to hand the padding on, so the layer stores it here first,
    in each pass: one that recomputes activations has the padding of the first.
    """

    padding_mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, d) to (T, B, d)."""
        return super().forward(x, self.padding_mask)


class _WithMemory(nn.Module):
    """Base class of both kinds of layers: where their memory is, and how it is read."""

    def _place(self, memory: ProductKeyMemory, place: str) -> None:
        self.memory_sublayer = None if place == INSTEAD else MemorySublayer(memory)
        self.memory_layer_norm = LayerNorm(self.embed_dim) if place == AFTER else None
        self._entering: Tensor | None = None
        self._padding_mask: Tensor | None = None
        if place == PARALLEL:
            # fairseq's forward pass has no place between the sublayer and its dropout
            self.fc1.register_forward_pre_hook(self._keep_entering)
            self.fc2.register_forward_hook(self._add_parallel)
        if place == INSTEAD:
            # fairseq's layer computes fc2(norm(dropout(activation(fc1(x)))))
            self.fc1 = _MemoryAsFc1(memory)
            self.fc2 = nn.Identity()
            self.activation_fn = _unchanged
            self.activation_dropout_module = nn.Identity()
            self.ffn_layernorm = None

    def _leave_padding(self, padding_mask: Tensor | None) -> None:
        if self.memory_sublayer is None:
            self.fc1.padding_mask = padding_mask
        self._padding_mask = padding_mask

    def _keep_entering(self, fc1: nn.Module, inputs: tuple[Tensor]) -> None:
        (self._entering,) = inputs

    def _add_parallel(self, fc2: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        entering, self._entering = self._entering, None
        return output + self.memory_sublayer(entering, self._padding_mask)

    def _add_memory(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        if self.memory_layer_norm is None:
            return x
        if self.normalize_before:
            read = self.memory_sublayer(self.memory_layer_norm(x), padding_mask)
            return x + self.dropout_module(read)
        read = self.memory_sublayer(x, padding_mask)
        return self.memory_layer_norm(x + self.dropout_module(read))


def _unchanged(x: Tensor) -> Tensor:
    return x


def padding_of_last_tokens(padding_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the padding (T, B) of the last tokens, ``x`` (T, B, d), given that of all (B, S)."""
    return None if padding_mask is None else padding_mask[:, -len(x) :].t()


class MemoryEncoderLayer(_WithMemory, TransformerEncoderLayerBase):
    """fairseq's encoder layer with a memory instead of, after or beside its feed-forward one."""

    def __init__(self, cfg: TransformerConfig, memory: ProductKeyMemory, place: str) -> None:
        super().__init__(cfg)
        self._place(memory, place)

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Map ``x`` (T, B, d) to (T, B, d); ``encoder_padding_mask`` (B, T) is true for padding."""
        padding_mask = padding_of_last_tokens(encoder_padding_mask, x)
        self._leave_padding(padding_mask)
        x = super().forward(x, encoder_padding_mask, attn_mask)
        return self._add_memory(x, padding_mask)


class MemoryDecoderLayer(_WithMemory, TransformerDecoderLayerBase):
    """fairseq's decoder layer with a memory instead of, after or beside its feed-forward one."""

    def __init__(
        self,
        cfg: TransformerConfig,
        memory: ProductKeyMemory,
        place: str,
        no_encoder_attn: bool = False,
    ) -> None:
        super().__init__(cfg, no_encoder_attn)
        self._place(memory, place)

    def forward(
        self,
        x: Tensor,
        *encoder_and_states: Any,
        self_attn_padding_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Map (T, B, d) to (T, B, d) and attention weights, as fairseq's layer does.

        In incremental decoding ``x`` is the last token of each sentence.
        ``self_attn_padding_mask`` (B, S) is true for padding.
        """
        padding_mask = padding_of_last_tokens(self_attn_padding_mask, x)
        self._leave_padding(padding_mask)
        x, *others = super().forward(
            x, *encoder_and_states, self_attn_padding_mask=self_attn_padding_mask, **options
        )
        return self._add_memory(x, padding_mask), *others


def put_memories(
    stack: TransformerEncoderBase | TransformerDecoderBase,
    numbers: list[int],
    builder: MemoryBuilder,
) -> dict[int, ProductKeyMemory]:
    """Give layers ``numbers``, from 1, of a stack that fairseq has built a memory.

    Returns:
        The memories by the number of their layer.
    """
    cfg, place = stack.cfg, placement(builder.options)
    memories = {}
    for number in numbers:
        # by index: iterating over the list may drop layers (--decoder-layerdrop)
        layer = stack.layers[number - 1]
        memory = memories[number] = builder.build(layer.embed_dim)
        if isinstance(layer, TransformerEncoderLayerBase):
            layer = MemoryEncoderLayer(cfg, memory, place)
        else:
            layer = MemoryDecoderLayer(cfg, memory, place, layer.encoder_attn is None)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        stack.layers[number - 1] = layer
    return memories
