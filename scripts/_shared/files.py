"""Write files atomically: nobody ever sees half a file."""

import json
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


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, with its line ends unchanged."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
