"""Draw how many times as fast this package's models are.

    python -m benchmarks.plot [RECORD] [--output PICTURE]

RECORD is docs/speed.json, a summary of docs/speed.md, or the benchmark.json of a run. Its rows have
our model, the model that it is compared with, and how many times as fast ours is.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import FP32, MODES, PUBLISHED, Case, Row
from scripts._shared.command_line import exit_status
from scripts._shared.commands import ROOT
from scripts._shared.results import save_plot

RECORD, PICTURE = ROOT / "docs" / "speed.json", ROOT / "docs" / "speed.png"


def summarise(cases: Iterable[Case], rows: list[Row]) -> list[dict[str, Any]]:
    """Return how many times as fast ours is in fp32 as the published code, or as the last model.

    Each title gets one row if both of its modes were measured.
    """
    summary: dict[str, dict[str, Any]] = {}
    for case in cases:
        measured = [
            row
            for row in rows
            if (row.paper, row.case, row.mode) == (case.paper, case.name, case.mode)
            and row.dtype == FP32
            and row.times
        ]
        published = [row for row in measured if row.model.startswith(PUBLISHED)]
        if case.title and measured:
            rival = min(published, key=lambda row: row.times) if published else measured[-1]
            row = summary.setdefault(case.title, {"model": case.title})
            row |= {"rival": rival.model, case.mode: round(rival.times, 2)}
    return [row for row in summary.values() if all(mode in row for mode in MODES)]


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw a bar for each row and mode: how many times as fast ours is."""
    height = 0.8 / len(MODES)
    for index, mode in enumerate(MODES):
        positions = [number + (index - 0.5) * height for number in range(len(rows))]
        bars = axes.barh(positions, [row[mode] for row in rows], height, label=mode)
        axes.bar_label(bars, fmt=" %g", fontsize="small")
    names = [f"{row['model']}\nbeside {row['rival']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("times as fast (1: what it is compared with)")
    axes.margins(x=0.1)
    axes.legend(loc="lower right", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.set_size_inches(8, 0.75 * len(rows) + 0.7)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("record", nargs="?", type=Path, default=RECORD)
    parser.add_argument("--output", type=Path, default=PICTURE, help="docs/speed.png")
    parsed = parser.parse_args(arguments)

    def work() -> None:
        content = json.loads(parsed.record.read_text(encoding="utf-8"))
        rows = content["summary"] if isinstance(content, dict) else content
        save_plot(parsed.output, lambda axes: draw(axes, rows))

    return exit_status(work, output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
