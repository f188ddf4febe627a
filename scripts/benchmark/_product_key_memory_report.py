"""What a benchmark of product-key memories has measured, as a table, a JSON file and a chart."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmark._product_key_memory_baselines import (
    FIXED,
    FIXED_SEARCHED,
    INFERENCE,
    MODELS,
    TRAINING_STEP,
)
from scripts.benchmark._report import Measurement, Report

BETTER = "the better EmbeddingBag"
MIB = 2**20


@dataclass
class MemoryMeasurement(Measurement):
    """What was measured of a entry in one part of a step, which is its mode.

    Args:
        moved_bytes: that the part must move at least.
        copy_seconds: that moving them takes.
        largest_bytes: of the largest tensor allocated in a training step.
        table_bytes: of the values.
    """

    moved_bytes: int = 0
    copy_seconds: float = 0.0
    largest_bytes: int = 0
    table_bytes: int = 0


class MemoryReport(Report):
    """What was measured of memories; its size is the number of slots."""

    def rivals(self) -> dict[str, tuple[str, str | None]]:
        """Columns of speed ratios, with the better of the plainly written memories as one."""
        present = {row.model for row in self.measurements}
        chosen = [BETTER] if present & {MODELS.dense, MODELS.sparse} else []
        chosen += present & {MODELS.feed_forward}
        return {f"times {model}": (model, None) for model in chosen}

    def speed_ratio(self, row: Measurement, model: str, dtype: str | None) -> float | None:
        """How many times as fast as a rival ours is; None where there is nothing to compare."""
        rivals = (MODELS.dense, MODELS.sparse) if model == BETTER else (model,)
        ratio_to = super().speed_ratio
        ratios = [ratio_to(row, rival, dtype) for rival in rivals]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    def table(self) -> str:
        """A row for each measurement, in Markdown."""
        columns = self.rivals()
        titles = ["slots", "setting", "part", "model", "dtype", "ms (fastest to slowest)"]
        titles += ["tokens/s", "arithmetic, ms", "copying, ms", *columns]
        titles += ["peak memory, MiB", "largest tensor / table, MiB"]
        lines = [titles, ["---"] * len(titles)]
        for row in self.measurements:
            median, low, high = (
                f"{1000 * choose(row.seconds):,.2f}" for choose in (statistics.median, min, max)
            )
            cells = [row.size, row.setting, row.mode, row.model, row.dtype]
            cells += [f"{median} ({low} to {high})", f"{row.rate():,.0f}"]
            cells += [f"{1000 * row.floor_seconds:,.2f}", f"{1000 * row.copy_seconds:,.2f}"]
            for rival in columns.values():
                ratio = self.speed_ratio(row, *rival)
                cells.append("" if ratio is None else f"{ratio:.2f}")
            sizes = f"{row.largest_bytes / MIB:,.1f} / {row.table_bytes / MIB:,.1f}"
            measured = row.peak_bytes > 0
            cells += [f"{row.peak_bytes / MIB:,.0f}", sizes] if measured else ["", ""]
            lines.append(cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def tables(self) -> list[str]:
        """The table of real searches, and that of fixed rows with how times grow."""
        kinds = [
            [row for row in self.measurements if (row.mode in (FIXED, FIXED_SEARCHED)) == fixed]
            for fixed in (False, True)
        ]
        reports = [MemoryReport(rows, self.models, self.size_title) for rows in kinds]
        real, fixed = ([report.table()] if report.measurements else [] for report in reports)
        growth = "\n".join(reports[1].growth())
        return real + fixed + ([growth] if growth else [])

    def warnings(self) -> list[str]:
        """Where a training step of ours allocates a tensor as large as the table."""
        return [
            f"warning: a tensor of a training step of {row.model} is as large as the table, "
            f"{row.size} slots, {row.setting}, {row.dtype}"
            for row in self.measurements
            if row.model == self.models.ours
            and row.peak_bytes
            and row.largest_bytes >= row.table_bytes
        ]

    def growth(self) -> list[str]:
        """Of each entry, how its time grows from the smallest table to the largest."""
        series: dict[tuple[str, ...], list[Measurement]] = {}
        for row in self.measurements:
            series.setdefault((row.mode, row.setting, row.model, row.dtype), []).append(row)
        lines = []
        for (mode, setting, model, dtype), rows in series.items():
            few, many = (choose(rows, key=lambda row: int(row.size)) for choose in (min, max))
            if few is not many:
                lines.append(
                    f"{mode}, {setting}, {model} {dtype}: {many.size} slots take "
                    f"{few.rate() / many.rate():.2f} times as long as {few.size}"
                )
        return lines

    def draw_chart(self, path: Path) -> None:
        """Draw bars of whole steps, or of what there is where there are none, as a PNG file."""
        whole = [row for row in self.measurements if row.mode in (TRAINING_STEP, INFERENCE)]
        Report(whole or self.measurements, self.models, self.size_title).draw_chart(path)
