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

from scripts._shared.command_line import command_parser, exit_status, make_output_folder
from scripts._shared.commands import ROOT, short
from scripts._shared.machine import (
    hardware_line,
    load_warning,
    multiply_add_rate,
    parse_device,
    seconds_of,
)
from scripts._shared.results import check_plotting
from scripts.benchmark._original import Checkout
from scripts.benchmark._report import BF16, DTYPES, FP32, ORIGINAL, Entry, Measurement, Report

# For the expected duration alone: multiply-adds a second of whole models on two cores, and seconds
# that a process takes before it computes anything.
USUAL_RATE = 4e10
START = 8


def parse_number(option: str, text: str) -> int:
    """A number of 1 or more.

    Raises ValueError when it is none.
    """
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{option} is {text!r}: give a number of 1 or more")
    return int(text)


def parse_names(option: str, given: list[str], known: Iterable[str]) -> list[str]:
    """The names given, each once.

    Raises ValueError when one is not known.
    """
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
    """The comparison that the options of a command line ask for.

    A subclass says which models are compared, in which cases, and what these compute.

    Args:
        options: of :meth:`parse_options`.

    Raises:
        ValueError: the options make no comparison.
    """

    models: ClassVar[tuple[str, ...]]
    # whose code --original gives
    published: ClassVar[Checkout | None] = None
    # what a case's size is called in the table
    size_title: ClassVar[str]
    # what to give where memory is short
    smaller: ClassVar[str]
    # what stands below the table, with places for the words of `explain`
    explanation: ClassVar[str]
    # values that --quick gives to options that are not given
    quick: ClassVar[dict[str, Any]]
    # how a difference between models that compute the same is told, and its name in the JSON file
    difference_text: ClassVar[str] = "{case}: outputs differ by {difference:.1g} at most"
    difference_name: ClassVar[str] = "largest_output_difference_fp32"
    # whether each entry's memory is measured
    measures_memory: bool = True
    report_class: ClassVar[type[Report]] = Report

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = parse_device(options.device)
        self.steps = parse_number("--steps", options.steps)
        self.threads = parse_number("--threads", options.threads)
        self.dtypes = parse_names("--dtype", options.dtype, DTYPES)
        self.original = options.original
        self.cases = self.parse_cases(options)
        self.original_class = None
        if self.original:
            self.original_class = self.published.import_class(self.original)
        if not self.original and (options.peak_of or "").startswith(ORIGINAL):
            raise ValueError(f"--peak-of is {options.peak_of!r}: give --original as well")
        # multiply-adds a second by dtype, and what memory_of returns
        self.rates: dict[str, float] = {}
        self.memory: dict[tuple[Any, Entry], dict[str, int]] = {}
        # why entries take no part
        self.left_out: list[str] = []
        self.generator = torch.Generator().manual_seed(1)
        torch.set_num_threads(self.threads)

    @abstractmethod
    def parse_cases(self, options: argparse.Namespace) -> list:
        """What is measured one after the other; raises ValueError where there is no such case."""

    @abstractmethod
    def entries(self, case: Any) -> list[Entry]:
        """Who takes part, in turn."""

    @abstractmethod
    def difference(self, case: Any) -> float | None:
        """By how much models that compute the same differ; None where there is but one.

        Raises ValueError when they compute something else.
        """

    @abstractmethod
    def measure(self, case: Any) -> list[Measurement]:
        """Time the entries by :meth:`time`."""

    @abstractmethod
    def repeat_seconds(self, case: Any) -> float:
        """About how long a repeat of all entries takes on two cores."""

    def options_of(self, case: Any) -> list[str]:
        """The options that ask for one case, in a process that measures memory."""
        raise NotImplementedError

    def own_memory(self, entry: Entry) -> dict[str, int]:
        """Fields of a Measurement: bytes that an entry adds to this process, in the first case."""
        raise NotImplementedError

    def rounds(self, case: Any) -> int:
        """How many times :meth:`measure` calls :meth:`time`."""
        return 1

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of this benchmark alone."""

    @classmethod
    def add_model_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of how and beside which code models compute."""
        add_choices(parser, "--dtype", DTYPES, FP32)
        parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
        parser.add_argument(
            "--original", type=Path, help=f"checkout of the published code, {cls.published.url}"
        )
        parser.add_argument(
            "--peak-of",
            choices=cls.models,
            help="only print a model's memory in bytes, in the first case and dtype; the command "
            "calls itself with it",
        )

    @classmethod
    def parse_options(cls, arguments: list[str] | None) -> argparse.Namespace:
        """Options of the command line, as they were given."""
        parser = command_parser(sys.modules[cls.__module__].__doc__)
        parser.set_defaults(dtype=[FP32], device="cpu", original=None, peak_of=None)
        cls.add_options(parser)
        parser.add_argument("--steps", default="7", help="repeats that are timed (7)")
        parser.add_argument(
            "--threads", default=str(torch.get_num_threads()), help="of the CPU (all cores)"
        )
        parser.add_argument(
            "--output", type=Path, help="folder for benchmark.json and benchmark.png"
        )
        parser.add_argument(
            "--quick", action="store_true", help="take less than 3 minutes: fewer cases and steps"
        )
        options = parser.parse_args(arguments)
        if options.quick:
            parser.set_defaults(**cls.quick)
            options = parser.parse_args(arguments)
        return options

    @classmethod
    def main(cls, arguments: list[str] | None) -> int:
        """Run the benchmark for the command line; returns the exit status."""
        options = cls.parse_options(arguments)

        def work() -> None:
            try:
                benchmark = cls(options)
                if options.peak_of:
                    entry = Entry(options.peak_of, benchmark.dtypes[0])
                    print(json.dumps(benchmark.own_memory(entry)))
                else:
                    benchmark.tell(options.output.resolve() if options.output else None)
            except torch.OutOfMemoryError as error:
                raise ValueError(f"{error}: give {cls.smaller}") from error

        left = "nothing was written; the same command starts anew"
        return exit_status(work, left, options.output)

    def tell(self, output: Path | None) -> None:
        """Measure everything and tell of it.

        Raises ValueError when that is impossible.
        """
        if output:
            check_plotting()
            make_output_folder(output)
        print(hardware_line(self.device))
        warning = load_warning(os.getloadavg()[0])
        if warning:
            print(warning)
        minutes = max(1, round(self.expected_seconds() / 60))
        print(f"takes about {minutes} min on two CPU cores", flush=True)
        rows, circumstances = self.run()
        for case, difference in circumstances[self.difference_name].items():
            print(self.difference_text.format(case=case, difference=difference))
        for reason in self.left_out:
            print(reason)
        report = self.report_class(rows, self.models, self.size_title)
        for text in report.texts():
            print(f"\n{text}")
        print(self.explain())
        if output:
            report.write(output, circumstances)
            print(f"written to {short(output)}/benchmark.json and {short(output)}/benchmark.png")

    def expected_seconds(self) -> float:
        """About how long everything takes on two cores: a warm-up and, for memory, 3 repeats."""
        repeats = 1 + self.steps + 3 * self.measures_memory
        processes = sum(len(self.entries(case)) for case in self.cases) * self.measures_memory
        return START * processes + repeats * sum(map(self.repeat_seconds, self.cases))

    def run(self) -> tuple[list[Measurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        steps = sum(self.rounds(case) * (1 + self.steps) for case in self.cases)
        if self.measures_memory:
            steps += sum(len(self.entries(case)) for case in self.cases)
        with tqdm(total=steps, desc="benchmark", unit="step", disable=None) as self.bar:
            # what cannot be compared is refused before anything else is done
            differences = {str(case): self.difference(case) for case in self.cases}
            for case in self.cases if self.measures_memory else ():
                for entry in self.entries(case):
                    self.memory[case, entry] = self.memory_of(case, entry)
                    self.bar.update()
            dtypes = {entry.dtype for case in self.cases for entry in self.entries(case)}
            if FP32 in dtypes:
                self.rates[FP32] = multiply_add_rate(torch.float32, self.device)
            if dtypes != {FP32}:
                self.rates[BF16] = multiply_add_rate(torch.bfloat16, self.device)
            rows = [row for case in self.cases for row in self.measure(case)]
        return rows, {
            "hardware": hardware_line(self.device),
            "steps": self.steps,
            "multiply_adds_per_second": self.rates,
            "left_out": self.left_out,
            self.difference_name: {k: v for k, v in differences.items() if v is not None},
        }

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
            self.bar.update()
        return [row for row, _ in work]

    def memory_of(self, case: Any, entry: Entry) -> dict[str, int]:
        """What :meth:`own_memory` measures, in a process of its own.

        Raises ValueError when that process fails.
        """
        module = sys.modules[type(self).__module__].__spec__.name
        words = [sys.executable, "-m", module, *self.options_of(case), "--dtype", entry.dtype]
        words += ["--device", str(self.device), "--threads", str(self.threads)]
        words += ["--peak-of", entry.model]
        if entry.model.startswith(ORIGINAL):
            words += ["--original", str(self.original.resolve())]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
        if ended.returncode:
            reason = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ValueError(
                f"the memory of {entry.model} {entry.dtype} ({case}) cannot be measured, exit "
                f"status {ended.returncode}, {reason[0]}: where memory is short give {self.smaller}"
            )
        return json.loads(ended.stdout.splitlines()[-1])

    def explain(self, **more: Any) -> str:
        """What stands below the table."""
        rates = [f"{of} {rate / 1e9:,.0f}" for of, rate in self.rates.items()]
        hardware = hardware_line(self.device)
        return self.explanation.format(
            steps=self.steps, rates=", ".join(rates), hardware=hardware, **more
        )
