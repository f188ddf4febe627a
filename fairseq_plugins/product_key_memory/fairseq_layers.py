"""Memories in fairseq's own transformer layers.

Lample et al. 2019 (arXiv:1907.05242), section 3.3 and figure 3. A memory replaces the feed-forward
sublayer, or follows it as a residual sublayer of its own (``--memory-interleave``).

Shapes: B sentences, T tokens, S tokens so far, d model width.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import LayerNorm
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.builder import MemoryBuilder, allow_new
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory


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
        layer: MemoryEncoderLayer | MemoryDecoderLayer
        if isinstance(stack, TransformerEncoderBase):
            layer = MemoryEncoderLayer(cfg)
        else:
            layer = MemoryDecoderLayer(cfg, stack.layers[index].encoder_attn is None)
        layer.put(memory, interleave)
        if interleave:
            allow_new(layer.memory_layer_norm, builder.options)
        elif builder.options.memory_optimizer is not None:
            layer.register_load_state_dict_pre_hook(_drop_replaced)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        stack.layers[index] = layer
