"""Speed and memory of all_attention_lm with adaptive spans: a part of `make bench`.

    python -m scripts.benchmark.all_attention [--original PATH] [--output FOLDER]

Beside it stand the time that its matrix products alone would take at the rate measured on this
machine, the same network with feed-forward sublayers of as many parameters in place of persistent
vectors, and, with --original, the published code with the same weights and spans. A training step
is forward, loss and backward, in train() mode without dropout. The memory is full before the clock
starts, of the same random states for all, and the models take turns: A B C A B C.
"""

import argparse
import sys
from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch import nn

from scripts._shared.command_line import command_parser
from scripts.benchmark import _comparison as benchmark_comparison
from scripts.benchmark._all_attention_baselines import (
    MODELS,
    SIZES,
    SYMBOLS,
    build_readers,
    multiply_adds,
)
from scripts.benchmark._baselines import (
    MODES,
    Case,
    Entry,
    Reader,
    choose_entries,
    make_dictionary,
)
from scripts.benchmark._comparison import parse_names
from scripts.benchmark._original_all_attention import import_original

EXPLANATION = """
Cases: small, 18 layers of width 512, 8 heads, each with 1,024 persistent vectors and a span of 410
tokens, with the ramp 442, of 8,192; tiny, 6 layers of width 256, 4 heads, 512 vectors, span 103,
with the ramp 135, of 1,024; uneven, like small, but one head of each layer has the span of 8,192
tokens, and the others have from 16 to 200, each its own. All have 205 symbols. Setting:
segment/memory/batch, in tokens, tokens that the widest head sees, and streams. Tokens a second: the
median repeat of {steps}, the slowest and the fastest. % of peak: the time that the matrix
products alone, each head's with no more tokens than it sees, would take at the rate measured here
({rates} billion multiply-adds a second), over the time taken. Times: how many times as
fast all_attention_lm is, median over median of the same run; feed-forward is the same network with
feed-forward sublayers of as many parameters in place of persistent vectors. Peak memory: of a
process of its own, with the weights, without the libraries.
Machine: {hardware}."""


class AllAttentionBenchmark(benchmark_comparison.Benchmark):
    """Cases of --case in modes of --mode."""

    models = MODELS
    module = __spec__.name
    size_title = "case"
    smaller = "--case tiny"
    explanation = EXPLANATION

    def parse_cases(self, options: argparse.Namespace) -> list[Case]:
        """Each case in each mode."""
        names = parse_names("--case", options.case, tuple(SIZES))
        modes = parse_names("--mode", options.mode, MODES)
        return [Case(name, SIZES[name].setting(mode)) for name in names for mode in modes]

    def import_original(self, path: Path) -> type[nn.Module]:
        """The published model's class."""
        return import_original(path)

    def entries(self, case: Case) -> list[Entry]:
        """Who takes part."""
        return choose_entries(self.models, self.dtypes, self.original is not None)

    def readers(self, case: Case, entries: list[Entry]) -> list[Reader]:
        """A reader of each of the entries."""
        size, setting = SIZES[case.size], case.setting
        return build_readers(size, setting, entries, self.device, self.original_class)

    def dictionary(self, case: Case) -> Dictionary:
        """As many symbols as enwik8 has."""
        return make_dictionary(SYMBOLS)

    def multiply_adds(self, case: Case, model: str) -> float:
        """Multiply-adds of the matrix products that any of the models needs for a segment."""
        return multiply_adds(SIZES[case.size], case.setting.training)

    def options_of(self, case: Case) -> list[str]:
        """The options that ask for one case."""
        return ["--case", case.size, "--mode", case.setting.mode]

    def begin(self, case: Case, readers: list[Reader]) -> None:
        """Give all readers the same past, as if it had entered each of the layers.

        The published model would start from zero vectors, which it attends to, and takes long to
        read as many tokens as its widest head sees. States after a norm have unit variance.
        """
        size, setting = SIZES[case.size], case.setting
        past = torch.randn(setting.batch, setting.memory, size.width, generator=self.generator)
        for reader in readers:
            reader.remember(past.to(self.device))

    def segments_to_fill(self, case: Case) -> int:
        """None: the past is given."""
        return 0

    def segments_of_repeat(self, case: Case, model: str) -> int:
        """One, where every segment costs the same.

        In evaluation this package's models write new keys and values behind those that they have,
        and now and then move what is left to the front: as many segments as renew the memory.
        """
        if case.setting.training or model == self.models.original:
            return 1
        return case.setting.segments


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line, as they were given."""
    parser = command_parser(__doc__)
    for option, known in (("--case", tuple(SIZES)), ("--mode", MODES)):
        parser.add_argument(
            option,
            nargs="+",
            metavar="NAME",
            default=list(known),
            help=f"of {', '.join(known)} (all)",
        )
    benchmark_comparison.add_options(parser, MODELS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    return benchmark_comparison.main(AllAttentionBenchmark, parse_options(arguments))


if __name__ == "__main__":
    sys.exit(main())
