"""Errors that name options, and that fairseq's commands print as a sentence."""

from __future__ import annotations

import difflib
import dis
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import Any

# an argument's name in the error of a layer
ARGUMENT = re.compile(r"`(\w+)`")
PACKAGE = Path(__file__).resolve().parents[1]
# errors of this package that a user can mend
FOR_USERS = (ValueError, FloatingPointError, OSError)
# torch's words for a tensor that is too large for the memory
TOO_LARGE = ("allocate", "size calculation overflowed")
# the excepthook before ours
_print_traceback: Callable[..., None] = sys.__excepthook__


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def flag(option: str) -> str:
    """Return the command-line form of an option: "--lr-scheduler" for "lr_scheduler"."""
    return "--" + option.replace("_", "-")


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return a question with up to ``most`` known names like this one; "" if there are none."""
    longer = sorted(k for k in known if k.startswith(name) or name.startswith(k))
    near = longer[:most] or difflib.get_close_matches(name, known, n=most, cutoff=0.75)
    return f"did you mean {' or '.join(near)}?" if near else ""


@contextmanager
def sizes_in_memory(cfg: Any) -> Iterator[None]:
    """Name a model's largest sizes if the machine lacks the memory to build it."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in TOO_LARGE):
            raise
        # layers import this file without fairseq
        from omegaconf import OmegaConf

        options = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else vars(cfg)
        numbers = {name: value for name, value in options.items() if type(value) is int and value}
        largest = sorted(numbers.values(), reverse=True)[:4]
        sizes = ", ".join(f"{flag(o)} {size}" for o, size in numbers.items() if size in largest)
        raise ValueError(
            f"the model takes more memory than this machine has ({sizes}): give smaller sizes"
        ) from error


@contextmanager
def errors_name_options(option_of: Callable[[str], str | None]) -> Iterator[None]:
    """Name options instead of arguments in each ``ValueError`` that the block raises.

    Layers write arguments in backquotes: "`slots` is 5: it must be a square number". ``option_of``
    maps "slots" to "--memory-slots", or to None.
    """
    try:
        yield
    except ValueError as error:
        text = ARGUMENT.sub(lambda found: option_of(found[1]) or found[0], str(error))
        if text == str(error):
            raise
        raise ValueError(text) from None


def print_errors_as_sentences() -> None:
    """Let fairseq's commands end with ``error: …`` if this package refuses a user's input.

    Errors of other programs keep their tracebacks, and so do errors that this package did not
    ``raise`` or that another process or Hydra prints.
    """
    global _print_traceback
    program = Path(sys.argv[0]) if sys.argv else Path()
    # a console script, or python -m fairseq_cli.train
    if program.name.startswith("fairseq-") or program.parent.name == "fairseq_cli":
        if sys.excepthook is not _print_error:
            _print_traceback = sys.excepthook
        sys.excepthook = _print_error


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error on standard error; Python then exits with status 1."""
    refused: BaseException | None = error
    # fairseq's trainer hides errors of checkpoints behind a bare Exception
    while type(refused) is Exception:
        refused = refused.__cause__ or refused.__context__
    if not (isinstance(refused, FOR_USERS) and _raised_here(refused.__traceback__)):
        _print_traceback(kind, error, trace)
        return
    sys.stdout.flush()
    print(f"error: {refused}", file=sys.stderr)


def _raised_here(trace: TracebackType | None) -> bool:
    """Return whether a traceback ends with a ``raise`` of this package."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    by_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return by_raise and Path(code.co_filename).resolve().is_relative_to(PACKAGE)
