"""One table of trainings: what their logs and evaluations say."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from scripts._shared.results import markdown_table

Figures = dict[str, Any]


def read_log(path: Path) -> list[Figures]:
    """Return the figures of each line in JSON of a log of fairseq-train."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line[line.index('{"') :]) for line in lines if re.search(r'\{".*\}$', line)]


def in_unit(bits: float, unit: str) -> str:
    """Return a loss in bits a symbol as the unit of the data has it."""
    return f"{bits:.4f} bits" if unit in ("characters", "bytes") else f"{2**bits:.2f} ppl"


def validations(log: list[Figures]) -> list[tuple[int, float, float]]:
    """Return updates, loss in bits, and minutes of training so far, of each validation."""
    seconds, rows = 0.0, []
    for figures in log:
        seconds = float(figures.get("wall", figures.get("train_wall_total", seconds)))
        if "valid_num_updates" in figures:
            bits = figures.get("valid_nll_loss", figures["valid_loss"])
            rows.append((int(figures["valid_num_updates"]), float(bits), seconds / 60))
    return rows


def data_unit(folder: Path) -> str:
    """Return the unit of the data that a training read, from the record of its command."""
    data = (folder / "train.done").read_text("utf-8").split()[1]
    path = Path(data) / "units.json"
    return json.loads(path.read_text("utf-8"))["unit"] if path.exists() else "words"


def test_results(folder: Path, unit: str) -> str:
    """Return the result of the evaluation: BLEU by folder, or the loss in the unit of the data."""
    scores = {
        path.parent.name: json.loads(path.read_text("utf-8"))
        for path in folder.glob("*/scores.json")
    }
    if scores:
        return ", ".join(
            f"{name} {s['detokenized']['score']:.1f}" for name, s in sorted(scores.items())
        )
    log = folder / "evaluate.log"
    losses = (
        re.findall(r"Loss \(base 2\): ([\d.]+)", log.read_text("utf-8")) if log.exists() else []
    )
    return in_unit(float(losses[-1]), unit) if losses else ""


def results_table(output: Path, loss: str | None = None) -> str:
    """Return a table of the trainings in OUT/PAPER/NAME/SEED, or in any folders below.

    ``loss`` (--to-reach) is a validation loss in bits a symbol: when a training first had it.
    """
    if not output.is_dir():
        raise ValueError(f"there is no folder {output}: name the OUT of trainings")
    try:
        to_reach = None if loss is None else float(loss)
    except ValueError as error:
        raise ValueError(f"--to-reach is {loss}: give a loss in bits, such as 2.69") from error
    heads = ["recipe", "seed", "updates", "lowest validation loss", "test loss or BLEU"]
    heads += ["tokens/s", "minutes"]
    if to_reach is not None:
        heads += [f"updates to {to_reach} bits", "minutes to it"]
    rows = []
    for path in sorted(output.rglob("train.done")):
        folder, log = path.parent, read_log(path.with_name("train.log"))
        unit, checks = data_unit(folder), validations(log)
        speeds = [float(figures["wps"]) for figures in log if "wps" in figures][1:]
        seconds = [float(figures["wall"]) for figures in log if "wall" in figures]
        updates = [int(figures["num_updates"]) for figures in log if "num_updates" in figures]
        updates += [check[0] for check in checks]
        lowest = min((bits for _, bits, _ in checks), default=None)
        row = [str(folder.relative_to(output).parent), folder.name, f"{max(updates, default=0):,}"]
        row += ["" if lowest is None else in_unit(lowest, unit), test_results(folder, unit)]
        row += [f"{statistics.median(speeds):,.0f}" if speeds else ""]
        row += [f"{seconds[-1] / 60:.1f}" if seconds else ""]
        if to_reach is not None:
            reached = [check for check in checks if check[1] <= to_reach][:1]
            row += [f"{reached[0][0]:,}", f"{reached[0][2]:.1f}"] if reached else ["never", ""]
        rows.append(row)
    if not rows:
        raise ValueError(f"{output} has no finished trainings of recipes: train some with --seeds")
    return markdown_table(heads, rows)
