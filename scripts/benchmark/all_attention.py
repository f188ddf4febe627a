"""Speed and memory of all_attention_lm with adaptive spans: a part of `make bench`.

    python -m scripts.benchmark.all_attention [--quick] [--original PATH] [--output FOLDER]

Beside it stand the time that its matrix products alone would take at the rate measured on this
machine, the same network with feed-forward sublayers of as many parameters in place of persistent
vectors, and, with --original, the published code with the same weights and spans. A training step
is forward, loss and backward, in train() mode without dropout. The memory is full before the clock
starts, of the same random states for all, and the models take turns: A B C A B C.

Shapes: B streams, T tokens of a segment, M remembered tokens, H heads, N persistent vectors, V
symbols, d model width.
"""

import argparse
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from scripts.benchmark._benchmark import add_choices, parse_names
from scripts.benchmark._language_models import (
    MODES,
    Case,
    LanguageModelBenchmark,
    MemoryModel,
    Reader,
    make_dictionary,
)
from scripts.benchmark._original import ALL_ATTENTION, OriginalAllAttention, copy_all_attention
from scripts.benchmark._report import Models

MODELS = Models("all_attention_lm", "feed-forward")
SYMBOLS = 205
RAMP = 32
# Where spans are uneven: the shortest and the longest of all heads but one, in tokens.
NARROW = (16, 200)

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


@dataclass(frozen=True)
class Size:
    """A size of the models, with the spans of their heads.

    Args:
        layers: how many.
        width: d.
        heads: H.
        vectors: N, or the inner width of the feed-forward sublayers in their place.
        span: the largest span, in tokens.
        value: every head's span as a part of it; None where they are uneven: one head of each
            layer has the largest, the others have from 16 to 200 tokens.
        segment: T.
        batch: B.
    """

    layers: int
    width: int
    heads: int
    vectors: int
    span: int
    value: float | None
    segment: int
    batch: int

    def span_values(self) -> Tensor:
        """Each head's span as a part of the largest, (layers, H); always the same."""
        shape = (self.layers, self.heads)
        if self.value is not None:
            return torch.full(shape, self.value)
        generator = torch.Generator().manual_seed(1)
        shortest, longest = NARROW
        tokens = torch.randint(shortest, longest + 1, shape, generator=generator)
        widest = torch.randint(self.heads, (self.layers, 1), generator=generator)
        return (tokens / self.span).scatter(1, widest, 1.0)

    def reaches(self) -> Tensor:
        """How many tokens each head sees, those on the ramp included, (layers, H)."""
        seen = RAMP + self.span_values().double() * self.span
        return seen.ceil().long().clamp(max=self.span)


SIZES = {
    "small": Size(18, 512, 8, 1024, 8192, 0.05, 512, 1),
    "tiny": Size(6, 256, 4, 512, 1024, 0.1, 128, 8),
    "uneven": Size(18, 512, 8, 1024, 8192, None, 512, 1),
}


def case_of(name: str, mode: str) -> Case:
    """What is read how; the memory is what the head with the widest span sees."""
    size = SIZES[name]
    return Case(name, mode, size.segment, int(size.reaches().max()), size.batch, SYMBOLS)


def configuration(size: Size, plain: bool = False) -> AllAttentionConfig:
    """Options of a size without dropout; plain for feed-forward sublayers."""
    return AllAttentionConfig(
        decoder_layers=size.layers,
        decoder_embed_dim=size.width,
        decoder_attention_heads=size.heads,
        decoder_ffn_embed_dim=size.vectors if plain else 0,
        persistent_vectors=0 if plain else size.vectors,
        attention_span=size.span,
        adaptive_span=True,
        span_ramp=RAMP,
        output_bias=True,
        tokens_per_sample=size.segment,
        extended_context=0,
    )


def multiply_adds(size: Size, training: bool) -> int:
    """Multiply-adds of the matrix products that a segment needs once the memory is full.

    With n = B*T tokens and r the tokens that a head sees, of which no more are computed than it
    does, a layer takes 4*n*d^2 (projections), for each head 3*n*r*d/H (scores by content and by
    distance, values) and 2*n*N*d: scores and values of persistent vectors, or just as much in
    feed-forward sublayers of inner width N. The output takes n*d*V. Training, but not evaluation,
    which has them from before, projects for each head what it sees of the memory, 2*B*r*d^2/H.

    The gradient takes as much again for each factor of a product that wants one: training is 3
    times the forward pass, but 2 times where one factor is the memory.
    """
    tokens = size.batch * size.segment
    # of all heads and layers, in numbers of the width of a head
    seen = int(size.reaches().sum()) * size.width // size.heads
    forward = size.layers * tokens * (4 * size.width**2 + 2 * size.vectors * size.width)
    forward += 3 * tokens * seen + tokens * size.width * SYMBOLS
    return 3 * forward + 2 * 2 * size.batch * seen * size.width if training else forward


class AllAttentionBenchmark(LanguageModelBenchmark):
    """Cases of --case in modes of --mode."""

    models = MODELS
    published = ALL_ATTENTION
    size_title = "case"
    smaller = "--case tiny"
    explanation = EXPLANATION
    quick = "--case tiny --steps 3"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add --case and --mode."""
        add_choices(parser, "--case", SIZES)
        add_choices(parser, "--mode", MODES)

    def parse_cases(self, options: argparse.Namespace) -> list[Case]:
        """Each case in each mode."""
        names = parse_names("--case", options.case, SIZES)
        modes = parse_names("--mode", options.mode, MODES)
        return [case_of(name, mode) for name in names for mode in modes]

    def multiply_adds(self, case: Case, model: str) -> float:
        """Multiply-adds of the matrix products that any of the models needs for a segment."""
        return multiply_adds(SIZES[case.size], case.training)

    def build_original(self, case: Case) -> nn.Module:
        """The published model."""
        size = SIZES[case.size]
        cfg, spans = configuration(size), size.span_values()
        return OriginalAllAttention(self.original_class, cfg, spans, SYMBOLS)

    def build(self, case: Case, model: str, original: nn.Module | None) -> nn.Module:
        """This package's model with the weights of an original, or with feed-forward sublayers."""
        size, plain = SIZES[case.size], model == MODELS.plain
        task = SimpleNamespace(source_dictionary=make_dictionary(SYMBOLS))
        ours = AllAttentionLanguageModel.build_model(configuration(size, plain), task)
        if original is not None and not plain:
            copy_all_attention(original.model, ours.decoder)
        with torch.no_grad():
            for layer, values in zip(ours.decoder.layers, size.span_values(), strict=True):
                layer.self_attn.span.value.copy_(values)
        return MemoryModel(ours)

    def begin(self, case: Case, readers: list[Reader]) -> int:
        """Give all readers the same full memory, as if it had entered each of the layers.

        The published model would start from zero vectors, which it attends to, and takes long to
        read as many tokens as its widest head sees. States after a norm have unit variance.
        """
        shape = (case.batch, case.memory, SIZES[case.size].width)
        past = torch.randn(shape, generator=self.generator)
        for reader in readers:
            reader.remember(past.to(self.device))
        return 0

    def segments(self, case: Case, model: str) -> int:
        """One, where every segment costs the same.

        In evaluation this package's models write new keys and values behind those that they have,
        and now and then move what is left to the front: as many segments as renew the memory.
        """
        return 1 if case.training or model == MODELS.original else case.segments

    def slowness(self, case: Case) -> float:
        """More where spans are uneven: in the published code all heads see what the widest does."""
        return 20 if SIZES[case.size].value is None else super().slowness(case)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return AllAttentionBenchmark.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
