"""Checkpoints that fairseq-train wrote, read without executing anything in them."""

import pickle
from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from scripts._shared.commands import short


def read_checkpoint(path: Path, option: str = "--checkpoint") -> dict[str, Any]:
    """Content of the file that an option names, its tensors left on the disk; {} for another kind.

    Raises ValueError when the file is missing, broken or holds more than weights and options.
    """
    label = f"{option} {short(path)}"
    if not path.is_file():
        raise ValueError(f"{label} is no file: name one that fairseq-train wrote")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{label} holds more than weights and options, or is cut short, and is not loaded "
            f"({str(error).splitlines()[0]}): name a checkpoint that fairseq-train wrote with "
            "this plugin"
        ) from error
    return state if isinstance(state, dict) else {}


def options_of(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Options of the ``part`` "task" or "model" of a checkpoint, by name; {} if it has none."""
    options = (state.get("cfg") or {}).get(part) or {}
    # parsed arguments, or a configuration
    return options if isinstance(options, dict) else vars(options)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Content of the checkpoint of a segment language model.

    Raises ValueError as read_checkpoint, and when the model is none of this package.
    """
    state = read_checkpoint(path)
    name = options_of(state, "model").get("_name")
    if not issubclass(ARCH_MODEL_REGISTRY.get(name, object), SegmentLanguageModel):
        raise ValueError(
            f"--checkpoint {short(path)} holds the model {name!r}, which is no segment language "
            "model: name a checkpoint of a model of this package"
        )
    return state
