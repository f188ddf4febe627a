"""Command lines: the parser, shared options, and the exit status."""

import argparse
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from scripts._shared.commands import name_commands, short


class NamedFile(NamedTuple):
    """A checkpoint or a log, with its label in tables and plots."""

    label: str
    path: Path


def command_parser(description: str) -> argparse.ArgumentParser:
    """Return a command's parser, given its module's docstring, which has ``python -m …`` in it."""
    return argparse.ArgumentParser(
        prog=name_commands(re.search(r"python -m scripts\.[\w.]+", description)[0]),
        description=name_commands(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_text_options(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the options for the text, the models that score it, the device and the results.

    ``parse_named_files`` parses the values of --checkpoint.
    """
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder that fairseq-preprocess wrote")
    text = "models to compare, with their labels in tables and plots"
    several = {"nargs": "+", "action": "extend", "required": True, "metavar": "[LABEL=]PATH"}
    add("--checkpoint", help=text, **several)
    add("--split", default="test", help="part of the data to score (test)")
    add("--cpu", action="store_true", help="use no GPU")
    add("--output", type=Path, default=Path(output), help=f"folder ({output})")


def parse_named_files(option: str, words: list[str]) -> list[NamedFile]:
    """Return the files that the values of an option name; the default label is the path."""
    files = []
    for word in words:
        label, equals, path = word.partition("=")
        if not equals or Path(word).exists():
            label, path = word, word
        files.append(NamedFile(label, Path(path).resolve()))
    labels = [file.label for file in files]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"{option} has {label!r} more than once: give each a label of its own, LABEL=PATH"
            )
    return files


def parse_numbers(option: str, text: str, minimum: int) -> list[int]:
    """Parse a comma-separated list; return distinct numbers from ``minimum`` on, sorted."""
    numbers: list[int] = []
    with suppress(ValueError):
        numbers = sorted({int(word) for word in text.split(",")})
    if not numbers or numbers[0] < minimum:
        raise ValueError(
            f"{option} is {text!r}: give numbers of at least {minimum} with commas between them, "
            "no spaces"
        )
    return numbers


def check_at_least(minimum: int, **options: int | None) -> None:
    """Raise ValueError if an option, ``batch_size`` for --batch-size, is given and too small."""
    for name, value in options.items():
        if value is not None and value < minimum:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {value}: it must be at least {minimum}")


def exit_status(
    work: Callable[[], Any],
    interrupted: str = "run the same command again",
    output: Path | None = None,
) -> int:
    """Do the work of a command and return its exit status; print errors as one sentence.

    Args:
        work: function that does the work; raises ValueError for problems that the user can fix.
        interrupted: message after Ctrl-C: what was kept, how to continue.
        output: --output, named in messages for OSError; a new folder that stays empty is removed.
    """
    # Let kill, timeout and a closed terminal end a command as Ctrl-C does. Leave signals that are
    # ignored already: nohup ignores SIGHUP.
    stop_signals = (signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in stop_signals if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, signal.default_int_handler)
    # importing fairseq, even during the work, lets the debugging messages of all libraries through;
    # its data loader warns on machines without a GPU
    is_new = output is not None and not output.exists()
    previously_disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
            work()
    except KeyboardInterrupt:
        print(f"\ninterrupted; {interrupted}", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"error: {error}: pip install it, or use .venv (make set-up)", file=sys.stderr)
        return 1
    except OSError as error:
        prefix = f"--output {short(output)}: " if output else ""
        remedy = "make room, or give a folder where you may read and write"
        print(f"error: {prefix}{error}: {remedy}", file=sys.stderr)
        return 1
    finally:
        if is_new:
            with suppress(OSError):
                output.rmdir()
        logging.disable(previously_disabled)
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
    return 0
