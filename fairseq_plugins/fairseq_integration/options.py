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


def check_ranges(cfg: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse options below the first number or not below the second; None means not set."""
    for name, (least, limit) in ranges.items():
        value = getattr(cfg, name)
        if value is not None and (isinstance(value, str) or not least <= value < limit):
            end = ", and finite" if limit == math.inf else f" and below {limit}"
            raise ValueError(f"{flag(name)} is {value!r}: it must be at least {least}{end}")


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
