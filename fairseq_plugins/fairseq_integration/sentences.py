"""Errors of this package under fairseq's commands: a sentence without a traceback."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).resolve().parents[1]
# what this package raises for what a user can mend
FOR_USERS = (ValueError, FloatingPointError, OSError)
# what told of errors before
_before: Callable[..., None] = sys.__excepthook__


def tell_errors_in_a_sentence() -> None:
    """Let fairseq's commands end with ``error: …`` where this package refuses what a user gave.

    Under any other program, and for errors that no ``raise`` of this package made, tracebacks stay:
    they are faults, or fairseq's own words. So do they where another process or Hydra tells of the
    error: with several GPUs, and under fairseq-hydra-train.
    """
    global _before
    program = Path(sys.argv[0]) if sys.argv else Path()
    # a console script, or python -m fairseq_cli.train
    if program.name.startswith("fairseq-") or program.parent.name == "fairseq_cli":
        if sys.excepthook is not _tell:
            _before = sys.excepthook
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error on standard error; the interpreter goes on to end with exit status 1."""
    refused: BaseException | None = error
    # fairseq's trainer hides what is wrong with a checkpoint behind an exception of no kind
    while type(refused) is Exception:
        refused = refused.__cause__ or refused.__context__
    if not (isinstance(refused, FOR_USERS) and _raised_here(refused.__traceback__)):
        _before(kind, error, trace)
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
