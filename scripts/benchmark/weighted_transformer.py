"""Speed of the Weighted Transformer beside fairseq's transformer: a part of `make bench`.

    python -m scripts.benchmark.weighted_transformer [--output FOLDER]

Compared are the merged computation of this package, the plain transformer of the same size, and
the branches computed one by one, as the paper's equations are written: output projection and
feed-forward network alone, and whole models that train and translate. They take turns: A B C A B C.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from scripts._shared.command_line import command_parser
from scripts._shared.commands import short
from scripts._shared.machine import hardware_line, load_warning, multiply_add_rate
from scripts.benchmark._baselines import FP32
from scripts.benchmark._comparison import parse_names, parse_number
from scripts.benchmark._report import Measurement, Report, check_output
from scripts.benchmark._weighted_transformer_baselines import (
    BEAM,
    MODELS,
    SIZES,
    SYMBOLS,
    build_models,
    build_sublayers,
    check_same_outputs,
    draw_batch,
    generation,
    sublayer_inference,
    sublayer_step,
    training_step,
)

PARTS = SUBLAYERS, TRAINING, GENERATION = ("sublayers", "training", "generation")

EXPLANATION = """
Setting: tokens, or sentences and tokens of each with a slash between. Sublayers: output projection
and feed-forward network, without attention; train is a forward and a backward pass. Whole models
have a joint vocabulary of {symbols:,} symbols; training is an update with fairseq's Adam, without
its trainer, of random sentences of one length; generation is fairseq's beam search (beam {beam}),
counted in tokens of the best translations. Tokens a second: the median repeat of {steps}, the
slowest and the fastest. % of peak: what part of the time the multiply-adds of the merged
computation's or the plain model's sublayers would take at the rate measured here ({rate:,.0f}
billion a second); 0 where it is not counted.
Machine: {hardware}."""


class BranchBenchmark:
    """The comparison that the command line's options ask for.

    Raises ValueError for options that make none.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cpu")
        self.sizes = parse_names("--size", options.size, tuple(SIZES))
        self.parts = parse_names("--part", options.part, PARTS)
        self.tokens = parse_number("--tokens", options.tokens)
        self.length = parse_number("--length", options.length)
        self.steps = parse_number("--steps", options.steps)
        self.threads = parse_number("--threads", options.threads)
        torch.set_num_threads(self.threads)

    def timings(self, work: dict[str, Callable[[], None]], bar: tqdm) -> dict[str, list[float]]:
        """Seconds of each repeat of each entry's work; they take turns."""
        seconds: dict[str, list[float]] = {name: [] for name in work}
        # the first round warms up
        for repeat in range(1 + self.steps):
            bar.update()
            for name, step in work.items():
                started = time.perf_counter()
                step()
                if repeat:
                    seconds[name].append(time.perf_counter() - started)
        return seconds

    def work(self, size: str, part: str) -> dict[tuple[str, str, int], dict[str, Callable]]:
        """What each entry does, by mode, setting and tokens."""
        sentences = max(1, self.tokens // self.length)
        if part == SUBLAYERS:
            heads, grad = torch.randn(2, self.tokens, SIZES[size].width)
            modules = build_sublayers(SIZES[size])
            setting = str(self.tokens)
            return {
                ("train", setting, self.tokens): {
                    name: sublayer_step(module, heads, grad) for name, module in modules.items()
                },
                ("inference", setting, self.tokens): {
                    name: sublayer_inference(module, heads) for name, module in modules.items()
                },
            }
        models = build_models(SIZES[size])
        if part == TRAINING:
            batch = draw_batch(sentences, self.length)
            setting, tokens = f"{sentences}/{self.length}", sentences * self.length
            return {
                ("train", setting, tokens): {
                    name: training_step(model, batch) for name, model in models.items()
                }
            }
        sentences = max(1, sentences // 4)
        batch = draw_batch(sentences, self.length)
        return {
            ("generate", f"{sentences}/{self.length}", sentences * self.length): {
                name: generation(model, batch, self.length) for name, model in models.items()
            }
        }

    def multiply_adds(self, size: str, part: str, mode: str, model: str) -> int:
        """Multiply-adds of a repeat's sublayers; 0 for what is not counted."""
        if part != SUBLAYERS or model == MODELS.original:
            return 0
        _, width, inner, heads = SIZES[size]
        passes = 3 if mode == "train" else 1
        if model == MODELS.plain:
            return passes * self.tokens * width * (width + 2 * inner)
        # head by head into the inner width; forming the product counts in training alone
        once = width * width * inner // heads if mode == "train" else 0
        return passes * (self.tokens * inner * (width // heads + width) + once)

    def run(self) -> tuple[list[Measurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        rate = multiply_add_rate(torch.float32, self.device)
        modes = 2 * (SUBLAYERS in self.parts) + len(set(self.parts) - {SUBLAYERS})
        measurements, differences = [], {}
        total = len(self.sizes) * (1 + modes * (1 + self.steps))
        with tqdm(total=total, desc="benchmark", unit="step", disable=None) as bar:
            for size in self.sizes:
                differences[size] = check_same_outputs(SIZES[size], draw_batch(2, 8))
                bar.update()
                for part in self.parts:
                    for (mode, setting, tokens), work in self.work(size, part).items():
                        for model, seconds in self.timings(work, bar).items():
                            count = self.multiply_adds(size, part, mode, model)
                            measured = Measurement(
                                f"{size}, {part}",
                                mode,
                                setting,
                                model,
                                FP32,
                                tokens,
                                count / rate,
                                0,
                                seconds,
                            )
                            measurements.append(measured)
        return measurements, {
            "hardware": hardware_line(self.device),
            "steps": self.steps,
            "multiply_adds_per_second": rate,
            "largest_output_difference": differences,
        }


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line, as they were given."""
    parser = command_parser(__doc__)
    for option, known in [("--size", tuple(SIZES)), ("--part", PARTS)]:
        parser.add_argument(
            option,
            nargs="+",
            metavar="NAME",
            default=list(known),
            help=f"of {', '.join(known)} (all)",
        )
    parser.add_argument("--tokens", default="4096", help="that a step reads (4096)")
    parser.add_argument("--length", default="32", help="tokens of a sentence (32)")
    parser.add_argument("--steps", default="7", help="repeats that are timed (7)")
    parser.add_argument(
        "--threads", default=str(torch.get_num_threads()), help="of the CPU (all cores)"
    )
    parser.add_argument("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Do what the options ask for.

    Raises ValueError when that is impossible.
    """
    benchmark = BranchBenchmark(options)
    output = options.output.resolve() if options.output else None
    if output:
        check_output(output)
    print(hardware_line(benchmark.device))
    warning = load_warning(os.getloadavg()[0])
    if warning:
        print(warning)
    measurements, circumstances = benchmark.run()
    for size, difference in circumstances["largest_output_difference"].items():
        print(f"{size}: outputs differ by {difference:.1g} at most")
    report = Report(measurements, MODELS, "size, part")
    print(f"\n{report.table()}")
    print(
        EXPLANATION.format(
            symbols=SYMBOLS,
            beam=BEAM,
            steps=benchmark.steps,
            rate=circumstances["multiply_adds_per_second"] / 1e9,
            hardware=circumstances["hardware"],
        )
    )
    if output:
        report.write(output, circumstances)
        print(f"written to {short(output)}/benchmark.json and {short(output)}/benchmark.png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    options = parse_options(arguments)
    try:
        run(options)
    except KeyboardInterrupt:
        print("\ninterrupted, nothing was written; the same command starts anew")
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
