"""Checkpoints that fairseq-train wrote, read without executing anything in them."""

from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_plugins.fairseq_integration import safe_loading
from fairseq_plugins.fairseq_integration.safe_loading import options_of
from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from scripts._shared.commands import short


def read_checkpoint(path: Path, option: str = "--checkpoint") -> dict[str, Any]:
    """Content of the file that an option names; raises as safe_loading.read_checkpoint."""
    return safe_loading.read_checkpoint(path, f"{option} {short(path)}")


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
