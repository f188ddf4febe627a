"""Speed and memory of product-key memories by slots, heads, k and tokens: a part of `make bench`.

    python -m scripts.benchmark.product_key_memory [--quick] [--original PATH] [--output FOLDER]

Beside a memory stand the times that its least arithmetic and its least copying would take at the
rates measured on this machine, the feed-forward sublayer that it replaces, the same memory written
plainly with nn.EmbeddingBag, and, with --original, the published code with the same weights: with a
dense gradient and Adam, and with a sparse one and SparseAdam. All read the same tokens, and they
take turns: A B C A B C.

Shapes: N tokens, H heads, k slots read by a head, K slots, n = √K sub-keys of each half, R = H·k
reads of a token, U rows of values that are read at least once, d model width, d_q query width.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from scripts._shared.machine import copy_rate, free_memory
from scripts.benchmark._benchmark import Benchmark, add_choices, parse_names, parse_number
from scripts.benchmark._memory_layers import (
    FIXED,
    FIXED_ROWS,
    FIXED_SEARCHED,
    INFERENCE,
    MODELS,
    QUERY_WIDTH,
    SEARCH,
    STEP,
    TRAINING_STEP,
    WIDTH,
    MemoryCase,
    SteppedLayer,
    build_layers,
    costs,
    draw_fixed_slots,
    state_bytes,
    step_memory,
)
from scripts.benchmark._original import MEMORY
from scripts.benchmark._report import FP32, MIB, Entry, Measurement, Report

# Part of the tokens that must read the same slots: of two all but equal scores either may be last.
SAME_SLOTS = 0.99
GIB = 2**30

MODES = TRAIN, INFER, FIND, FIX = ("train", "inference", "search", "fixed-rows")
STEPS = (SteppedLayer.forward, SteppedLayer.backward, SteppedLayer.update)
PARTS: dict[str, dict[str, Callable[[SteppedLayer], object]]] = {
    TRAIN: dict(zip(STEP, STEPS, strict=True)),
    INFER: {INFERENCE: SteppedLayer.infer},
    FIND: {SEARCH: SteppedLayer.search},
}
PUBLISHED = (MODELS.original, MODELS.original_sparse)
BETTER = {
    "the better EmbeddingBag": (MODELS.dense, MODELS.sparse),
    "feed-forward": (MODELS.feed_forward,),
    "the better original": PUBLISHED,
}

EXPLANATION = f"""
Width {WIDTH}, queries of {QUERY_WIDTH}. Setting: heads, slots that a head reads, and tokens, with
slashes between. Search: from the tokens to slots and scores, which is a part of forward; update:
the optimizer's step and clearing the gradients; a training step is forward, backward and update.
Fixed rows: a training step without search in which all reads are of {FIXED_ROWS:,} rows at random
places of the table; searched: the same after a search of which the scores alone are taken; the
published code takes no part in it. Milliseconds: the median repeat of {{steps}}, the fastest and
the slowest. Arithmetic: multiply-adds that must be done, at the rate measured here ({{rates}}
billion a second); copying: bytes that must move, every row once, at the rate measured here
({{copied:,.1f}} billion a second). Times: how many times as fast {MODELS.ours} is, median over
median of the same run. Peak memory: of a process of its own that trains, with the weights, without
the libraries. Largest tensor: that an operation of a training step allocates, beside the table of
values.
Machine: {{hardware}}."""


@dataclass
class MemoryMeasurement(Measurement):
    """What was measured of an entry in one part of a step, which is its mode.

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

    def rivals(self) -> dict[str, tuple[tuple[str, ...], str | None]]:
        """Columns of speed ratios, with the better of two memories as one."""
        return {f"times {name}": (models, None) for name, models in BETTER.items()}

    def cells(self, row: MemoryMeasurement) -> dict[str, str]:
        """What the table has of a measurement before the ratios, by title."""
        median, low, high = (
            f"{1000 * choose(row.seconds):,.2f}" for choose in (statistics.median, min, max)
        )
        return {
            self.size_title: row.size,
            "setting": row.setting,
            "part": row.mode,
            "model": row.model,
            "dtype": row.dtype,
            "ms (fastest to slowest)": f"{median} ({low} to {high})",
            "tokens/s": f"{row.rate():,.0f}",
            "arithmetic, ms": f"{1000 * row.floor_seconds:,.2f}",
            "copying, ms": f"{1000 * row.copy_seconds:,.2f}",
        }

    def memory_cells(self, row: MemoryMeasurement) -> dict[str, str]:
        """What the table has of a measurement after the ratios, by title."""
        sizes = f"{row.largest_bytes / MIB:,.1f} / {row.table_bytes / MIB:,.1f}"
        peak = f"{row.peak_bytes / MIB:,.0f}"
        measured = row.peak_bytes > 0
        return {
            "peak memory, MiB": peak if measured else "",
            "largest tensor / table, MiB": sizes if measured else "",
        }

    def texts(self) -> list[str]:
        """Warnings, the table of real searches, and that of fixed rows with how times grow."""
        of_kind = [
            replace(
                self,
                rows=[row for row in self.rows if (row.mode in (FIXED, FIXED_SEARCHED)) == is_],
            )
            for is_ in (False, True)
        ]
        texts = ["\n".join(self.warnings()), *(kind.rows and kind.table() for kind in of_kind)]
        return [text for text in [*texts, "\n".join(of_kind[1].growth())] if text]

    def warnings(self) -> list[str]:
        """Where a training step of ours allocates a tensor as large as the table."""
        return [
            f"warning: a tensor of a training step of {row.model} is as large as the table, "
            f"{row.size} slots, {row.setting}, {row.dtype}"
            for row in self.rows
            if row.model == self.models.ours
            and row.peak_bytes
            and row.largest_bytes >= row.table_bytes
        ]

    def growth(self) -> list[str]:
        """Of each entry, how its time grows from the smallest table to the largest."""
        series: dict[tuple[str, ...], list[Measurement]] = {}
        for row in self.rows:
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

    def draw(self, axes: Any) -> None:
        """Draw whole steps, or what there is where there are none."""
        whole = [row for row in self.rows if row.mode in (TRAINING_STEP, INFERENCE)]
        Report(whole or self.rows, self.models, self.size_title).draw(axes)


class MemoryBenchmark(Benchmark):
    """Sizes of --slots, --heads, --knn and --tokens, each with each, in modes of --mode."""

    models = MODELS
    published = MEMORY
    size_title = "slots"
    smaller = "smaller --slots"
    explanation = EXPLANATION
    compared = "scores and outputs"
    tolerance = 1e-5
    tests = "tests/scripts/benchmark/test_memory_layers.py"
    report_class = MemoryReport
    quick = "--slots 65536 --tokens 1024 --steps 2"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the sizes and --mode."""
        for option, default, meaning in [
            ("--slots", "16384 65536 262144 1048576", "square numbers"),
            ("--heads", "4", "each reads slots of its own"),
            ("--knn", "32", "slots that a head reads"),
            ("--tokens", "2048", "that a step reads"),
        ]:
            more = {"nargs": "+", "metavar": "N", "help": f"{meaning} ({default})"}
            parser.add_argument(option, default=default.split(), **more)
        add_choices(parser, "--mode", MODES)

    def parse_cases(self, options: argparse.Namespace) -> list[MemoryCase]:
        """Each of the sizes with each."""
        self.modes = parse_names("--mode", options.mode, MODES)
        self.measures_memory = TRAIN in self.modes
        sizes = [
            dict.fromkeys(parse_number(f"--{name}", text) for text in getattr(options, name))
            for name in MemoryCase._fields
        ]
        cases = [MemoryCase(*numbers) for numbers in itertools.product(*sizes)]
        for case in cases:
            root = math.isqrt(case.slots)
            if root**2 != case.slots:
                raise ValueError(
                    f"--slots is {case.slots}: product keys need a square number, such as "
                    f"{root**2} or {(root + 1) ** 2}"
                )
            if case.knn > case.slots:
                raise ValueError(f"--knn is {case.knn}: give at most --slots, {case.slots}")
            if self.original and case.knn > root:
                raise ValueError(
                    f"--knn is {case.knn}: beside --original give at most the root of --slots, "
                    f"{root}"
                )
        return cases

    def own_memory(self, case: MemoryCase, entry: Entry) -> dict[str, int]:
        """Bytes that training adds to this process at most, and of a step's largest tensor."""
        return step_memory(case, entry, self.device, self.original_class)

    @functools.cached_property
    def admitted(self) -> dict[MemoryCase, list[Entry]]:
        """Entries of each case for whose training there is memory; ``left_out`` tells of others.

        Raises ValueError when ours is not among them.
        """
        free = free_memory(self.device)
        admitted: dict[MemoryCase, list[Entry]] = {case: [] for case in self.cases}
        # in this order; dense gradients take the most and come last
        models = [MODELS.ours, MODELS.feed_forward, MODELS.sparse, MODELS.dense]
        models += [MODELS.original_sparse, MODELS.original] if self.original else []
        for case, dtype in itertools.product(self.cases, self.dtypes):
            needed, taken = case.table_bytes(dtype), []
            for model in models:
                trained = {TRAIN, FIX} & set(self.modes)
                more = state_bytes(case, model, dtype) if trained else 0
                if needed + more <= free:
                    needed += more
                    taken.append(Entry(model, dtype))
                    continue
                lack = f"{(needed + more) / GIB:.1f} GiB are needed, {free / GIB:.1f} GiB are free"
                if model == MODELS.ours:
                    raise ValueError(f"--slots is {case.slots} ({dtype}): {lack}: give fewer slots")
                self.left_out.append(
                    f"left out: {model} with {case}, {dtype}: beside the others {lack}"
                )
            admitted[case] += sorted(taken, key=lambda entry: MODELS.index(entry.model))
        return admitted

    def entries(self, case: MemoryCase) -> list[Entry]:
        """Who takes part, one dtype after the other."""
        return self.admitted[case]

    def differences(self, case: MemoryCase) -> dict[str, float]:
        """The largest differences of other memories' scores and outputs from ours in fp32.

        They are infinite where too few tokens read the same slots.
        """
        present = [MODELS.ours, MODELS.dense, MODELS.sparse]
        present += PUBLISHED if self.original else []
        memories = [Entry(model, FP32) for model in present]
        ours, *others = build_layers(case, memories, self.device, self.original_class)
        output, (scores, slots) = ours.infer(), ours.search()
        differences = {}
        for other in others:
            their_scores, their_slots = other.search()
            same = (slots.sort().values == their_slots.sort().values).flatten(1).all(1)
            of_outputs = (output - other.infer())[same]
            off = torch.cat([(scores - their_scores).flatten(), of_outputs.flatten()])
            enough = same.float().mean() >= SAME_SLOTS
            differences[other.entry.model] = off.abs().max().item() if enough else math.inf
        return differences

    def run(self) -> tuple[list[Measurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        self.copied = copy_rate(self.device)
        rows, circumstances = super().run()
        return rows, {**circumstances, "copied_bytes_per_second": self.copied}

    def explain(self) -> str:
        """What stands below the tables."""
        return super().explain(copied=self.copied / 1e9)

    def repeat_seconds(self, case: MemoryCase) -> float:
        """About how long a repeat of all entries takes on two cores, with its layers' drawing."""
        # of rows that are read, and of the table, which dense gradients have whole
        step = 5e-6 * case.reads + 1.2e-5 * case.slots
        parts = {TRAIN: 2.0 if self.original else 1.0, INFER: 0.1, FIND: 0.1, FIX: 2.0}
        return len(self.dtypes) * step * sum(parts[mode] for mode in self.modes)

    def measure(self, case: MemoryCase, memory: dict[Entry, dict[str, int]]) -> list[Measurement]:
        """Time the entries of each dtype in turn."""
        return [row for dtype in self.dtypes for row in self.measure_dtype(case, dtype, memory)]

    def measure_dtype(
        self, case: MemoryCase, dtype: str, memory: dict[Entry, dict[str, int]]
    ) -> list[Measurement]:
        """Time the entries of a dtype in turn."""
        entries = [entry for entry in self.entries(case) if entry.dtype == dtype]
        layers = build_layers(case, entries, self.device, self.original_class)
        memories = [layer for layer in layers if layer.entry.model != MODELS.feed_forward]
        read = memories[0].search()[1].unique().numel()

        def row_of(layer: SteppedLayer, part: str, rows: int) -> MemoryMeasurement:
            cost = costs(case, layer.entry.model, rows, dtype)[part]
            return MemoryMeasurement(
                str(case.slots),
                part,
                case.setting,
                *layer.entry,
                tokens=case.tokens,
                floor_seconds=self.floor_seconds(cost.multiply_adds, dtype),
                moved_bytes=cost.moved,
                copy_seconds=cost.moved / self.copied,
                table_bytes=case.table_bytes(dtype),
                **(memory[layer.entry] if part == TRAINING_STEP else {}),
            )

        measured = []
        for mode, parts in PARTS.items():
            if mode not in self.modes:
                continue
            taking_part = memories if mode == FIND else layers
            # each layer takes all parts before the next one's turn
            rows = self.time(
                [
                    (row_of(layer, part, read), functools.partial(work, layer))
                    for layer in taking_part
                    for part, work in parts.items()
                ]
            )
            measured += sorted(rows, key=lambda row: list(parts).index(row.mode))
            if mode == TRAIN:
                for layer in layers:
                    step = row_of(layer, TRAINING_STEP, read)
                    of_parts = [row.seconds for row in rows if row.model == layer.entry.model]
                    step.seconds = [sum(turn) for turn in zip(*of_parts, strict=True)]
                    measured.append(step)
        if FIX in self.modes:
            slots = draw_fixed_slots(case, torch.Generator().manual_seed(1)).to(self.device)
            fixable = [layer for layer in memories if layer.entry.model not in PUBLISHED]
            for part in (FIXED, FIXED_SEARCHED):
                for layer in fixable:
                    layer.fix_slots(slots, searched=part == FIXED_SEARCHED)
                rows = slots.unique().numel()
                measured += self.time(
                    [(row_of(layer, part, rows), layer.step) for layer in fixable]
                )
        return measured


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return MemoryBenchmark.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
