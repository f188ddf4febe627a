"""What a benchmark has measured, as a table in Markdown, a JSON file and a chart."""

import importlib.util
import logging
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmark_contenders import AUTOCAST, FP32, ORIGINAL, OURS, PLAIN
from quickstart import write_atomically
from run_command import short

_MIB = 2**20


@dataclass
class Measurement:
    """What was measured of one contender.

    Args:
        size: preset.
        mode: train or evaluate.
        setting: segment, memory and batch as on the command line.
        model: which one.
        dtype: in which it computes.
        tokens: that a repeat reads.
        floor_seconds: that the matrix products of a repeat alone take.
        peak_bytes: most memory held.
        seconds: of each repeat.
    """

    size: str
    mode: str
    setting: str
    model: str
    dtype: str
    tokens: int
    floor_seconds: float
    peak_bytes: int
    seconds: list[float] = field(default_factory=list)

    def rate(self, choose: Callable[[Iterable[float]], float] = statistics.median) -> float:
        """Tokens a second of the median repeat; of the slowest with max, the fastest with min."""
        return self.tokens / choose(self.seconds)

    @property
    def of_the_arithmetic(self) -> float:
        """Time that the matrix products take of the median repeat's, as a fraction."""
        return self.floor_seconds / statistics.median(self.seconds)


def rivals(measurements: list[Measurement]) -> dict[str, tuple[str, str | None]]:
    """Columns of speed ratios: title to model and dtype, None for the dtype of the row itself."""
    columns = {
        f"times {PLAIN}": (PLAIN, None),
        f"times {ORIGINAL} {FP32}": (ORIGINAL, FP32),
        f"times {ORIGINAL} {AUTOCAST}": (ORIGINAL, AUTOCAST),
    }
    present = {(m.model, dtype) for m in measurements for dtype in (m.dtype, None)}
    return {title: rival for title, rival in columns.items() if rival in present}


def speed_ratio(
    measurements: list[Measurement], row: Measurement, model: str, dtype: str | None
) -> float | None:
    """How many times as fast as a rival transformer_xl is; None where there is nothing to compare.

    An fp32 model is compared with the original in fp32 only.
    """
    if row.model != OURS or (row.dtype == FP32 and dtype == AUTOCAST):
        return None
    for other in measurements:
        same = (other.size, other.mode, other.setting) == (row.size, row.mode, row.setting)
        if same and other.model == model and other.dtype == (dtype or row.dtype):
            return row.rate() / other.rate()
    return None


def markdown_table(measurements: list[Measurement]) -> str:
    """A row for each measurement."""
    columns = rivals(measurements)
    titles = ["size", "mode", "setting", "model", "dtype", "tokens/s (lowest to highest)"]
    titles += ["of the arithmetic", *columns, "peak memory, MiB"]
    lines = [titles, ["---"] * len(titles)]
    for row in measurements:
        speeds = f"{row.rate():,.0f} ({row.rate(max):,.0f} to {row.rate(min):,.0f})"
        cells = [row.size, row.mode, row.setting, row.model, row.dtype, speeds]
        cells.append(f"{row.of_the_arithmetic:.0%}")
        for rival in columns.values():
            ratio = speed_ratio(measurements, row, *rival)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append([*cells, f"{row.peak_bytes / _MIB:,.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_output(folder: Path) -> None:
    """Make the folder of --output.

    Raises ValueError when it cannot be made, or no chart can be drawn.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"--output {short(folder)} gets a chart, for which matplotlib is missing: install it, "
            "`python -m pip install matplotlib`, or leave --output out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {short(folder)} cannot be written ({error.strerror}): "
            "give a folder in a place where you may write"
        ) from error


def draw_chart(measurements: list[Measurement], path: Path) -> None:
    """Draw bars of tokens a second, a panel for each size and setting, as a PNG file."""
    # fairseq, once imported, has every library log each of its steps
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # only who asks for a chart needs matplotlib
    from matplotlib.figure import Figure

    panels: dict[str, list[Measurement]] = {}
    for row in measurements:
        panels.setdefault(f"{row.size}, {row.mode} {row.setting}", []).append(row)
    models = [OURS, PLAIN, ORIGINAL]
    heights = [len(rows) + 1 for rows in panels.values()]
    figure = Figure(figsize=(9, 0.4 * sum(heights) + 0.6 * len(heights)), layout="constrained")
    axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        rates = [row.rate() for row in rows]
        below = [rate - row.rate(max) for rate, row in zip(rates, rows, strict=True)]
        above = [row.rate(min) - rate for rate, row in zip(rates, rows, strict=True)]
        axis.barh(
            [f"{row.model} {row.dtype}" for row in rows],
            rates,
            xerr=[below, above],
            color=[f"C{models.index(row.model)}" for row in rows],
        )
        axis.invert_yaxis()
        axis.set_title(title)
        axis.set_xlabel("tokens a second")
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=150)
    os.replace(temporary, path)


def write_report(folder: Path, measurements: list[Measurement], circumstances: dict) -> None:
    """Write benchmark.json, with the circumstances beside the measurements, and benchmark.png."""
    rows = []
    for row in measurements:
        ratios = {
            title: speed_ratio(measurements, row, *rival)
            for title, rival in rivals(measurements).items()
        }
        rows.append(
            {
                **asdict(row),
                "tokens_per_second": row.rate(),
                "of_the_arithmetic": row.of_the_arithmetic,
                **{title: ratio for title, ratio in ratios.items() if ratio is not None},
            }
        )
    write_atomically(folder / "benchmark.json", {**circumstances, "measurements": rows})
    draw_chart(measurements, folder / "benchmark.png")
