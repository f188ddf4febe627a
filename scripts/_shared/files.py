"""Files that are written whole or not at all: nobody ever sees half of one."""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` afterwards; when that fails, nothing of it is left.

    That is a place of this process alone: a killed run's child may write the same file still. What
    ended processes left is removed.
    """
    name = f"{path.name}.partial-"
    for left in path.parent.glob(f"{glob.escape(name)}*"):
        number = left.name.removeprefix(name)
        if number.isdecimal() and not _lives(int(number)):
            with suppress(OSError):
                left.unlink()
    partial = path.with_name(f"{name}{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _lives(process: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # another user's
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, its lines ended as they are."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
