"""Speed and memory of transformer_xl by size, segment and memory: a part of `make bench`.

    python -m scripts.benchmark.transformer_xl [--quick] [--original PATH] [--output FOLDER]

Beside it stand the time that its matrix products alone would take at the rate measured on this
machine, fairseq's own transformer_lm of the same size, without a memory, and, with --original, the
published code with the same weights. A training step is forward, loss and backward, in train() mode
without dropout. The memory is full before the clock starts, and the models take turns: A B C A B C.

Shapes: B streams, T tokens of a segment, M remembered tokens, V symbols, d model width.
"""

import argparse
import math
import sys
from types import SimpleNamespace

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

from fairseq_plugins.transformer_xl.model import (
    PRESETS,
    RELATIVE,
    TransformerXLConfig,
    TransformerXLLanguageModel,
)
from scripts.benchmark._language_models import (
    EVALUATE,
    SPECIAL,
    TRAIN,
    Case,
    LanguageModelBenchmark,
    MemoryModel,
    PlainModel,
    make_dictionary,
)
from scripts.benchmark._original import TRANSFORMER_XL, OriginalTransformerXL, copy_transformer_xl
from scripts.benchmark._report import AUTOCAST, Entry, Models

# Symbols of the data sets that the sizes were published for, and of any other size.
SYMBOLS = {"enwik8": 205, "text8": 27, "wt103": 267_735, "lm1b": 793_471}
SYMBOLS_OF_OTHERS = 205
MODELS = Models("transformer_xl", "transformer_lm")

EXPLANATION = """
Setting: segment/memory/batch, in tokens, tokens and streams; with a fourth number, distances are
clamped at it and every token sees as many tokens as the memory has. Tokens a second: the median
repeat of {steps}, the slowest and the fastest. % of peak: the time that the matrix products
alone would take at the rate measured here ({rates} billion multiply-adds a second), over
the time taken. Times: how many times as fast transformer_xl is, median over median of the same run;
transformer_lm has no memory. Peak memory: of a process of its own, with the weights, without the
libraries.
Machine: {hardware}."""


def symbols_of(size: str) -> int:
    """As many symbols as the data set has that a size was published for."""
    data_set = size.removeprefix("transformer_xl_").split("_")[0]
    return SYMBOLS.get(data_set, SYMBOLS_OF_OTHERS)


def parse_case(size: str, mode: str, text: str) -> Case:
    """A setting of --train or --evaluate for a size.

    Raises ValueError when it is none.
    """
    forms = {3: "SEGMENT/MEMORY/BATCH, such as 512/512/2"}
    if mode == EVALUATE:
        forms[4] = "SEGMENT/MEMORY/BATCH/CLAMP, such as 80/2100/1/820"
    numbers = text.split("/")
    if len(numbers) not in forms or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--{mode} is {text!r}: give {', or '.join(forms.values())}")
    segment, memory, batch, *clamp = map(int, numbers)
    case = Case(size, mode, segment, memory, batch, symbols_of(size), *clamp)
    if 0 in (case.segment, case.batch, case.clamp):
        raise ValueError(f"--{mode} is {text!r}: only the memory may be 0")
    if case.clamp and not case.memory:
        raise ValueError(f"--{mode} is {text!r}: CLAMP goes with a memory, give one or drop CLAMP")
    return case


def configuration(case: Case) -> TransformerXLConfig:
    """Options of a preset for a setting, without dropout."""
    values = {name: value for name, value in PRESETS[case.size].items() if "dropout" not in name}
    return TransformerXLConfig(
        **values,
        tokens_per_sample=case.segment,
        extended_context=0,
        mem_len=case.memory,
        clamp_len=case.clamp,
        same_length=case.clamp is not None,
    )


def cutoffs(cfg: TransformerXLConfig) -> list[int]:
    """Where the bands of the adaptive embeddings end; [] for plain ones."""
    return [int(number) for number in (cfg.adaptive_input_cutoff or "").split(",") if number]


def multiply_adds(case: Case, plain: bool = False) -> float:
    """Multiply-adds of the matrix products that a segment needs; plain for a transformer_lm.

    With f the inner width, n = B*T tokens, P the pairs of a query and a key that it sees and P' the
    pairs of a query and a distance, of which those beyond a clamp are one, a layer takes 4*n*d^2
    (projections) + 2*n*d*f (feed-forward) + 2*B*P*d (scores by content, values) + B*P'*d (scores by
    distance). A plain one has no memory and no scores by distance. Training, but not
    evaluation, which has them from before, projects the memory too, 2*B*M*d^2, and the T + M
    distances, (T + M)*d^2.

    The output takes n*d*V. An adaptive one takes n*d*(frequent symbols + clusters) and, for the
    tokens of a cluster, its width for each of its symbols; bands narrower than the model project
    what is read of them, and what they score. The first band's scores are projected for all tokens.

    The gradient takes as much again for each factor of a product that wants one: training is 3
    times the forward pass, but 2 times where one factor is the memory or the sinusoids.
    """
    cfg, width = configuration(case), configuration(case).decoder_embed_dim
    memory = 0 if plain else case.memory
    tokens = case.batch * case.segment
    farthest = memory if cfg.same_length and not plain else math.inf
    seen = [min(memory + place + 1, farthest) for place in range(case.segment)]
    distances_seen = 0 if plain else sum(min(keys, (case.clamp or math.inf) + 1) for keys in seen)
    layer = 4 * tokens * width**2 + 2 * tokens * width * cfg.decoder_ffn_embed_dim
    layer += (2 * sum(seen) + distances_seen) * case.batch * width
    ends = [*cutoffs(cfg), case.symbols]
    output = tokens * width * (ends[0] + len(ends) - 1)
    narrower = len(ends) > 1 and cfg.adaptive_input_factor > 1
    for band, (start, end) in enumerate(zip([SPECIAL, *ends], ends, strict=False)):
        inner = width // cfg.adaptive_input_factor**band if narrower else width
        in_band = tokens * math.log(end / start) / math.log(case.symbols / SPECIAL)
        if band:
            output += in_band * inner * (end - start)
        if narrower:
            output += in_band * inner * width
            if band or not plain:
                output += (in_band if band else tokens) * inner * width
    forward = cfg.decoder_layers * layer + output
    if not case.training:
        return forward
    distances = 0 if plain else case.segment + memory
    constant = (2 * case.batch * memory + distances) * width**2
    return 3 * forward + 2 * cfg.decoder_layers * constant


def build_plain(cfg: TransformerXLConfig, dictionary: Dictionary) -> TransformerLanguageModel:
    """The transformer_lm of fairseq, of the same size, without dropout."""
    shared = {
        name: getattr(cfg, name)
        for name in TransformerLanguageModelConfig.__dataclass_fields__
        if "dropout" not in name and hasattr(cfg, name)
    }
    options = TransformerLanguageModelConfig(
        **shared,
        decoder_input_dim=cfg.decoder_embed_dim,
        decoder_output_dim=cfg.decoder_embed_dim,
        dropout=0.0,
        add_bos_token=False,
        max_target_positions=cfg.tokens_per_sample,
        tpu=False,
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerLanguageModel.build_model(options, task)


class TransformerXLBenchmark(LanguageModelBenchmark):
    """Presets of transformer_xl in settings of --train and --evaluate."""

    models = MODELS
    published = TRANSFORMER_XL
    size_title = "size"
    smaller = "a smaller size, segment, memory or batch"
    explanation = EXPLANATION
    quick = "--train 128/128/1 --evaluate 64/256/1/128 --steps 2"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add --size, --train and --evaluate."""
        parser.add_argument(
            "--size",
            nargs="+",
            metavar="NAME",
            default=["transformer_xl_enwik8_base"],
            help="presets (transformer_xl_enwik8_base)",
        )
        settings = {"nargs": "*", "metavar": "SEGMENT/MEMORY/BATCH"}
        parser.add_argument(
            "--train", default=["512/512/2"], help="none, one or more (512/512/2)", **settings
        )
        parser.add_argument(
            "--evaluate",
            default=["512/512/2", "80/2100/1/820"],
            help="none, one or more; with /CLAMP added, distances are clamped there and every "
            "token sees MEMORY tokens (512/512/2 80/2100/1/820)",
            **settings,
        )

    def parse_cases(self, options: argparse.Namespace) -> list[Case]:
        """Each size in each setting."""
        settings = [(TRAIN, text) for text in options.train]
        settings += [(EVALUATE, text) for text in options.evaluate]
        if not settings:
            raise ValueError("--train and --evaluate are empty: give one of them a setting")
        known = [
            name
            for name, values in PRESETS.items()
            if values.get("positions", RELATIVE[0]) == RELATIVE[0]
        ]
        for size in options.size:
            if size not in known:
                have = f"presets with a memory, {', '.join(known)}"
                raise ValueError(f"--size is {size!r}: give {have}")
        sized = [parse_case(size, *setting) for size in options.size for setting in settings]
        return list(dict.fromkeys(sized))

    def entries(self, case: Case) -> list[Entry]:
        """Who takes part; adaptive embeddings run under autocast in this package only."""
        chosen = super().entries(case)
        if not configuration(case).adaptive_input:
            return chosen
        return [entry for entry in chosen if entry.dtype != AUTOCAST or entry.model == MODELS.ours]

    def multiply_adds(self, case: Case, model: str) -> float:
        """Multiply-adds of the matrix products that a model needs for a segment."""
        return multiply_adds(case, plain=model == MODELS.plain)

    def build_original(self, case: Case) -> nn.Module:
        """The published model."""
        cfg = configuration(case)
        return OriginalTransformerXL(self.original_class, cfg, cutoffs(cfg), case.symbols)

    def build(self, case: Case, model: str, original: nn.Module | None) -> nn.Module:
        """This package's model with the weights of an original, or fairseq's."""
        cfg, dictionary = configuration(case), make_dictionary(case.symbols)
        if model == MODELS.plain:
            return PlainModel(build_plain(cfg, dictionary))
        task = SimpleNamespace(source_dictionary=dictionary)
        ours = TransformerXLLanguageModel.build_model(cfg, task)
        if original is not None:
            copy_transformer_xl(original.model, ours.decoder)
        return MemoryModel(ours)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return TransformerXLBenchmark.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
