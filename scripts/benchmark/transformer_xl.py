"""Speed and memory of transformer_xl by size, segment and memory: a part of `make bench`.

    python -m scripts.benchmark.transformer_xl [--original PATH] [--output FOLDER]

Beside it stand the time that its matrix products alone would take at the rate measured on this
machine, fairseq's own transformer_lm of the same size, without a memory, and, with --original, the
published code with the same weights. A training step is forward, loss and backward, in train() mode
without dropout. The memory is full before the clock starts, and the models take turns: A B C A B C.
"""

import argparse
import sys
from pathlib import Path

from fairseq.data import Dictionary
from torch import nn

from scripts._shared.command_line import command_parser
from scripts.benchmark import _comparison as benchmark_comparison
from scripts.benchmark._baselines import (
    AUTOCAST,
    EVALUATE,
    TRAIN,
    Case,
    Entry,
    Reader,
    Setting,
    choose_entries,
)
from scripts.benchmark._original_transformer_xl import import_original
from scripts.benchmark._transformer_xl_baselines import (
    MODELS,
    build_readers,
    configuration,
    multiply_adds,
    vocabulary,
)

EXPLANATION = """
Setting: segment/memory/batch, in tokens, tokens and streams; with a fourth number, distances are
clamped at it and every token sees as many tokens as the memory has. Tokens a second: the median
repeat of {steps}, the slowest and the fastest. % of peak: the time that the matrix products
alone would take at the rate measured here ({rates} billion multiply-adds a second), over
the time taken. Times: how many times as fast transformer_xl is, median over median of the same run;
transformer_lm has no memory. Peak memory: of a process of its own, with the weights, without the
libraries.
Machine: {hardware}."""


def parse_setting(mode: str, text: str) -> Setting:
    """A setting of --train or --evaluate.

    Raises ValueError when it is none.
    """
    forms = {3: "SEGMENT/MEMORY/BATCH, such as 512/512/2"}
    if mode == EVALUATE:
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


class TransformerXLBenchmark(benchmark_comparison.Benchmark):
    """Presets of transformer_xl in settings of --train and --evaluate."""

    models = MODELS
    module = __spec__.name
    size_title = "size"
    smaller = "a smaller size, segment, memory or batch"
    explanation = EXPLANATION

    def parse_cases(self, options: argparse.Namespace) -> list[Case]:
        """Each size in each setting."""
        settings = [parse_setting(TRAIN, text) for text in dict.fromkeys(options.train)]
        settings += [parse_setting(EVALUATE, text) for text in dict.fromkeys(options.evaluate)]
        if not settings:
            raise ValueError("--train and --evaluate are empty: give one of them a setting")
        sizes = list(dict.fromkeys(options.size))
        for size in sizes:
            configuration(size, settings[0])
        return [Case(size, setting) for size in sizes for setting in settings]

    def import_original(self, path: Path) -> type[nn.Module]:
        """The published model's class."""
        return import_original(path)

    def entries(self, case: Case) -> list[Entry]:
        """Who takes part; adaptive embeddings run under autocast in this package only."""
        chosen = choose_entries(self.models, self.dtypes, self.original is not None)
        if not configuration(*case).adaptive_input:
            return chosen
        return [c for c in chosen if c.dtype != AUTOCAST or c.model == self.models.ours]

    def readers(self, case: Case, entries: list[Entry]) -> list[Reader]:
        """A reader of each of the entries."""
        return build_readers(*case, entries, self.device, self.original_class)

    def dictionary(self, case: Case) -> Dictionary:
        """The symbols of the data set that a size was published for, or as many."""
        return vocabulary(case.size)

    def multiply_adds(self, case: Case, model: str) -> float:
        """Multiply-adds of the matrix products that a model needs for a segment."""
        cfg = configuration(*case)
        return multiply_adds(
            cfg, vocabulary(case.size), case.setting, plain=model == self.models.plain
        )

    def options_of(self, case: Case) -> list[str]:
        """The options that ask for one case."""
        empty = ["--train", "--evaluate"]
        return ["--size", case.size, *empty, f"--{case.setting.mode}", case.setting.text]

    def begin(self, case: Case, readers: list[Reader]) -> None:
        """Nothing: all start with an empty memory."""

    def segments_to_fill(self, case: Case) -> int:
        """Segments to be read until the memory is full."""
        return case.setting.segments

    def segments_of_repeat(self, case: Case, model: str) -> int:
        """Segments that renew the memory once."""
        return case.setting.segments


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line, as they were given."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--size", nargs="+", metavar="NAME", default=["transformer_xl_enwik8_base"], help="presets"
    )
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
    benchmark_comparison.add_options(parser, MODELS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    return benchmark_comparison.main(TransformerXLBenchmark, parse_options(arguments))


if __name__ == "__main__":
    sys.exit(main())
