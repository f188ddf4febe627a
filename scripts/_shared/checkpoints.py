"""Read checkpoints of fairseq-train without executing code in them, and write checkpoints.

Importing fairseq takes seconds, so the functions import it when they need it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts._shared.commands import short


def options_of(state: Any, part: str) -> Mapping[str, Any]:
    """Return the options of a part of a checkpoint, such as "model"."""
    from fairseq_plugins.fairseq_integration import safe_loading

    return safe_loading.options_of(state, part)


def read_checkpoint(path: Path, option: str = "--checkpoint") -> dict[str, Any]:
    """Return the content of the checkpoint that a command line option names."""
    from fairseq_plugins.fairseq_integration import safe_loading

    return safe_loading.read_checkpoint(path, f"{option} {short(path)}")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a segment language model's checkpoint; raise ValueError for others."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_plugins.segment_language_model.model import SegmentLanguageModel

    state = read_checkpoint(path)
    name = options_of(state, "model").get("_name")
    if not issubclass(ARCH_MODEL_REGISTRY.get(name, object), SegmentLanguageModel):
        raise ValueError(
            f"--checkpoint {short(path)} holds the model {name!r}, which is not a segment "
            "language model: give a checkpoint of a segment language model of this package"
        )
    return state


def save_for_new_training(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint that starts a new training; raise OSError if the disk is full."""
    import torch

    start = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": False}
    fresh = {"extra_state": {"train_iterator": start, "val_loss": None}}
    try:
        torch.save({**state, **fresh, "last_optimizer_state": None}, path)
    except RuntimeError as error:
        # torch.save raises it if the disk is full
        raise OSError(str(error)) from error
