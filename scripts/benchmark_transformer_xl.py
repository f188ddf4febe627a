"""Speed and memory of transformer_xl by size, segment and memory: what `make bench` runs.

    python scripts/benchmark_transformer_xl.py [--original PATH] [--output FOLDER]

Beside it stand the time that its matrix products alone would take at the rate measured on this
machine, fairseq's own transformer_lm of the same size, without a memory, and, with --original, the
published code with the same weights. A training step is forward, loss and backward, in train() mode
without dropout. The memory is full before the clock starts, and the models take turns: A B C A B C.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmark_contenders import (
    AUTOCAST,
    BF16,
    DTYPES,
    FP32,
    MODELS,
    ORIGINAL,
    OURS,
    PLAIN,
    Contender,
    Reader,
    Setting,
    build_readers,
    configuration,
    draw_tokens,
    multiply_adds,
    vocabulary,
)
from benchmark_machine import (
    hardware_line,
    load_warning,
    multiply_add_rate,
    parse_device,
    peak_memory,
    synchronize,
)
from benchmark_report import Measurement, check_output, markdown_table, write_report
from original_transformer_xl import import_original
from run_command import short

# Nats a token by which two right implementations may differ in fp32.
TOLERANCE = 2e-4
EXPLANATION = """
Setting: segment/memory/batch, in tokens, tokens and streams; with a fourth number, distances are
clamped at it and every token sees as many tokens as the memory has. Tokens a second: the median
repeat of {steps}, the slowest and the fastest. Of the arithmetic: the time that the matrix products
alone would take at the rate measured here ({rates} billion multiply-adds a second), over
the time taken. Times: how many times as fast transformer_xl is, median over median of the same run;
transformer_lm has no memory. Peak memory: of a process of its own, with the weights, without the
libraries.
Machine: {hardware}."""


def parse_number(option: str, text: str) -> int:
    """A number above 0.

    Raises ValueError when it is none.
    """
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{option} is {text!r}: give a number of 1 or more")
    return int(text)


def parse_setting(mode: str, text: str) -> Setting:
    """A setting of --train or --evaluate.

    Raises ValueError when it is none.
    """
    forms = {3: "SEGMENT/MEMORY/BATCH, such as 512/512/2"}
    if mode == "evaluate":
        forms[4] = "SEGMENT/MEMORY/BATCH/CLAMP, such as 80/2100/1/820"
    numbers = text.split("/")
    if len(numbers) not in forms or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--{mode} is {text!r}: give {', or '.join(forms.values())}")
    setting = Setting(mode, *map(int, numbers))
    if 0 in (setting.segment, setting.batch, setting.clamp):
        raise ValueError(f"--{mode} is {text!r}: only the memory may be 0")
    if setting.clamp and not setting.memory:
        raise ValueError(f"--{mode} is {text!r}: CLAMP goes with a memory, give one or drop CLAMP")
    return setting


def choose_contenders(size: str, dtypes: list[str], original: bool) -> list[Contender]:
    """Who takes part, in turn.

    The published code is measured in fp32 and, beside bf16 of any kind, under autocast. Neither it
    nor fairseq's transformer_lm runs under autocast with adaptive embeddings.
    """
    adaptive = configuration(size, Setting("train", 1, 1, 1)).adaptive_input
    chosen = [Contender(model, dtype) for dtype in dtypes for model in (OURS, PLAIN)]
    if original:
        chosen.append(Contender(ORIGINAL, FP32))
        if dtypes != [FP32]:
            chosen.append(Contender(ORIGINAL, AUTOCAST))
    return [c for c in chosen if not (adaptive and c.dtype == AUTOCAST and c.model != OURS)]


class Benchmark:
    """The comparison that the command line's options ask for.

    Raises ValueError for options that make none.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = parse_device(options.device)
        self.steps = parse_number("--steps", options.steps)
        self.threads = parse_number("--threads", options.threads)
        self.sizes = list(dict.fromkeys(options.size))
        self.settings = [parse_setting("train", text) for text in dict.fromkeys(options.train)]
        self.settings += [
            parse_setting("evaluate", text) for text in dict.fromkeys(options.evaluate)
        ]
        if not self.settings:
            raise ValueError("--train and --evaluate are empty: give one of them a setting")
        for dtype in options.dtype:
            if dtype not in DTYPES:
                raise ValueError(f"--dtype is {dtype!r}: give one or more of {', '.join(DTYPES)}")
        self.dtypes = list(dict.fromkeys(options.dtype))
        for size in self.sizes:
            configuration(size, self.settings[0])
        self.original = options.original
        self.original_class = import_original(self.original) if self.original else None
        self.generator = torch.Generator().manual_seed(1)
        torch.set_num_threads(self.threads)

    def contenders(self, size: str) -> list[Contender]:
        """Who takes part with a size."""
        return choose_contenders(size, self.dtypes, self.original is not None)

    def readers(self, size: str, setting: Setting, contenders: list[Contender]) -> list[Reader]:
        """A reader of each of the contenders, with the same weights where there is an original."""
        return build_readers(size, setting, contenders, self.device, self.original_class)

    def draw(self, size: str, setting: Setting, segments: int) -> list[Tensor]:
        """So many segments."""
        dictionary = vocabulary(size)
        return [
            draw_tokens(dictionary, setting, self.generator).to(self.device)
            for _ in range(segments)
        ]

    def check_parity(self, size: str, setting: Setting) -> float:
        """The largest difference, in nats a token, of this and the original's losses in fp32.

        Raises ValueError when it is above TOLERANCE.
        """
        pair = [Contender(OURS, FP32), Contender(ORIGINAL, FP32)]
        ours, original = self.readers(size, setting, pair)
        differences = [
            (ours.read(tokens) - original.read(tokens)).abs().max().item()
            for tokens in self.draw(size, setting, setting.segments + 2)
        ]
        # not max: it can pass over what is not a number
        if not all(difference <= TOLERANCE for difference in differences):
            raise ValueError(
                f"--original is {self.original}, whose loss of a token differs by "
                f"{max(differences, key=abs):.2g} nats from transformer_xl's with the same weights "
                f"({size}, {setting.mode} {setting.text}, fp32; allowed is {TOLERANCE}): speeds of "
                "models that compute different things are not compared; give an unchanged checkout"
            )
        return max(differences)

    def peak_of(self, size: str, setting: Setting, contender: Contender) -> int:
        """Peak memory of a contender in bytes, measured in a process of its own.

        Raises ValueError when that process fails.
        """
        words = [sys.executable, __file__, "--size", size, "--dtype", contender.dtype]
        words += ["--train", "--evaluate", f"--{setting.mode}", setting.text]
        words += ["--device", str(self.device), "--threads", str(self.threads)]
        words += ["--peak-of", contender.model]
        if contender.model == ORIGINAL:
            words += ["--original", str(self.original)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        ended = subprocess.run(words, capture_output=True, text=True, env=environment)
        if ended.returncode:
            reason = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ValueError(
                f"the memory of {contender.model} {contender.dtype} ({size}, {setting.mode} "
                f"{setting.text}) cannot be measured, exit status {ended.returncode}, {reason[0]}: "
                "where memory is short give a smaller size, segment, memory or batch"
            )
        return int(ended.stdout.split()[-1])

    def own_peak(self, model: str) -> int:
        """Peak memory in bytes that a contender adds to this process, in the first setting.

        Raises ValueError when it does not take part.
        """
        before = peak_memory(self.device)
        size, setting = self.sizes[0], self.settings[0]
        contender = Contender(model, self.dtypes[0])
        if contender not in self.contenders(size):
            raise ValueError(
                f"--peak-of is {model!r}, which does not take part with {size} in "
                f"{contender.dtype}: give another --dtype, for {ORIGINAL} also --original"
            )
        if model != ORIGINAL:
            self.original_class = None
        (reader,) = self.readers(size, setting, [contender])
        for tokens in self.draw(size, setting, 2 * setting.segments + 1):
            reader.read(tokens)
        return peak_memory(self.device) - before

    def measure(
        self, size: str, setting: Setting, rates: dict[str, float], peaks: list[int], bar: tqdm
    ) -> list[Measurement]:
        """Time the contenders in turn."""
        contenders = self.contenders(size)
        readers = self.readers(size, setting, contenders)
        cfg, dictionary = configuration(size, setting), vocabulary(size)
        measured = []
        for contender, peak in zip(contenders, peaks, strict=True):
            operations = multiply_adds(cfg, dictionary, setting, contender.model == PLAIN)
            measured.append(
                Measurement(
                    size,
                    setting.mode,
                    setting.text,
                    *contender,
                    setting.segments * setting.segment * setting.batch,
                    setting.segments
                    * operations
                    / rates[FP32 if contender.dtype == FP32 else BF16],
                    peak,
                )
            )
        for tokens in self.draw(size, setting, setting.segments + 1):
            for reader in readers:
                reader.read(tokens)
        for _ in range(self.steps):
            bar.update()
            repeat = self.draw(size, setting, setting.segments)
            for reader, measurement in zip(readers, measured, strict=True):
                synchronize(self.device)
                started = time.perf_counter()
                for tokens in repeat:
                    reader.read(tokens)
                synchronize(self.device)
                measurement.seconds.append(time.perf_counter() - started)
        return measured

    def rates(self) -> dict[str, float]:
        """Multiply-adds a second of this machine in the dtypes of products that take part."""
        dtypes = {c.dtype for size in self.sizes for c in self.contenders(size)}
        rates = {}
        if FP32 in dtypes:
            rates[FP32] = multiply_add_rate(torch.float32, self.device)
        if dtypes != {FP32}:
            rates[BF16] = multiply_add_rate(torch.bfloat16, self.device)
        return rates

    def run(self) -> tuple[list[Measurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        cases = [
            (size, setting, self.contenders(size))
            for size in self.sizes
            for setting in self.settings
        ]
        peaks: list[list[int]] = []
        differences = {}
        steps = sum(len(contenders) + self.steps for _, _, contenders in cases)
        with tqdm(total=steps, desc="benchmark", unit="step", disable=None) as bar:
            # what cannot be compared is refused before anything else is done
            for size, setting, _ in cases if self.original else ():
                differences[f"{size}, {setting.mode} {setting.text}"] = self.check_parity(
                    size, setting
                )
            for size, setting, contenders in cases:
                peaks.append([])
                for contender in contenders:
                    peaks[-1].append(self.peak_of(size, setting, contender))
                    bar.update()
            rates = self.rates()
            measurements = []
            for (size, setting, _), of_case in zip(cases, peaks, strict=True):
                measurements += self.measure(size, setting, rates, of_case, bar)
        return measurements, {
            "hardware": hardware_line(self.device),
            "steps": self.steps,
            "multiply_adds_per_second": rates,
            "largest_loss_difference_fp32": differences,
        }


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line, as they were given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--size", default=["transformer_xl_enwik8_base"], help="presets", **several)
    parser.add_argument("--dtype", default=[FP32], help=f"of {', '.join(DTYPES)} (fp32)", **several)
    settings = {"nargs": "*", "metavar": "SEGMENT/MEMORY/BATCH"}
    parser.add_argument(
        "--train", default=["512/512/2"], help="none, one or more (512/512/2)", **settings
    )
    parser.add_argument(
        "--evaluate",
        default=["512/512/2", "80/2100/1/820"],
        help="none, one or more; with /CLAMP added, distances are clamped there and every token "
        "sees MEMORY tokens (512/512/2 80/2100/1/820)",
        **settings,
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
        choices=MODELS,
        help="only print a model's peak memory in bytes, in the first size, setting and dtype; the "
        "script calls itself with it",
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Do what the options ask for.

    Raises ValueError when that is impossible.
    """
    benchmark = Benchmark(options)
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
    print(f"\n{markdown_table(measurements)}")
    print(EXPLANATION.format(steps=benchmark.steps, rates=", ".join(of_dtypes), hardware=hardware))
    if output:
        write_report(output, measurements, circumstances)
        print(f"written to {short(output)}/benchmark.json and {short(output)}/benchmark.png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    options = parse_options(arguments)
    try:
        run(options)
    except KeyboardInterrupt:
        print("\ninterrupted, nothing was written; the same command starts anew")
        return 130
    except torch.OutOfMemoryError as error:
        print(f"error: {error}: give a smaller size, segment, memory or batch", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
