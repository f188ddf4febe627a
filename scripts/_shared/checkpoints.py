"""Read checkpoints of fairseq-train without executing code in them, and write checkpoints.

Importing fairseq takes seconds, so the functions import it when they need it.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts._shared.commands import short


def checkpoint_options(state: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return the options of a part of a checkpoint, such as "model", by their names."""
    options = (state.get("cfg") or {}).get(part) or {}
    # parsed arguments, or a configuration
    return options if isinstance(options, dict) else vars(options)


def load_safely(path: Path, name: str, remedy: str) -> Any:
    """Return the contents of one of torch's files; an archive's tensors stay on the disk.

    Raises ValueError, in which the file is called ``name``, for other files.
    """
    import torch

    from fairseq_plugins import register

    # lets torch read fairseq's options
    register()
    if not path.is_file():
        # reading a pipe could wait forever
        raise ValueError(f"{name} is not a file: {remedy}")
    # files from before PyTorch 1.6 cannot be mapped
    mapped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # the rest of torch's message advises how to execute the file
        reason = str(error).partition("WeightsUnpickler error: ")[2].strip()
        reason = reason.partition("\n")[0].partition(". ")[0][:200]
        raise ValueError(
            f"{name} holds more than weights and options, or is damaged, and is not loaded "
            f"({reason}): {remedy}"
        ) from error
    # damage may raise anything
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"{name} cannot be read; it may be cut short or damaged ({reason}): {remedy}"
        ) from error


def read_checkpoint(path: Path, option: str = "--checkpoint") -> dict[str, Any]:
    """Return the content of the checkpoint that a command line option names; {} if it has none."""
    state = load_safely(path, f"{option} {short(path)}", "name one that fairseq-train wrote")
    return state if isinstance(state, dict) else {}


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
