"""Memories in models that fairseq trains, and in fairseq's own transformer layers.

Lample et al. 2019 (arXiv:1907.05242), section 3.3 and figure 3. fairseq lacks three things that a
memory needs:

- fairseq would hold and exchange dense gradients of the values, so they are hidden from it;
- the optimizer finds the table of values by the ``param_group`` of the keys
  (:func:`.set_update_rule`), the one attribute that fairseq's copies in single precision keep;
- fairseq's layers do not pass the padding mask on, so ours hand it to the memory beforehand.

Shapes: B sentences, T tokens, S tokens so far, d model width.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
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
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.fairseq_integration.parameters import set_update_rule
from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory

# Where a memory stands beside the feed-forward sublayer.
INSTEAD, AFTER, PARALLEL = "instead", "after", "parallel"


class FairseqMemory(ProductKeyMemory):
    """A memory that fairseq trains; it notices when updates or checkpoints leave out its values."""

    _num_updates = 0
    _trained_slots: tuple[str, str] | None = None
    _learned_beside_fairseq = False

    def learn_beside_fairseq(self) -> None:
        """Hide the values from fairseq, and let ``adam_with_memory`` find them."""
        self.keep_gradient_beside_autograd()
        self._learned_beside_fairseq = True
        # optimizers only see parameters that require a gradient; every memory has keys
        set_update_rule(next(self.keys.parameters()), self.table)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; torch copies the keys without their ``param_group``."""
        super().__setstate__(state)
        if self._learned_beside_fairseq:
            set_update_rule(next(self.keys.parameters()), self.table)

    def set_num_updates(self, num_updates: int) -> None:
        """Check before each batch that the last update used the gradient of the values."""
        unused = not self.values.requires_grad and self.values.grad is not None
        if unused and num_updates > self._num_updates:
            raise ValueError(
                "an update was made without the values of a product-key memory: --optimizer "
                "adam_with_memory has to see the model's parameters one by one; give "
                "--fp16-no-flatten-grads with --fp16, and do not wrap the optimizer"
            )
        self._num_updates = num_updates

    def train_slots_of(self, path: str, name: str) -> None:
        """Train only the slots that the file at ``path`` lists as ``name``."""
        self._trained_slots = path, name

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d), as :class:`ProductKeyMemory` does."""
        if self._trained_slots is not None and self.training and torch.is_grad_enabled():
            # not before training begins: evaluation needs no file
            self.train_only(read_slots(*self._trained_slots, len(self.values)))
            self._trained_slots = None
        return super().forward(x, padding_mask)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_to_state_dict(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}; in fairseq, leave out --no-save-optimizer-state") from None


def read_slots(path: str, name: str, slots: int) -> Tensor:
    """Return which slots of the memory ``name`` to train, (slots,), from a numpy archive."""
    where = f"--memory-trainable-slots is {path}"
    remedy = "give the rarely_read.npz that scripts.evaluate.memory_usage --rarely-read wrote"
    try:
        # pickled objects could run code
        with np.load(path, allow_pickle=False) as archive:
            found = archive[name]
    except KeyError:
        raise ValueError(f"{where}, which has no {name}: {remedy} for this model") from None
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{where}, which cannot be read ({error}): {remedy}") from None
    if found.dtype != bool or found.shape != (slots,):
        raise ValueError(
            f"{where}, whose {name} has {found.dtype} of shape {found.shape}, but the memory has "
            f"{slots} slots: {remedy} for this model"
        )
    return torch.from_numpy(found)


def keep_shards_apart(model: nn.Module) -> None:
    """Keep torch's DistributedDataParallel from copying worker 0's columns to all workers."""
    shards = [
        f"{name}.values" if name else "values"
        for name, module in model.named_modules()
        if isinstance(module, ProductKeyMemory) and module.table.columns.sharded
    ]
    if shards:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, shards)


# --- fairseq's layers


class _MemoryAsFc1(MemorySublayer):
    """A memory that fairseq's layer calls as its ``fc1``, with the input alone.

    The layer sets ``padding_mask`` first, in each pass.
    """

    padding_mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, d) to (T, B, d)."""
        return super().forward(x, self.padding_mask)


class _WithMemory(nn.Module):
    """Base class of both kinds of layers: places the memory and reads it."""

    def _place(self, memory: ProductKeyMemory, place: str) -> None:
        self.memory_sublayer = None if place == INSTEAD else MemorySublayer(memory)
        self.memory_layer_norm = LayerNorm(self.embed_dim) if place == AFTER else None
        self._entering: Tensor | None = None
        self._padding_mask: Tensor | None = None
        if place == PARALLEL:
            # fairseq's forward pass has no hook between the sublayer and its dropout
            self.fc1.register_forward_pre_hook(self._keep_entering)
            self.fc2.register_forward_hook(self._add_parallel)
        if place == INSTEAD:
            # fairseq's layer computes fc2(norm(dropout(activation(fc1(x)))))
            self.fc1 = _MemoryAsFc1(memory)
            self.fc2 = nn.Identity()
            self.activation_fn = self.activation_dropout_module = nn.Identity()
            self.ffn_layernorm = None

    def _leave_padding(self, padding_mask: Tensor | None, x: Tensor) -> None:
        """Keep the padding mask of ``x`` (T, B, d), given the mask (B, S) of all tokens so far."""
        if padding_mask is not None:
            padding_mask = padding_mask[:, -len(x) :].t()
        if self.memory_sublayer is None:
            self.fc1.padding_mask = padding_mask
        self._padding_mask = padding_mask

    def _keep_entering(self, fc1: nn.Module, inputs: tuple[Tensor]) -> None:
        (self._entering,) = inputs

    def _add_parallel(self, fc2: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        entering, self._entering = self._entering, None
        return output + self.memory_sublayer(entering, self._padding_mask)

    def _add_memory(self, x: Tensor) -> Tensor:
        if self.memory_layer_norm is None:
            return x
        if self.normalize_before:
            read = self.memory_sublayer(self.memory_layer_norm(x), self._padding_mask)
            return x + self.dropout_module(read)
        read = self.memory_sublayer(x, self._padding_mask)
        return self.memory_layer_norm(x + self.dropout_module(read))


class MemoryEncoderLayer(_WithMemory, TransformerEncoderLayerBase):
    """fairseq's encoder layer with a memory instead of, after or beside its feed-forward layer."""

    def __init__(self, cfg: TransformerConfig, memory: ProductKeyMemory, place: str) -> None:
        super().__init__(cfg)
        self._place(memory, place)

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Map ``x`` (T, B, d) to (T, B, d); ``encoder_padding_mask`` (B, T) is true for padding."""
        self._leave_padding(encoder_padding_mask, x)
        return self._add_memory(super().forward(x, encoder_padding_mask, attn_mask))


class MemoryDecoderLayer(_WithMemory, TransformerDecoderLayerBase):
    """fairseq's decoder layer with a memory instead of, after or beside its feed-forward layer."""

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
        """Map (T, B, d) to (T, B, d) and what fairseq's layer adds; the padding mask is (B, S)."""
        self._leave_padding(self_attn_padding_mask, x)
        x, *others = super().forward(
            x, *encoder_and_states, self_attn_padding_mask=self_attn_padding_mask, **options
        )
        return self._add_memory(x), *others


def put_memories(
    stack: TransformerEncoderBase | TransformerDecoderBase,
    numbers: list[int],
    build: Callable[[int], ProductKeyMemory],
    place: str,
) -> dict[int, ProductKeyMemory]:
    """Replace layers ``numbers``, from 1, of fairseq's ``stack`` by layers with a memory.

    ``build`` maps a layer's width to a memory. Returns the memories by layer number.
    """
    cfg, memories = stack.cfg, {}
    for number in numbers:
        # iterating over the list may drop layers (--decoder-layerdrop)
        layer = stack.layers[number - 1]
        memory = memories[number] = build(layer.embed_dim)
        if isinstance(layer, TransformerEncoderLayerBase):
            layer = MemoryEncoderLayer(cfg, memory, place)
        else:
            layer = MemoryDecoderLayer(cfg, memory, place, layer.encoder_attn is None)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        stack.layers[number - 1] = layer
    return memories
