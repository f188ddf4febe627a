"""Memories in models that fairseq trains: built from options, refused without their optimizer.

fairseq has no place for what a memory needs, so two channels are used beside it: the optimizer
finds the table of values by the ``param_group`` of the keys (:func:`.set_update_rule`), and values
hide from fairseq, which would hold and exchange gradients of the table's size. The third channel,
padding on its way to a layer, is in :mod:`.transformer_layers`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.fairseq_integration.error_messages import errors_name_options, flag
from fairseq_plugins.fairseq_integration.forward_passes import AFTER_THE_LOSS, validation_pass
from fairseq_plugins.fairseq_integration.parameters import set_update_rule
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.options import (
    TOO_LARGE,
    VALUES_DTYPES,
    MemoryOptions,
    parse_hidden_dims,
)
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage

# The optimizer that updates only the rows of a memory that were read.
OPTIMIZER = "adam_with_memory"


class FairseqMemory(ProductKeyMemory):
    """A memory in a model that fairseq trains; it refuses updates and checkpoints without it."""

    _num_updates = 0
    _trained_slots: tuple[str, str] | None = None
    _learned_beside_fairseq = False

    def learn_beside_fairseq(self) -> None:
        """Hide the values from fairseq, and lead ``adam_with_memory`` to them."""
        self.keep_gradient_beside_autograd()
        self._learned_beside_fairseq = True
        # optimizers see only parameters that require a gradient, or fairseq's copies of them in
        # single precision: the keys, which each memory has, lead to the values
        set_update_rule(next(self.keys.parameters()), self.table)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, whose keys torch copies without their ``param_group``."""
        super().__setstate__(state)
        if self._learned_beside_fairseq:
            set_update_rule(next(self.keys.parameters()), self.table)

    def set_num_updates(self, num_updates: int) -> None:
        """Check that the last update, after ``num_updates``, used the gradient of the values.

        fairseq calls it before each batch. Only ``adam_with_memory`` knows of that gradient.
        """
        unused = not self.values.requires_grad and self.values.grad is not None
        if unused and num_updates > self._num_updates:
            raise ValueError(
                "an update was made without the values of a product-key memory: --optimizer "
                "adam_with_memory has to see the model's parameters one by one; give "
                "--fp16-no-flatten-grads with --fp16, and no optimizer around it"
            )
        self._num_updates = num_updates

    def train_slots_of(self, path: str, name: str) -> None:
        """Let only those slots learn in a training that the file at ``path`` has for ``name``."""
        self._trained_slots = path, name

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d), as :class:`ProductKeyMemory` does."""
        if self._trained_slots is not None and self.training and torch.is_grad_enabled():
            # only when a training begins: evaluation needs no file
            self.train_only(read_slots(*self._trained_slots, len(self.values)))
            self._trained_slots = None
        return super().forward(x, padding_mask)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_to_state_dict(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}; in fairseq, leave out --no-save-optimizer-state") from None


def read_slots(path: str, name: str, slots: int) -> Tensor:
    """Return which slots of the memory ``name`` are trained, (slots,), from an archive of numpy's.

    ``scripts.evaluate.memory_usage`` wrote it, with the names that validation logs.
    """
    where = f"--memory-trainable-slots is {path}"
    remedy = "give the rarely_read.npz that scripts.evaluate.memory_usage --rarely-read wrote"
    try:
        # what is not numbers is refused: it could run code
        with np.load(path, allow_pickle=False) as archive:
            found = archive[name]
    except KeyError:
        raise ValueError(f"{where}, which has no {name}: {remedy} for this model") from None
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{where}, which cannot be read ({error}): {remedy}") from None
    if found.dtype != bool or found.shape != (slots,):
        raise ValueError(
            f"{where}, whose {name} has {found.dtype} of shape {found.shape}, and the memory "
            f"{slots} slots: {remedy} for this model"
        )
    return torch.from_numpy(found)


class MemoryBuilder:
    """Builds the memories of one model, which with ``--memory-share-values`` share their values.

    Args:
        options: of all of them: a :class:`MemoryOptions`, or a configuration with the same names.
    """

    def __init__(self, options: MemoryOptions) -> None:
        self.options = options
        self._first: ProductKeyMemory | None = None

    def build(self, embed_dim: int) -> ProductKeyMemory:
        """Build the next memory, for a layer of width ``embed_dim``."""
        try:
            memory = self._build(embed_dim)
        except RuntimeError as error:
            if not any(words in str(error) for words in TOO_LARGE):
                raise
            names = [f"memory_{name}" for name in ("slots", "heads", "query_dim", "value_dim")]
            sizes = ", ".join(f"{flag(name)} {getattr(self.options, name)}" for name in names)
            raise ValueError(
                f"a product-key memory takes more memory than this machine has ({sizes}): give "
                "smaller sizes"
            ) from error
        self._check_optimizer(memory)
        if self.options.memory_optimizer == OPTIMIZER:
            memory.learn_beside_fairseq()
        if self.options.memory_share_values and self._first is None:
            self._first = memory
        return memory

    def _build(self, embed_dim: int) -> FairseqMemory:
        options = self.options
        hidden_dims = parse_hidden_dims(options.memory_query_hidden_dims)
        with errors_name_options(lambda argument: flag(f"memory_{argument}")):
            return FairseqMemory(
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
                values_dtype=VALUES_DTYPES[str(options.memory_values_dtype)],
                shard_values=options.memory_shard_values,
                output_norm=options.memory_output_norm,
                output_gate=options.memory_output_gate,
                zero_init=options.memory_zero_init,
                values_of=self._first,
            )

    def _check_optimizer(self, memory: ProductKeyMemory) -> None:
        optimizer = self.options.memory_optimizer
        if memory.table.columns.sharded and optimizer != OPTIMIZER:
            raise ValueError(
                f"--memory-shard-values with --optimizer {optimizer}: another one would average "
                f"the columns of all workers; give --optimizer {OPTIMIZER}"
            )
        if memory.table.stays_bf16 and optimizer not in (None, OPTIMIZER):
            raise ValueError(
                f"--memory-values-dtype bf16 with --optimizer {optimizer}: its steps would be lost "
                f"in rounding; give --optimizer {OPTIMIZER}, or leave it out"
            )

    def finish(self, model: nn.Module, memories: Mapping[str, ProductKeyMemory]) -> None:
        """Prepare ``model`` to be trained with its ``memories``, by the names that are logged.

        Shards stay apart, validation logs what is read, and ``--memory-trainable-slots`` is heeded.
        """
        keep_shards_apart(model)
        watch_memories(model, memories)
        path, optimizer = self.options.memory_trainable_slots, self.options.memory_optimizer
        if path and optimizer not in (None, OPTIMIZER):
            raise ValueError(
                f"--memory-trainable-slots with --optimizer {optimizer}, which updates all of "
                f"them: give --optimizer {OPTIMIZER}"
            )
        for name, memory in memories.items():
            if path:
                memory.train_slots_of(path, name)


def keep_shards_apart(model: nn.Module) -> None:
    """Keep torch's data parallelism from giving all workers the columns of worker 0."""
    shards = [
        f"{name}.values" if name else "values"
        for name, module in model.named_modules()
        if isinstance(module, ProductKeyMemory) and module.table.columns.sharded
    ]
    if shards:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, shards)


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
        current = validation_pass(model)
        if current is None:
            return
        if current is not self._pass:
            self._pass = current
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
            f"{name}_usage", lambda _: round(100 * usage(reads.total()), 2), AFTER_THE_LOSS
        )
        metrics.log_derived(
            f"{name}_kl", lambda _: round(kl_from_uniform(reads.total()), 4), AFTER_THE_LOSS
        )
