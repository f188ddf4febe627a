"""What a benchmark has measured, as a table in Markdown, a JSON file and a chart."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from scripts._shared.results import markdown_table

DTYPES = FP32, BF16, AUTOCAST = ("fp32", "bf16", "bf16-autocast")
ORIGINAL = "original"
MIB = 2**20


class Models(NamedTuple):
    """Names of the models of a benchmark: this package's, the plain one, the published code's."""

    ours: str
    plain: str
    original: str = ORIGINAL


class Entry(NamedTuple):
    """What a benchmark measures: one of its models in one of DTYPES."""

    model: str
    dtype: str


@dataclass
class Measurement:
    """What was measured of one entry: a row of the table.

    Args:
        size: preset or case.
        mode: what it did, such as train or evaluate.
        setting: what it read.
        model: which one.
        dtype: in which it computes.
        tokens: that a repeat reads.
        floor_seconds: that the matrix products of a repeat alone take.
        peak_bytes: most memory held; 0 where it was not measured.
        seconds: of each repeat.
    """

    size: str
    mode: str
    setting: str
    model: str
    dtype: str
    tokens: int
    floor_seconds: float
    peak_bytes: int = 0
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
        rows: the measurements.
        models: that are compared, ours first.
        size_title: what a measurement's size is called.
    """

    rows: list[Measurement]
    models: tuple[str, ...]
    size_title: str

    def rivals(self) -> dict[str, tuple[tuple[str, ...], str | None]]:
        """Columns of speed ratios: title to models, of which the fastest counts, and their dtype.

        None stands for the dtype of the row.
        """
        _, plain, original = self.models
        columns = {f"times {plain}": ((plain,), None)}
        return columns | {f"times {original} {of}": ((original,), of) for of in (FP32, AUTOCAST)}

    def ratios(self, row: Measurement) -> dict[str, float | None]:
        """How many times as fast as each rival ours is; None where there is nothing to compare.

        An fp32 model is compared with the original in fp32 only.
        """
        ratios = {}
        for title, (models, dtype) in self.rivals().items():
            rivals = [other for other in self.rows if other.model in models]
            if not any(dtype in (None, other.dtype) for other in rivals):
                continue
            same = [
                row.rate() / other.rate()
                for other in rivals
                if (other.size, other.mode, other.setting) == (row.size, row.mode, row.setting)
                and other.dtype == (dtype or row.dtype)
            ]
            compared = self.is_ours(row) and not (row.dtype == FP32 and dtype == AUTOCAST)
            ratios[title] = min(same, default=None) if compared else None
        return ratios

    def is_ours(self, row: Measurement) -> bool:
        """Whether a measurement is of this package's model, which is compared with its rivals."""
        return row.model == self.models[0]

    def cells(self, row: Measurement) -> dict[str, str]:
        """What the table has of a measurement before the ratios, by title."""
        return {
            self.size_title: row.size,
            "mode": row.mode,
            "setting": row.setting,
            "model": row.model,
            "dtype": row.dtype,
            "tokens/s (lowest to highest)": (
                f"{row.rate():,.0f} ({row.rate(max):,.0f} to {row.rate(min):,.0f})"
            ),
            "% of peak": f"{row.of_peak:.0%}",
        }

    def memory_cells(self, row: Measurement) -> dict[str, str]:
        """What the table has of a measurement after the ratios, by title."""
        measured = any(other.peak_bytes for other in self.rows)
        return {"peak memory, MiB": f"{row.peak_bytes / MIB:,.0f}"} if measured else {}

    def table(self) -> str:
        """A row for each measurement, in Markdown."""
        lines = []
        for row in self.rows:
            ratios = {of: f"{ratio:.2f}" if ratio else "" for of, ratio in self.ratios(row).items()}
            lines.append(self.cells(row) | ratios | self.memory_cells(row))
        return markdown_table(list(lines[0]), [list(line.values()) for line in lines])

    def texts(self) -> list[str]:
        """What stands above the explanation: the table."""
        return [self.table()]

    def draw(self, axes: Any) -> None:
        """Draw bars of tokens a second, a panel for each size and setting, in place of axes."""
        panels: dict[str, list[Measurement]] = {}
        for row in self.rows:
            panels.setdefault(f"{row.size}, {row.mode} {row.setting}", []).append(row)
        heights = [len(rows) + 1 for rows in panels.values()]
        figure = axes.figure
        axes.remove()
        figure.set_size_inches(9, 0.4 * sum(heights) + 0.6 * len(heights))
        panes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
        for pane, (title, rows) in zip(panes, panels.items(), strict=True):
            rates, names = (
                [row.rate() for row in rows],
                [f"{row.model} {row.dtype}" for row in rows],
            )
            below = [row.rate() - row.rate(max) for row in rows]
            above = [row.rate(min) - row.rate() for row in rows]
            colors = [f"C{self.models.index(row.model)}" for row in rows]
            pane.barh(names, rates, xerr=[below, above], color=colors)
            pane.invert_yaxis()
            pane.set_title(title)
            pane.set_xlabel("tokens a second")

    def content(self, circumstances: dict) -> dict:
        """What benchmark.json has: the circumstances, and the measurements.

        The circumstances are ``hardware``, ``steps`` (repeats), ``multiply_adds_per_second`` by
        dtype, ``left_out`` (why entries took no part), ``largest_difference_fp32`` by case and, of
        product-key memories, ``copied_bytes_per_second``. Each of ``measurements`` has the fields
        of a Measurement, ``tokens_per_second`` of the median repeat, ``of_peak`` and, of ours, the
        ratio of speeds for each rival that there is, by its title in the table, such as
        ``times original fp32``.
        """
        measurements = [
            {
                **asdict(row),
                "tokens_per_second": row.rate(),
                "of_peak": row.of_peak,
                **{title: ratio for title, ratio in self.ratios(row).items() if ratio},
            }
            for row in self.rows
        ]
        return {**circumstances, "measurements": measurements}
