"""Errors name options, and fairseq's commands print what a user can mend as a sentence."""

from __future__ import annotations

import argparse
import difflib
import dis
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

# how errors of layers write an argument
ARGUMENT = re.compile(r"`(\w+)`")
PACKAGE = Path(__file__).resolve().parents[1]
# what this package raises for what a user can mend
FOR_USERS = (ValueError, FloatingPointError, OSError)
# the excepthook before ours
_print_traceback: Callable[..., None] = sys.__excepthook__


def flag(option: str) -> str:
    """Return the command-line form of an option: "--lr-scheduler" for "lr_scheduler"."""
    return "--" + option.replace("_", "-")


@contextmanager
def errors_name_options(option_of: Callable[[str], str | None]) -> Iterator[None]:
    """Let each ``ValueError`` raised within name options in place of arguments.

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
    """Let fairseq's commands end with ``error: …`` where this package refuses what a user gave.

    Other programs, errors that no ``raise`` of this package made, and errors that another process
    or Hydra prints keep their tracebacks.
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
    """Print an error on standard error; the interpreter goes on to end with exit status 1."""
    refused: BaseException | None = error
    # fairseq's trainer hides what is wrong with a checkpoint behind an exception of no kind
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


def explain_wrong_options() -> None:
    """Let fairseq's parsers say what to do about an unknown option or ``--arch``."""
    options.parse_args_and_arch = functools.wraps(options.parse_args_and_arch)(
        functools.partial(_parse, options.parse_args_and_arch)
    )


def _parse(
    parse: Callable[..., Any], parser: argparse.ArgumentParser, *args: Any, **given: Any
) -> Any:
    print_usage_and_exit = parser.error

    def explain(message: str) -> None:
        hints = list(_hints(parser, message))
        if not hints:
            print_usage_and_exit(message)
        # the usage of all options would hide them
        parser.exit(2, "".join(f"error: {hint}\n" for hint in hints))

    # fairseq-validate calls this within itself
    if "error" not in vars(parser):
        parser.error = explain
    return parse(parser, *args, **given)


def _hints(parser: argparse.ArgumentParser, message: str) -> Iterator[str]:
    """Yield a sentence for each unknown name in a parser's message."""
    arch = re.match(r"argument --arch/-a: invalid choice: '(.*?)' \(", message)
    if arch:
        yield f"--arch {arch[1]} is no model{_nearest(arch[1], ARCH_MODEL_REGISTRY)}"
    if not message.startswith("unrecognized arguments: "):
        return
    for option in re.findall(r"(?<!\S)--[a-z][\w-]*", message):
        name = option[2:].replace("-", "_")
        if option == "--sample-break-mode":
            yield (
                f"{option}: --task segment_language_modeling reads a text as it is, whole and in "
                "order; leave it out"
            )
        elif "--path" in parser._option_string_actions and _is_of_a_model(name):
            yield (
                f"{option} is an option of the model: to change it in a trained one, give "
                f"--model-overrides \"{{'{name}': VALUE}}\""
            )
        else:
            yield f"{option} is no option here{_nearest(option, parser._option_string_actions)}"


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.75)
    return f": did you mean {' or '.join(near)}?" if near else ""


def _is_of_a_model(option: str) -> bool:
    models = [kind for kind in MODEL_DATACLASS_REGISTRY.values() if kind is not None]
    return any(option in getattr(kind, "__dataclass_fields__", ()) for kind in models)
