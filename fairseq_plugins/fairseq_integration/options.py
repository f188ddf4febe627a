"""Options of models, tasks, losses and optimizers."""

import re
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

        def name(parameter: re.Match) -> str:
            return flag(options[parameter[1]]) if parameter[1] in options else parameter[0]

        raise ValueError(re.sub(r"`(\w+)`", name, str(error))) from error
