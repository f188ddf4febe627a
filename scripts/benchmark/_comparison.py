"""How a benchmark goes on: what each entry gets to read, and what is measured of it.

The models that it compares are the business of a subclass of Benchmark.
"""

import argparse
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn
from tqdm import tqdm

from scripts._shared.commands import ROOT, short
from scripts._shared.machine import (
    hardware_line,
    load_warning,
    multiply_add_rate,
    parse_device,
    peak_memory,
    synchronize,
)
from scripts.benchmark._baselines import (
    BF16,
    DTYPES,
    FP32,
    Case,
    Entry,
    Models,
    Reader,
    draw_tokens,
)
from scripts.benchmark._report import Measurement, Report, check_output

# Nats a token by which two right implementations may differ in fp32.
TOLERANCE = 2e-4


def parse_number(option: str, text: str) -> int:
    """A number above 0.

    Raises ValueError when it is none.
    """
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{option} is {text!r}: give a number of 1 or more")
    return int(text)


def parse_names(option: str, given: list[str], known: tuple[str, ...]) -> list[str]:
    """The names given, each once.

    Raises ValueError when one is not known.
    """
    for name in given:
        if name not in known:
            raise ValueError(f"{option} is {name!r}: give one or more of {', '.join(known)}")
    return list(dict.fromkeys(given))


class Benchmark(ABC):
    """The comparison that the command line's options ask for.

    Raises ValueError for options that make none.
    """

    models: ClassVar[Models]
    # the command, which measures memory in a process of its own
    module: ClassVar[str]
    # what a case's size is called in the table
    size_title: ClassVar[str]
    # what to give where memory is short
    smaller: ClassVar[str]
    # what stands below the table, with places for steps, rates and hardware
    explanation: ClassVar[str]

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = parse_device(options.device)
        self.steps = parse_number("--steps", options.steps)
        self.threads = parse_number("--threads", options.threads)
        self.cases = self.parse_cases(options)
        self.dtypes = parse_names("--dtype", options.dtype, DTYPES)
        self.original = options.original
        self.original_class = self.import_original(self.original) if self.original else None
        self.generator = torch.Generator().manual_seed(1)
        torch.set_num_threads(self.threads)

    @abstractmethod
    def parse_cases(self, options: argparse.Namespace) -> list[Case]:
        """What is to be measured; raises ValueError for options that say nothing of the kind."""

    @abstractmethod
    def import_original(self, path: Path) -> type[nn.Module]:
        """The published model's class; raises ValueError when it cannot be imported."""

    @abstractmethod
    def entries(self, case: Case) -> list[Entry]:
        """Who takes part, in turn."""

    @abstractmethod
    def readers(self, case: Case, entries: list[Entry]) -> list[Reader]:
        """A reader of each of the entries, with the same weights where there is an original."""

    @abstractmethod
    def dictionary(self, case: Case) -> Dictionary:
        """The symbols of a case."""

    @abstractmethod
    def multiply_adds(self, case: Case, model: str) -> float:
        """Multiply-adds of the matrix products that a model needs for a segment."""

    @abstractmethod
    def options_of(self, case: Case) -> list[str]:
        """The options that ask for one case."""

    @abstractmethod
    def begin(self, case: Case, readers: list[Reader]) -> None:
        """Give the readers what they remember before they read anything."""

    @abstractmethod
    def segments_to_fill(self, case: Case) -> int:
        """Segments to be read until the memory is full."""

    @abstractmethod
    def segments_of_repeat(self, case: Case, model: str) -> int:
        """Segments that a model reads in a repeat: its share of every cost."""

    def draw(self, case: Case, segments: int) -> list[Tensor]:
        """So many segments."""
        dictionary = self.dictionary(case)
        return [
            draw_tokens(dictionary, case.setting, self.generator).to(self.device)
            for _ in range(segments)
        ]

    def check_parity(self, case: Case) -> float:
        """The largest difference, in nats a token, of ours and the original's losses in fp32.

        Raises ValueError when it is above TOLERANCE.
        """
        pair = [Entry(self.models.ours, FP32), Entry(self.models.original, FP32)]
        ours, original = readers = self.readers(case, pair)
        self.begin(case, readers)
        differences = [
            (ours.score(tokens) - original.score(tokens)).abs().max().item()
            for tokens in self.draw(case, self.segments_to_fill(case) + 2)
        ]
        # not max: it can pass over what is not a number
        if not all(difference <= TOLERANCE for difference in differences):
            raise ValueError(
                f"--original is {self.original}, whose loss of a token differs by "
                f"{max(differences, key=abs):.2g} nats from {self.models.ours}'s with the same "
                f"weights ({case.text}, fp32; allowed is {TOLERANCE}): speeds of models that "
                "compute different things are not compared; give an unchanged checkout"
            )
        return max(differences)

    def peak_of(self, case: Case, entry: Entry) -> int:
        """Peak memory of a entry in bytes, measured in a process of its own.

        Raises ValueError when that process fails.
        """
        words = [sys.executable, "-m", self.module, *self.options_of(case), "--dtype", entry.dtype]
        words += ["--device", str(self.device), "--threads", str(self.threads)]
        words += ["--peak-of", entry.model]
        if entry.model == self.models.original:
            words += ["--original", str(self.original)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
        if ended.returncode:
            reason = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ValueError(
                f"the memory of {entry.model} {entry.dtype} ({case.text}) cannot be "
                f"measured, exit status {ended.returncode}, {reason[0]}: where memory is short "
                f"give {self.smaller}"
            )
        return int(ended.stdout.split()[-1])

    def own_peak(self, model: str) -> int:
        """Peak memory in bytes that a entry adds to this process, in the first case.

        Raises ValueError when it does not take part.
        """
        before = peak_memory(self.device)
        case, entry = self.cases[0], Entry(model, self.dtypes[0])
        if entry not in self.entries(case):
            raise ValueError(
                f"--peak-of is {model!r}, which does not take part with {case.size} in "
                f"{entry.dtype}: give another --dtype, for {self.models.original} also "
                "--original"
            )
        if model != self.models.original:
            self.original_class = None
        (reader,) = readers = self.readers(case, [entry])
        self.begin(case, readers)
        segments = self.segments_to_fill(case) + self.segments_of_repeat(case, model) + 1
        for tokens in self.draw(case, segments):
            reader.read(tokens)
        return peak_memory(self.device) - before

    def measure(
        self, case: Case, rates: dict[str, float], peaks: list[int], bar: tqdm
    ) -> list[Measurement]:
        """Time the entries in turn."""
        entries = self.entries(case)
        readers = self.readers(case, entries)
        setting = case.setting
        segments = [self.segments_of_repeat(case, entry.model) for entry in entries]
        measured = [
            Measurement(
                case.size,
                setting.mode,
                setting.text,
                *entry,
                tokens=number * setting.segment * setting.batch,
                floor_seconds=number
                * self.multiply_adds(case, entry.model)
                / rates[FP32 if entry.dtype == FP32 else BF16],
                peak_bytes=peak,
            )
            for entry, number, peak in zip(entries, segments, peaks, strict=True)
        ]
        self.begin(case, readers)
        for tokens in self.draw(case, self.segments_to_fill(case) + 1):
            for reader in readers:
                reader.read(tokens)
        for _ in range(self.steps):
            bar.update()
            repeat = self.draw(case, max(segments))
            for reader, number, measurement in zip(readers, segments, measured, strict=True):
                synchronize(self.device)
                started = time.perf_counter()
                for tokens in repeat[:number]:
                    reader.read(tokens)
                synchronize(self.device)
                measurement.seconds.append(time.perf_counter() - started)
        return measured

    def rates(self) -> dict[str, float]:
        """Multiply-adds a second of this machine in the dtypes of products that take part."""
        dtypes = {c.dtype for case in self.cases for c in self.entries(case)}
        rates = {}
        if FP32 in dtypes:
            rates[FP32] = multiply_add_rate(torch.float32, self.device)
        if dtypes != {FP32}:
            rates[BF16] = multiply_add_rate(torch.bfloat16, self.device)
        return rates

    def run(self) -> tuple[list[Measurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        peaks: list[list[int]] = []
        differences = {}
        steps = sum(len(self.entries(case)) + self.steps for case in self.cases)
        with tqdm(total=steps, desc="benchmark", unit="step", disable=None) as bar:
            # what cannot be compared is refused before anything else is done
            for case in self.cases if self.original else ():
                differences[case.text] = self.check_parity(case)
            for case in self.cases:
                peaks.append([])
                for entry in self.entries(case):
                    peaks[-1].append(self.peak_of(case, entry))
                    bar.update()
            rates = self.rates()
            measurements = []
            for case, of_case in zip(self.cases, peaks, strict=True):
                measurements += self.measure(case, rates, of_case, bar)
        return measurements, {
            "hardware": hardware_line(self.device),
            "steps": self.steps,
            "multiply_adds_per_second": rates,
            "largest_loss_difference_fp32": differences,
        }


def add_options(parser: argparse.ArgumentParser, models: Models) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument(
        "--dtype",
        nargs="+",
        metavar="NAME",
        default=[FP32],
        help=f"of {', '.join(DTYPES)} (fp32)",
    )
    parser.add_argument("--steps", default="7", help="repeats that are timed (7)")
    parser.add_argument(
        "--threads", default=str(torch.get_num_threads()), help="of the CPU (all cores)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--original", type=Path, help="checkout of the published code")
    parser.add_argument("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    parser.add_argument(
        "--peak-of",
        choices=models,
        help="only print a model's peak memory in bytes, in the first case and dtype; the script "
        "calls itself with it",
    )


def run(kind: type[Benchmark], options: argparse.Namespace) -> None:
    """Do what the options ask for.

    Raises ValueError when that is impossible.
    """
    benchmark = kind(options)
    if options.peak_of:
        print(benchmark.own_peak(options.peak_of))
        return
    output = options.output.resolve() if options.output else None
    if output:
        check_output(output)
    hardware = hardware_line(benchmark.device)
    print(hardware)
    warning = load_warning(os.getloadavg()[0])
    if warning:
        print(warning)
    measurements, circumstances = benchmark.run()
    for case, difference in circumstances["largest_loss_difference_fp32"].items():
        print(f"{case}: losses of a token differ from the original's by {difference:.1g} nats")
    rates = circumstances["multiply_adds_per_second"]
    of_dtypes = [f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in rates.items()]
    report = Report(measurements, benchmark.models, benchmark.size_title)
    print(f"\n{report.table()}")
    print(
        benchmark.explanation.format(
            steps=benchmark.steps, rates=", ".join(of_dtypes), hardware=hardware
        )
    )
    if output:
        report.write(output, circumstances)
        print(f"written to {short(output)}/benchmark.json and {short(output)}/benchmark.png")


def main(kind: type[Benchmark], options: argparse.Namespace) -> int:
    """Run a benchmark for the command line; returns the exit status."""
    try:
        run(kind, options)
    except KeyboardInterrupt:
        print("\ninterrupted, nothing was written; the same command starts anew")
        return 130
    except torch.OutOfMemoryError as error:
        print(f"error: {error}: give {kind.smaller}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
