"""Errors that name command-line options, from layers that know arguments only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ARGUMENT = re.compile(r"`(\w+)`")


def flag(option: str) -> str:
    """Return how a command line has an option, such as "--lr-scheduler" for "lr_scheduler"."""
    return "--" + option.replace("_", "-")


@contextmanager
def errors_name_options(option_of: Callable[[str], str | None]) -> Iterator[None]:
    """Let each ``ValueError`` raised within name options in place of arguments.

    Layers write arguments in backquotes: "`slots` is 5: it must be a square number".

    Args:
        option_of: maps the name of an argument to its option, as "slots" to "--memory-slots"; None
            leaves the name as it is.
    """
    try:
        yield
    except ValueError as error:
        text = ARGUMENT.sub(lambda found: option_of(found[1]) or found[0], str(error))
        if text == str(error):
            raise
        raise ValueError(text) from None
