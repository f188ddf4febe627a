"""Errors of this package under fairseq's commands: a sentence without a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).resolve().parents[1]
# what this package raises for what a user can mend
FOR_USERS = (ValueError, FloatingPointError, OSError)


def tell_errors_in_a_sentence() -> None:
    """Let fairseq's commands end with ``error: …`` where this package refuses what a user gave.

    Under any other program, and for errors that were raised elsewhere, tracebacks stay.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    # a console script, or python -m fairseq_cli.train
    if program.name.startswith("fairseq-") or program.parent.name == "fairseq_cli":
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error on standard error; the interpreter goes on to end with exit status 1."""
    refused: BaseException | None = error
    # fairseq's trainer hides what is wrong with a checkpoint behind an exception of no kind
    while type(refused) is Exception:
        refused = refused.__cause__ or refused.__context__
    if not (isinstance(refused, FOR_USERS) and _raised_here(refused.__traceback__)):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    print(f"error: {refused}", file=sys.stderr)


def _raised_here(trace: TracebackType | None) -> bool:
    """Return whether the innermost frame of a traceback is this package's."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename).resolve().is_relative_to(PACKAGE)
