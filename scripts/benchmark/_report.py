"""What a benchmark has measured, as a table in Markdown, a JSON file and a chart."""

import importlib.util
import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts._shared.commands import short
from scripts._shared.files import atomic_write, write_json
from scripts.benchmark._baselines import AUTOCAST, FP32, Models

_MIB = 2**20


@dataclass
class Measurement:
    """What was measured of one entry.

    Args:
        size: preset or case.
        mode: train or evaluate.
        setting: segment, memory and batch.
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
    def of_peak(self) -> float:
        """Time that the matrix products take of the median repeat's, as a fraction."""
        return self.floor_seconds / statistics.median(self.seconds)


@dataclass
class Report:
    """What a benchmark has measured, for its readers.

    Args:
        measurements: in the order of the rows.
        models: that it compares.
        size_title: what a measurement's size is called.
    """

    measurements: list[Measurement]
    models: Models
    size_title: str

    def rivals(self) -> dict[str, tuple[str, str | None]]:
        """Columns of speed ratios: title to model and dtype, None for the dtype of the row."""
        _, plain, original = self.models
        columns = {
            f"times {plain}": (plain, None),
            f"times {original} {FP32}": (original, FP32),
            f"times {original} {AUTOCAST}": (original, AUTOCAST),
        }
        present = {(m.model, dtype) for m in self.measurements for dtype in (m.dtype, None)}
        return {title: rival for title, rival in columns.items() if rival in present}

    def speed_ratio(self, row: Measurement, model: str, dtype: str | None) -> float | None:
        """How many times as fast as a rival ours is; None where there is nothing to compare.

        An fp32 model is compared with the original in fp32 only.
        """
        if row.model != self.models.ours or (row.dtype == FP32 and dtype == AUTOCAST):
            return None
        for other in self.measurements:
            same = (other.size, other.mode, other.setting) == (row.size, row.mode, row.setting)
            if same and other.model == model and other.dtype == (dtype or row.dtype):
                return row.rate() / other.rate()
        return None

    def table(self) -> str:
        """A row for each measurement, in Markdown."""
        columns = self.rivals()
        titles = [self.size_title, "mode", "setting", "model", "dtype"]
        titles += ["tokens/s (lowest to highest)", "% of peak", *columns]
        with_memory = any(row.peak_bytes for row in self.measurements)
        titles += ["peak memory, MiB"] * with_memory
        lines = [titles, ["---"] * len(titles)]
        for row in self.measurements:
            speeds = f"{row.rate():,.0f} ({row.rate(max):,.0f} to {row.rate(min):,.0f})"
            cells = [row.size, row.mode, row.setting, row.model, row.dtype, speeds]
            cells.append(f"{row.of_peak:.0%}")
            for rival in columns.values():
                ratio = self.speed_ratio(row, *rival)
                cells.append("" if ratio is None else f"{ratio:.2f}")
            lines.append(cells + [f"{row.peak_bytes / _MIB:,.0f}"] * with_memory)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def draw_chart(self, path: Path) -> None:
        """Draw bars of tokens a second, a panel for each size and setting, as a PNG file."""
        # fairseq, once imported, has every library log each of its steps
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        # only who asks for a chart needs matplotlib
        from matplotlib.figure import Figure

        panels: dict[str, list[Measurement]] = {}
        for row in self.measurements:
            panels.setdefault(f"{row.size}, {row.mode} {row.setting}", []).append(row)
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
                color=[f"C{self.models.index(row.model)}" for row in rows],
            )
            axis.invert_yaxis()
            axis.set_title(title)
            axis.set_xlabel("tokens a second")
        with atomic_write(path) as partial:
            figure.savefig(partial, format="png", dpi=150)

    def write(self, folder: Path, circumstances: dict) -> None:
        """Write benchmark.json, circumstances beside the measurements, and benchmark.png."""
        rows = []
        for row in self.measurements:
            ratios = {
                title: self.speed_ratio(row, *rival) for title, rival in self.rivals().items()
            }
            rows.append(
                {
                    **asdict(row),
                    "tokens_per_second": row.rate(),
                    "of_peak": row.of_peak,
                    **{title: ratio for title, ratio in ratios.items() if ratio is not None},
                }
            )
        write_json(folder / "benchmark.json", {**circumstances, "measurements": rows})
        self.draw_chart(folder / "benchmark.png")


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
