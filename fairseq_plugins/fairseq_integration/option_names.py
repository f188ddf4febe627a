"""Errors that name command-line options, from layers that know arguments only."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ARGUMENT = re.compile(r"`(\w+)`")


@contextmanager
def errors_name_options(option_of: Callable[[str], str]) -> Iterator[None]:
    """Have every ``ValueError`` raised within name options in place of arguments.

    Layers write arguments in backquotes, as in "`slots` is 5: it must be a square number".

    Args:
        option_of: maps the name of an argument to its option, such as "slots" to
            "--memory-slots".

    Raises:
        ValueError: as what runs within, in terms of options.
    """
    try:
        yield
    except ValueError as error:
        text = ARGUMENT.sub(lambda argument: option_of(argument[1]), str(error))
        raise ValueError(text) from None
