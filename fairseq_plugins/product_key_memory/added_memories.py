"""Loads a checkpoint without memories into a model that has some."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory

_LAYER = re.compile(r".*\blayers\.\d+\.")
# sublayers that a memory may replace
_FEED_FORWARD = re.compile(r"(fc1|fc2|ffn_layernorm|feed_forward)\.")
# Norms that come with a memory, and the norms that may stand before each. added_layer_norm belongs
# to layers without a feed-forward sublayer.
_NORMS = {
    "memory_layer_norm": ("final_layer_norm", "self_attn_layer_norm"),
    "added_layer_norm": ("final_layer_norm", "self_attn_layer_norm"),
    "final_layer_norm": ("self_attn_layer_norm",),
}

logger = logging.getLogger(__name__)


def fit_to_memories(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights, with ``model``'s own weights for the memories it lacks.

    Feed-forward sublayers that a memory replaces are dropped. In post-norm layers, the norm of an
    added memory takes over the weights of the norm before it, which becomes neutral: the two norms
    together do what one did. The log says whether each new memory changes the loss.
    """
    fitted = dict(state_dict)
    owners: dict[int, str] = {}
    for name, memory in model.named_modules():
        layer_of = _LAYER.match(name)
        if layer_of is None or not isinstance(memory, ProductKeyMemory):
            continue
        owner = owners.setdefault(id(memory.table), name)
        path = layer_of[0]
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
        # a checkpoint without values is about to be refused
        if f"{owner}.values" in fitted:
            reads_trained = not memory.owns_values and f"{owner}.values" in state_dict
            _log_effect(path, memory, fitted[f"{owner}.values"], bool(replaced), reads_trained)
    return fitted


def _log_effect(
    path: str, memory: ProductKeyMemory, values: Tensor, replaces: bool, reads_trained: bool
) -> None:
    """Log what a memory that the checkpoint lacks does to the loss."""
    last = memory.projection or memory.output_norm
    zero = not any(weights.any() for weights in (last.parameters() if last else [values]))
    remedy = ""
    if replaces:
        effect = "takes the place of a trained feed-forward sublayer, so that the loss rises"
        remedy = (
            "; --memory-parallel or --memory-interleave, with --memory-zero-init, leaves the loss "
            "as it was"
        )
    elif zero:
        effect = "is added, its output zero, so that the loss stays what it was"
    else:
        effect = "is added, its output not zero, so that the loss rises"
        remedy = "; with --memory-zero-init it starts at zero"
    if last is None and reads_trained:
        remedy = "; the values that it shares are trained already"
    part, _, number, _ = path.split(".")[-4:]
    logger.log(
        logging.INFO if zero and not replaces else logging.WARNING,
        "the checkpoint has no memory in layer %d of the %s: a new one %s%s",
        int(number) + 1,
        part,
        effect,
        remedy,
    )


def _fit_norm(
    fitted: dict[str, Tensor],
    path: str,
    own: Mapping[str, Tensor],
    before: set[str],
    normalize_before: bool,
) -> None:
    """Add the weights of the norm that came with a memory in the layer at ``path``."""
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
