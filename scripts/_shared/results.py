"""What measurements leave behind: tables and plots."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts._shared.files import atomic_write

NO_MATPLOTLIB = (
    "matplotlib, which draws the plot, is not installed: pip install matplotlib, or run `make "
    "set-up` and use the Python of .venv"
)


def check_plotting() -> None:
    """Raise ValueError where no plot could be drawn: before a measurement that takes hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(NO_MATPLOTLIB)


def save_plot(path: Path, draw: Callable[[Any], None]) -> None:
    """Write a PNG, never seen half-written, of what ``draw`` puts into matplotlib axes.

    Raises ValueError when matplotlib is missing.
    """
    check_plotting()
    # only here: a measurement without matplotlib ends with its remedy, not with a traceback
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    draw(figure.add_subplot())
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table in Markdown, its columns aligned for a terminal: the first left, the others right."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def joined(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def padded(line: list[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        return joined([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

    rule = joined(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join([padded(lines[0]), rule, *map(padded, lines[1:])])
