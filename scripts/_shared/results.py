"""Results of measurements: a table, a JSON file and a plot."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from scripts._shared.commands import short
from scripts._shared.files import atomic_write, write_json


def prepare_results(output: Path) -> None:
    """Make the --output folder and import what draws plots, before hours of measurement."""
    import matplotlib.figure  # noqa: F401

    output.mkdir(parents=True, exist_ok=True)


def save_results(
    output: Path, name: str, content: Any, summary: str, draw: Callable[..., None], columns: int = 1
) -> None:
    """Write NAME.json with the content and NAME.png as drawn into a folder; print ``summary``."""
    write_json(output / f"{name}.json", content)
    print(summary)
    save_plot(output / f"{name}.png", draw, columns)
    print(f"written to {short(output.resolve())}/{name}.json and .png")


def save_plot(path: Path, draw: Callable[..., None], columns: int = 1) -> None:
    """Write a PNG; ``draw`` gets one matplotlib Axes for each column."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 if columns == 1 else 5 * columns, 4.5), layout="constrained")
    draw(*(figure.add_subplot(1, columns, column + 1) for column in range(columns)))
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded for a terminal: first column left-aligned, others right.

    Short rows are filled up with empty cells.
    """
    sides = ["left", *["right"] * (len(headers) - 1)]
    # disable_numparse: leave cells that look like numbers unchanged
    return tabulate(rows, headers, tablefmt="pipe", colalign=sides, disable_numparse=True)
