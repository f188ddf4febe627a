"""Memories in fairseq's own transformer layers.

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

from fairseq_plugins.product_key_memory.builder import MemoryBuilder
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory

if TYPE_CHECKING:
    from typing_extensions import Self


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
    for index in range(len(stack.layers)):
        memory = builder(index + 1)
        if memory is None:
            continue
        # iterating over the list may drop layers (--decoder-layerdrop)
        layer = stack.layers[index]
        if isinstance(layer, TransformerEncoderLayerBase):
            layer = MemoryEncoderLayer(cfg, memory, interleave)
        else:
            layer = MemoryDecoderLayer(cfg, memory, interleave, layer.encoder_attn is None)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        stack.layers[index] = layer
