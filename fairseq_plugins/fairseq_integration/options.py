"""Options of models, tasks, losses and optimizers."""

import math
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


def check_range(cfg: Any, minimum: float, *names: str, below: float = math.inf) -> None:
    """Refuse options that are smaller than ``minimum`` or not ``below``; None means not set."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and (isinstance(value, str) or not minimum <= value < below):
            end = ", and finite" if below == math.inf else f" and below {below}"
            raise ValueError(f"{flag(name)} is {value!r}: it must be at least {minimum}{end}")


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
