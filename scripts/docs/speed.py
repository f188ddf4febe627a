"""Draw docs/speed.png from docs/speed.json, the figures of docs/speed.md in short.

    python -m scripts.docs.speed

Each row of speed.json has what was timed, beside what, and how many times as fast it is.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import ROOT, short
from scripts._shared.results import save_plot

RECORD = ROOT / "docs" / "speed.json"
PICTURE = ROOT / "docs" / "speed.png"
MODES = ("training", "evaluation")


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw a bar for each row and mode, from how many times as fast ours is."""
    height = 0.8 / len(MODES)
    for place, mode in enumerate(MODES):
        positions = [number + (place - 0.5) * height for number in range(len(rows))]
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
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE, help=f"picture ({short(PICTURE)})")
    output = parser.parse_args(arguments).output.resolve()
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return exit_status(lambda: save_plot(output, lambda axes: draw(axes, rows)), output=output)


if __name__ == "__main__":
    sys.exit(main())
