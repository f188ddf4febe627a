"""Options of models, tasks, losses and optimizers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def flag(option: str) -> str:
    """Return the command-line form of an option: "--lr-scheduler" for "lr_scheduler"."""
    return "--" + option.replace("_", "-")


@contextmanager
def naming_options(options: Mapping[str, str]) -> Iterator[None]:
    """Rewrite `parameters` in errors of layers as the ``options`` that set them."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for parameter, option_name in options.items():
            message = message.replace(f"`{parameter}`", flag(option_name))
        raise ValueError(message) from error
