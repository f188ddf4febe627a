"""What fairseq's commands print where a user's options or files are refused: a sentence."""

from __future__ import annotations

import argparse
import difflib
import dis
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

PACKAGE = Path(__file__).resolve().parents[1]
# what this package raises for what a user can mend
FOR_USERS = (ValueError, FloatingPointError, OSError)
# the excepthook before ours
_print_traceback: Callable[..., None] = sys.__excepthook__


def print_errors_as_sentences() -> None:
    """Let fairseq's commands end with ``error: …`` where this package refuses what a user gave.

    Under any other program, and for errors that no ``raise`` of this package made, tracebacks stay:
    they are faults, or fairseq's own words. So do they where another process or Hydra prints the
    error: with several GPUs, and under fairseq-hydra-train.
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
    """Return whether a ``raise`` of this package is what a traceback ends with."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    by_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return by_raise and Path(code.co_filename).resolve().is_relative_to(PACKAGE)


def explain_wrong_options() -> None:
    """Let fairseq's parsers say what to do about an option or an ``--arch`` that there is not."""
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
    """Yield a sentence for each name that a parser's message refuses."""
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
