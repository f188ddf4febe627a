"""Write files atomically: nobody ever sees half a file."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` after the block; remove it after an error."""
    # a fixed name: the next run overwrites what a killed run left
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to; it becomes ``output`` when it is complete."""
    # with the process id: a child of a killed run may still write to that run's folder
    partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
    for abandoned in output.parent.glob(f"{output.name}.partial-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, with its line ends unchanged."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
