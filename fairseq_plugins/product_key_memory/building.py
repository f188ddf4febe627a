"""Memories in models that fairseq trains: building, checkpoints without them, what is logged."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugins.fairseq_integration.optimizers import set_update_rule
from fairseq_plugins.fairseq_integration.option_names import errors_name_options
from fairseq_plugins.fairseq_integration.validation import AFTER_THE_LOSS, validation_pass
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

# The layer that a module belongs to, and what a memory takes the place of there.
_LAYER = re.compile(r".*\blayers\.\d+\.")
_FEED_FORWARD = re.compile(r"(fc1|fc2|ffn_layernorm|feed_forward)\.")
# Norms that come with a memory, the second one in a layer without a feed-forward sublayer, and
# those that a layer has before them.
_NORMS = {
    "memory_layer_norm": ("final_layer_norm", "self_attn_layer_norm"),
    "final_layer_norm": ("self_attn_layer_norm",),
}

logger = logging.getLogger(__name__)


class FairseqMemory(ProductKeyMemory):
    """A memory in a model that fairseq trains; it refuses updates and checkpoints without it."""

    _num_updates = 0
    _trained_slots: tuple[str, str] | None = None

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

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d), as :class:`ProductKeyMemory` does.

        Raises:
            ValueError: the file of ``--memory-trainable-slots`` cannot be used.
        """
        if self._trained_slots is not None and self.training and torch.is_grad_enabled():
            # only when a training begins: evaluation needs no file
            self.train_only(read_slots(*self._trained_slots, len(self.values)))
            self._trained_slots = None
        return super().forward(x, padding_mask)

    def train_slots_of(self, path: str, name: str) -> None:
        """Let only those slots learn in a training that the file at ``path`` has for ``name``."""
        self._trained_slots = path, name

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_to_state_dict(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}; in fairseq, leave out --no-save-optimizer-state") from None


def build_memory(
    options: MemoryOptions, embed_dim: int, values_of: ProductKeyMemory | None = None
) -> ProductKeyMemory:
    """Build a memory for a model of width ``embed_dim``.

    Args:
        options: a :class:`MemoryOptions`, or a configuration with the same names.
        embed_dim: width of the model.
        values_of: the memory whose values it shares, None for its own.

    Raises:
        ValueError: an option has a value that no memory has.
    """
    hidden_dims = parse_hidden_dims(options.memory_query_hidden_dims)
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
            values_dtype=VALUES_DTYPES[str(options.memory_values_dtype)],
            shard_values=options.memory_shard_values,
            output_norm=options.memory_output_norm,
            output_gate=options.memory_output_gate,
            zero_init=options.memory_zero_init,
            values_of=values_of,
        )
    if memory.table.shard is not None and options.memory_optimizer != OPTIMIZER:
        raise ValueError(
            f"--memory-shard-values with --optimizer {options.memory_optimizer}: another one would "
            f"average the columns of all workers; give --optimizer {OPTIMIZER}, or leave it out"
        )
    if memory.table.rounded and options.memory_optimizer not in (None, OPTIMIZER):
        raise ValueError(
            f"--memory-values-dtype bf16 with --optimizer {options.memory_optimizer}: its steps "
            f"would be lost in rounding; give --optimizer {OPTIMIZER}, or leave it out"
        )
    if options.memory_optimizer == OPTIMIZER:
        memory.keep_gradient_beside_autograd()
        # optimizers see only parameters that require a gradient, or fairseq's copies of them in
        # single precision: the keys, which each memory has, lead to the values
        set_update_rule(next(memory.keys.parameters()), memory.table)
    return memory


def read_slots(path: str, name: str, slots: int) -> Tensor:
    """Return which slots of a memory are trained, (slots,), from the file that names them.

    Args:
        path: an archive of numpy's that ``scripts.evaluate.memory_usage`` wrote.
        name: of the memory, as validation logs it.
        slots: K.

    Raises:
        ValueError: there is no such file, or it has nothing that fits the memory.
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
        options: of all of them.
    """

    def __init__(self, options: MemoryOptions) -> None:
        self.options = options
        self._first: ProductKeyMemory | None = None

    def build(self, embed_dim: int) -> ProductKeyMemory:
        """Build the next memory, for a layer of width ``embed_dim``.

        Raises:
            ValueError: an option has a value that no memory has, the width of the values is
                another than that of the memory whose values it shares, or there is no room for it.
        """
        try:
            memory = build_memory(self.options, embed_dim, self._first)
        except RuntimeError as error:
            if not any(words in str(error) for words in TOO_LARGE):
                raise
            names = ("slots", "heads", "query_dim", "value_dim")
            given = [(name, getattr(self.options, f"memory_{name}")) for name in names]
            sizes = ", ".join(f"--memory-{name.replace('_', '-')} {value}" for name, value in given)
            raise ValueError(
                f"a product-key memory takes more memory than this machine has ({sizes}): give "
                "smaller sizes"
            ) from error
        if self.options.memory_share_values and self._first is None:
            self._first = memory
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


def fit_to_memories(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights with those of memories that it does not have.

    These start as ``model`` has them; feed-forward sublayers that they replace are left out. Where
    each sublayer is normalised after it, a memory with a norm of its own gets the weights of the
    norm before it, which then only normalises: two norms do what one did. The log says of each new
    memory whether the loss stays what it was.

    Args:
        model: with its memories.
        state_dict: of a model without memories, or without some of them.
    """
    fitted = dict(state_dict)
    owners = {}
    for name, memory in model.named_modules():
        if not isinstance(memory, ProductKeyMemory):
            continue
        owner = owners.setdefault(id(memory.table), name)
        path = _LAYER.match(name)[0]
        before = {key.removeprefix(path) for key in state_dict if key.startswith(path)}
        if not before or any(".memory." in key for key in before):
            continue
        layer = model.get_submodule(path[:-1])
        own = dict([*layer.named_parameters(), *layer.named_buffers()])
        within = name.removeprefix(path)
        for key in own.keys() - before:
            other_table = key == f"{within}.values" and not memory.owns_values
            if key.startswith(f"{within}.") and not other_table:
                fitted[path + key] = own[key].detach()
        _fit_norm(fitted, path, own, before, layer.normalize_before)
        replaced = [key for key in before - own.keys() if _FEED_FORWARD.match(key)]
        for key in replaced:
            del fitted[path + key]
        # without values the checkpoint is about to be refused
        if f"{owner}.values" in fitted:
            reads_trained = not memory.owns_values and f"{owner}.values" in state_dict
            _tell_of_new_memory(
                path, memory, fitted[f"{owner}.values"], bool(replaced), reads_trained
            )
    return fitted


def _tell_of_new_memory(
    path: str, memory: ProductKeyMemory, values: Tensor, replaces: bool, reads_trained: bool
) -> None:
    """Log what a memory that the checkpoint lacks does to the loss, layers counted from 1."""
    last = memory.projection or memory.output_norm
    zero = not any(weights.any() for weights in (last.parameters() if last else [values]))
    if replaces:
        told = "takes the place of a trained feed-forward sublayer, so that the loss rises"
        remedy = (
            "; --memory-parallel or --memory-interleave, with --memory-zero-init, leaves it as it "
            "was"
        )
    elif zero:
        told, remedy = "is added, its output zero, so that the loss stays what it was", ""
    else:
        told = "is added, its output not zero, so that the loss rises"
        remedy = "; with --memory-zero-init it starts at zero"
    if last is None and reads_trained:
        remedy = "; the values that it shares are trained already"
    part, _, number, _ = path.split(".")[-4:]
    logger.log(
        logging.INFO if zero and not replaces else logging.WARNING,
        "the checkpoint has no memory in layer %d of the %s: a new one %s",
        int(number) + 1,
        part,
        told + remedy,
    )


def _fit_norm(
    fitted: dict[str, Tensor],
    path: str,
    own: Mapping[str, Tensor],
    before: set[str],
    normalize_before: bool,
) -> None:
    """Add the norm that came with a memory to the weights of the layer at ``path``."""
    for norm, earlier in _NORMS.items():
        if f"{norm}.weight" not in own or f"{norm}.weight" in before:
            continue
        last = next(other for other in earlier if f"{other}.weight" in before)
        for kind, neutral in (("weight", torch.ones_like), ("bias", torch.zeros_like)):
            if normalize_before:
                fitted[f"{path}{norm}.{kind}"] = own[f"{norm}.{kind}"].detach()
            else:
                trained = fitted[f"{path}{last}.{kind}"]
                fitted[f"{path}{norm}.{kind}"] = trained
                fitted[f"{path}{last}.{kind}"] = neutral(trained)


def choose_trained_slots(options: MemoryOptions, memories: Mapping[str, ProductKeyMemory]) -> None:
    """Let memories learn the values of those slots alone that ``--memory-trainable-slots`` names.

    Args:
        options: of the memories.
        memories: by the names that validation logs.

    Raises:
        ValueError: the optimizer is one that updates all rows.
    """
    path = options.memory_trainable_slots
    if not path:
        return
    if options.memory_optimizer not in (None, OPTIMIZER):
        raise ValueError(
            f"--memory-trainable-slots with --optimizer {options.memory_optimizer}, which updates "
            f"all of them: give --optimizer {OPTIMIZER}"
        )
    for name, memory in memories.items():
        memory.train_slots_of(path, name)


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
