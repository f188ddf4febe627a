"""Options of models, tasks, losses and optimizers."""

from dataclasses import field
from typing import Any


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def flag(option: str) -> str:
    """Return the command-line form of an option: "--lr-scheduler" for "lr_scheduler"."""
    return "--" + option.replace("_", "-")
