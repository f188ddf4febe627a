"""What the benchmarks share: options, the time and memory of their entries, and the report."""

import argparse
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.machine import (
    hardware_line,
    load_warning,
    multiply_add_rate,
    parse_device,
    seconds_of,
)
from scripts._shared.results import prepare_results, save_results
from scripts.benchmark._original import Checkout
from scripts.benchmark._report import BF16, DTYPES, FP32, ORIGINAL, Entry, Measurement, Report

# For the expected duration alone: multiply-adds a second of whole models on two cores, and seconds
# that a process takes before it computes anything.
USUAL_RATE = 6e10
START = 8

# Environment of a process whose memory is measured. glibc gives back at once what is freed; by
# default it keeps up to a third of the peak, in one run more than in the next.
MEASURED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def parse_number(option: str, text: str) -> int:
    """A number of 1 or more; raises ValueError when it is none."""
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{option} is {text!r}: give a number of 1 or more")
    return int(text)


def parse_names(option: str, given: list[str], known: Iterable[str]) -> list[str]:
    """The names given, each once; raises ValueError when one is not known."""
    for name in given:
        if name not in known:
            raise ValueError(f"{option} is {name!r}: give one or more of {', '.join(known)}")
    return list(dict.fromkeys(given))


def add_choices(
    parser: argparse.ArgumentParser, option: str, known: Iterable[str], default: str | None = None
) -> None:
    """Add an option of one or more known names, of all of them if no default is given."""
    parser.add_argument(
        option,
        nargs="+",
        metavar="NAME",
        default=[default] if default else list(known),
        help=f"of {', '.join(known)} ({default or 'all'})",
    )


class Benchmark(ABC):
    """The comparison that a command line asks for: which models, in which cases, doing what.

    Args:
        options: of :meth:`parse_options`.

    Raises:
        ValueError: the options make no comparison.
    """

    models: ClassVar[tuple[str, ...]]
    # whose code --original gives; None where there is none
    published: ClassVar[Checkout | None] = None
    # what a case's size is called in the table
    size_title: ClassVar[str]
    # what to give where memory is short
    smaller: ClassVar[str]
    # what stands below the table, with places for the words of `explain`
    explanation: ClassVar[str]
    # the options that --quick stands for
    quick: ClassVar[str]
    # what is compared of models that are to compute the same, by how much it may differ in fp32,
    # and what finds the wrong one where none is the published code's
    compared: ClassVar[str]
    tolerance: ClassVar[float]
    tests: ClassVar[str] = ""
    # whether each entry's memory is measured
    measures_memory: bool = True
    report_class: ClassVar[type[Report]] = Report

    def __init__(self, options: argparse.Namespace) -> None:
        self.arguments = options.arguments
        self.device = parse_device(options.device)
        self.steps = parse_number("--steps", options.steps)
        self.threads = parse_number("--threads", options.threads)
        self.dtypes = parse_names("--dtype", options.dtype, DTYPES)
        self.original = options.original
        self.cases = self.parse_cases(options)
        self.original_class = self.published.import_class(self.original) if self.original else None
        # multiply-adds a second by dtype
        self.rates: dict[str, float] = {}
        # why entries take no part
        self.left_out: list[str] = []
        self.generator = torch.Generator().manual_seed(1)
        torch.set_num_threads(self.threads)

    @classmethod
    @abstractmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of this benchmark alone."""

    @abstractmethod
    def parse_cases(self, options: argparse.Namespace) -> list:
        """What is measured one after the other; raises ValueError where there is no such case."""

    @abstractmethod
    def entries(self, case: Any) -> list[Entry]:
        """Who takes part, in turn."""

    @abstractmethod
    def differences(self, case: Any) -> dict[str, float]:
        """By how much models that are to compute the same differ from ours in fp32, by name."""

    def own_memory(self, case: Any, entry: Entry) -> dict[str, int]:
        """Fields of a Measurement: bytes that an entry adds to this process."""
        return {}

    @abstractmethod
    def measure(self, case: Any, memory: dict[Entry, dict[str, int]]) -> list[Measurement]:
        """Time the entries by :meth:`time`; their memory is what :meth:`own_memory` returns."""

    @abstractmethod
    def repeat_seconds(self, case: Any) -> float:
        """About how long a repeat of all entries takes on two cores."""

    @classmethod
    def parse_options(cls, arguments: list[str] | None) -> argparse.Namespace:
        """Options of the command line, as they were given."""
        parser = command_parser(sys.modules[cls.__module__].__doc__)
        given = sys.argv[1:] if arguments is None else arguments
        parser.set_defaults(arguments=given, dtype=[FP32], device="cpu", original=None)
        cls.add_options(parser)
        if cls.published:
            add_choices(parser, "--dtype", DTYPES, FP32)
            parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
            whose = f"checkout of the published code, {cls.published.url}"
            parser.add_argument("--original", type=Path, help=whose)
        parser.add_argument("--steps", default="7", help="repeats that are timed (7)")
        parser.add_argument(
            "--threads", default=str(torch.get_num_threads()), help="of the CPU (all cores)"
        )
        parser.add_argument(
            "--output", type=Path, help="folder for benchmark.json and benchmark.png"
        )
        parser.add_argument(
            "--quick", action="store_true", help=f"less than 3 minutes on 2 cores: {cls.quick}"
        )
        # how the command calls itself: the number of a case, a model and a dtype
        parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
        options = parser.parse_args(given)
        # of an option that is there twice, the latter counts: what is given
        return parser.parse_args([*cls.quick.split(), *given]) if options.quick else options

    @classmethod
    def main(cls, arguments: list[str] | None) -> int:
        """Run the benchmark for the command line; returns the exit status."""
        options = cls.parse_options(arguments)

        def work() -> None:
            try:
                benchmark = cls(options)
                if options.memory_of:
                    number, *entry = options.memory_of
                    memory = benchmark.own_memory(benchmark.cases[int(number)], Entry(*entry))
                    print(json.dumps(memory))
                else:
                    benchmark.tell(options.output.resolve() if options.output else None)
            except torch.OutOfMemoryError as error:
                raise ValueError(f"{error}: give {cls.smaller}") from error

        left = "nothing was written; the same command starts anew"
        return exit_status(work, left, options.output)

    def tell(self, output: Path | None) -> None:
        """Measure everything and tell of it; raises ValueError when that is impossible."""
        if output:
            prepare_results(output)
        minutes = max(1, round(self.expected_seconds() / 60))
        lines = [f"takes about {minutes} min on 2 cores", hardware_line(self.device)]
        warning = load_warning(os.getloadavg()[0])
        print(*lines, *([warning] if warning else []), sep="\n", flush=True)
        rows, circumstances = self.run()
        for case, difference in circumstances["largest_difference_fp32"].items():
            print(f"{case}: {self.compared} differ by {difference:.1g} at most")
        report = self.report_class(rows, self.models, self.size_title)
        told = "".join(f"\n{text}\n" for text in [*self.left_out, *report.texts()])
        if output:
            content = report.content(circumstances)
            save_results(output, "benchmark", content, told + self.explain(), report.draw)
        else:
            print(told + self.explain())

    def expected_seconds(self) -> float:
        """About how long everything takes on 2 cores: a warm-up and, for memory, 3 repeats."""
        repeats = 1 + self.steps + 3 * self.measures_memory
        processes = sum(len(self.entries(case)) for case in self.cases) * self.measures_memory
        return START * (1 + processes) + repeats * sum(map(self.repeat_seconds, self.cases))

    def run(self) -> tuple[list[Measurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        # what cannot be compared is refused before anything else is done
        differences = {str(case): self.largest_difference(case) for case in self.cases}
        dtypes = {entry.dtype for case in self.cases for entry in self.entries(case)}
        if FP32 in dtypes:
            self.rates[FP32] = multiply_add_rate(torch.float32, self.device)
        if dtypes != {FP32}:
            self.rates[BF16] = multiply_add_rate(torch.bfloat16, self.device)
        rows = []
        for number, case in enumerate(tqdm(self.cases, "benchmark", unit="case", disable=None)):
            measured = self.entries(case) if self.measures_memory else ()
            rows += self.measure(case, {entry: self.memory_of(number, entry) for entry in measured})
        return rows, {
            "hardware": hardware_line(self.device),
            "steps": self.steps,
            "multiply_adds_per_second": self.rates,
            "left_out": self.left_out,
            "largest_difference_fp32": {k: v for k, v in differences.items() if v is not None},
        }

    def largest_difference(self, case: Any) -> float | None:
        """The largest of :meth:`differences`; None where there is none to compare with.

        Raises ValueError when it is not within the tolerance.
        """
        differences = self.differences(case)
        for model, difference in differences.items():
            # not a number is not within it either
            if not difference <= self.tolerance:
                published = model.startswith(ORIGINAL)
                whose = f"--original is {self.original}, whose" if published else f"{model}'s"
                remedy = "give an unchanged checkout" if published else f"see {self.tests}"
                raise ValueError(
                    f"{whose} {self.compared} differ by {difference:.2g} from {self.models[0]}'s "
                    f"with the same weights ({case}; allowed is {self.tolerance}): speeds of "
                    f"models that compute different things are not compared; {remedy}"
                )
        return max(differences.values(), default=None)

    def floor_seconds(self, multiply_adds: float, dtype: str) -> float:
        """Seconds that multiply-adds take at the rate measured here."""
        return multiply_adds / self.rates[FP32 if dtype == FP32 else BF16]

    def time(
        self,
        work: list[tuple[Measurement, Callable[[], object]]],
        prepare: Callable[[], object] = lambda: None,
    ) -> list[Measurement]:
        """Let the work of all entries take turns, A B C A B C, and note how long each takes.

        Args:
            work: what is timed, and where its seconds are noted.
            prepare: comes before each turn of all, and is not timed.
        """
        # the first turn warms up
        for turn in range(1 + self.steps):
            prepare()
            for row, do in work:
                seconds = seconds_of(do)
                if turn:
                    row.seconds.append(seconds)
        return [row for row, _ in work]

    def memory_of(self, number: int, entry: Entry) -> dict[str, int]:
        """What :meth:`own_memory` measures of a case by number, in a process of its own.

        Raises ValueError when that process fails.
        """
        module = sys.modules[type(self).__module__].__spec__.name
        words = [sys.executable, "-m", module, *self.arguments, "--memory-of", str(number), *entry]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", **MEASURED_MEMORY}
        ended = subprocess.run(words, capture_output=True, text=True, env=environment)
        if ended.returncode:
            reason = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ValueError(
                f"the memory of {entry.model} {entry.dtype} ({self.cases[number]}) cannot be "
                f"measured, exit status {ended.returncode}, {reason[0]}: where memory is short "
                f"give {self.smaller}"
            )
        return json.loads(ended.stdout.splitlines()[-1])

    def explain(self, **more: Any) -> str:
        """What stands below the table."""
        rates = ", ".join(f"{of} {rate / 1e9:,.0f}" for of, rate in self.rates.items())
        hardware = hardware_line(self.device)
        return self.explanation.format(steps=self.steps, rates=rates, hardware=hardware, **more)
