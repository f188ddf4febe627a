"""Command lines: the parser, options that several commands share, and how a command ends."""

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

from scripts._shared.commands import short


class NamedFile(NamedTuple):
    """A checkpoint or a log, and what tables and plots call it."""

    label: str
    path: Path


def command_parser(description: str) -> argparse.ArgumentParser:
    """Parser of a command whose module has this docstring, with ``python -m …`` in it as usage."""
    return argparse.ArgumentParser(
        prog=re.search(r"python -m scripts\.[\w.]+", description)[0],
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_text_options(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the options that say which models score which text, where, and where results go."""
    text = "folder that fairseq-preprocess wrote"
    parser.add_argument("--data", type=Path, required=True, help=text)
    add_named_files(parser, "--checkpoint", "models")
    parser.add_argument("--split", default="test", help="part of the data to score (test)")
    add_output_options(parser, output)


def add_named_files(parser: argparse.ArgumentParser, option: str, things: str) -> None:
    """Add the option that says which things are compared; parse_named_files reads its words."""
    help_text = f"{things} to compare, with what they are called in tables and plots"
    add = parser.add_argument
    add(option, nargs="+", action="extend", required=True, metavar="[LABEL=]PATH", help=help_text)


def add_output_options(parser: argparse.ArgumentParser, output: str, device: bool = True) -> None:
    """Add the option that says where results go, and that for where to compute."""
    if device:
        parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"folder ({output})")


def parse_named_files(option: str, words: list[str]) -> list[NamedFile]:
    """Files that the words of an option name; one without a label is called by its path."""
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


def parse_numbers(option: str, text: str, kind: type, least: float, most: float) -> list:
    """Rising, different numbers, at least ``least`` and at most ``most``, of an option's list."""
    numbers = []
    with suppress(ValueError):
        numbers = sorted({kind(word) for word in text.split(",")})
    if not numbers or not all(least <= number <= most for number in numbers):
        bounds = f"at least {least}" if most == float("inf") else f"from {least} to {most}"
        raise ValueError(
            f"{option} is {text!r}: give numbers {bounds} with commas between them, no spaces"
        )
    return numbers


def check_at_least(least: int, **options: int | None) -> None:
    """Raise ValueError for an option, ``batch_size`` for --batch-size, that is given and less."""
    for name, value in options.items():
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {value}: it must be at least {least}")


def exit_status(
    work: Callable[[], Any],
    interrupted: str = "run the same command again",
    output: Path | None = None,
) -> int:
    """Exit status of a command after its work; prints in a sentence what went wrong.

    Args:
        work: raises ValueError when something is in the way.
        interrupted: what is left after Ctrl-C and how to go on.
        output: --output, named when nothing can be written there.
    """
    # kill, timeout and a closed terminal end a command as Ctrl-C does, with its children; nohup
    # has set the last of them aside
    ends = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in ends if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    # fairseq's imports let every message of every library through, and its loader of batches
    # warns on machines without a GPU
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.WARNING)
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
    except OSError as error:
        place = f"--output {short(output)}: " if output else ""
        remedy = "make room, or give a folder where you may read and write"
        print(f"error: {place}{error}: {remedy}", file=sys.stderr)
        return 1
    finally:
        root.setLevel(before)
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
    return 0


def make_output_folder(output: Path) -> None:
    """Make the folder of --output; raises ValueError when it cannot be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {short(output)} cannot be written ({error.strerror}): "
            "give a folder in a place where you may write"
        ) from error
