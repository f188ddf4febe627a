"""Speed of the Weighted Transformer beside fairseq's transformer: a part of `make bench`.

    python -m scripts.benchmark.weighted_transformer [--quick] [--output FOLDER]

Compared are the readings of this package (--branch-residual), the plain transformer of the same
size, and the reading as-written with branches computed one by one, as the paper's equations are:
whole models that train and translate, and, of the reading as-written, output projection and
feed-forward network alone. They take turns: A B C A B C. The authors published no code.

Shapes: B sentences, T tokens of each, N tokens, M branches, d model width, h head width.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchSchedule, BranchWeights
from fairseq_plugins.weighted_transformer.branched_attention import BranchedFeedForward
from fairseq_plugins.weighted_transformer.layers import IN_BRANCHES, IN_NETWORKS, NOWHERE
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights
from fairseq_plugins.weighted_transformer.options import ONE, SUBLAYERS
from scripts.benchmark._benchmark import (
    USUAL_RATE,
    Benchmark,
    add_choices,
    parse_names,
    parse_number,
)
from scripts.benchmark._language_models import make_dictionary
from scripts.benchmark._report import FP32, Entry, Measurement, Report

READINGS = (NOWHERE, SUBLAYERS, IN_NETWORKS, IN_BRANCHES)
PLAIN, LOOP = "transformer", "branch by branch"
MODELS = (*READINGS, PLAIN, LOOP)
SYMBOLS = 8000
BEAM = 4
SIDES = ("encoder", "decoder")
PARTS = MATRICES, TRAINING, GENERATION = ("matrices", "training", "generation")

EXPLANATION = f"""
Models: --branch-residual, fairseq's transformer, and the reading {NOWHERE} {LOOP}.
Setting: tokens, or sentences and tokens of each with a slash between. Matrices: output projection
and feed-forward network, without attention; train is a forward and a backward pass. Whole models
have a joint vocabulary of {SYMBOLS:,} symbols; training is an update with fairseq's Adam, without
its trainer, of random sentences of one length; generation is fairseq's beam search (beam {BEAM}),
counted in tokens of the best translations. Tokens a second: the median repeat of {{steps}}, the
slowest and the fastest. % of peak: what part of the time the multiply-adds of these matrices would
take at the rate measured here ({{rates}} billion a second); 0 where it is not counted.
Machine: {{hardware}}."""


class Size(NamedTuple):
    """Layers of encoder and of decoder, d, inner width and M."""

    layers: int
    width: int
    inner: int
    heads: int


# What each model does, by its name.
Work = dict[str, Callable[[], None]]
SIZES = {"small": Size(3, 256, 1024, 4), "base": Size(6, 512, 2048, 8)}


class BranchByBranch(BranchedFeedForward):
    """Equations 6 and 7 as they are written: each branch by itself, of the model's width."""

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side (…, M·h) to (…, d)."""
        kappa, alpha = self.weights()
        parts = zip(
            heads.chunk(self.branches, dim=-1),
            self.out_proj.weight.chunk(self.branches, dim=1),
            self.fc1.weight.chunk(self.branches),
            self.fc1.bias.chunk(self.branches),
            self.fc2.weight.chunk(self.branches, dim=1),
            strict=True,
        )
        total = 0
        for i, (head, projection, first, bias, second) in enumerate(parts):
            projected = kappa[i] * F.linear(head, projection, self.out_proj.bias)
            inner = self.activation_dropout(self.activation(F.linear(projected, first, bias)))
            total = total + alpha[i] * F.linear(inner, second, self.fc2.bias)
        return total


class ReadingsReport(Report):
    """What was measured of all readings, each beside the plain transformer."""

    def rivals(self) -> dict[str, tuple[tuple[str, ...], str | None]]:
        """Columns of speed ratios."""
        return {f"times {name}": ((name,), None) for name in (PLAIN, LOOP)}

    def ratios(self, row: Measurement) -> dict[str, float | None]:
        """How many times as fast; the branch loop computes the reading as-written alone."""
        ratios = super().ratios(row)
        return ratios if row.model == NOWHERE else {**ratios, f"times {LOOP}": None}

    def is_ours(self, row: Measurement) -> bool:
        """Whether a measurement is of one of the readings."""
        return row.model in READINGS


def build_matrices(size: Size) -> dict[str, nn.Module]:
    """Output projection and feed-forward network of each model that is compared, by its name."""
    torch.manual_seed(1)
    weights = BranchWeights(size.heads, BranchSchedule(1.0, 400))
    merged = BranchedFeedForward(size.width, size.inner, weights)
    loop = BranchByBranch(size.width, size.inner, weights)
    loop.load_state_dict(merged.state_dict())
    projection = nn.Linear(size.width, size.width)
    inner = nn.Linear(size.width, size.inner), nn.ReLU(), nn.Linear(size.inner, size.width)
    plain = nn.Sequential(projection, *inner)
    return {NOWHERE: merged, PLAIN: plain, LOOP: loop}


def build_models(size: Size) -> dict[str, TransformerModel]:
    """Whole models by their names, with dropout of 0.1 and one embedding."""
    symbols = make_dictionary(SYMBOLS)
    task = argparse.Namespace(source_dictionary=symbols, target_dictionary=symbols)
    names = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
    sizes = {f"{side}_{name}": n for side in SIDES for name, n in zip(names, size, strict=True)}
    built = {}
    for name in MODELS:
        plain = name == PLAIN
        arch = "transformer" if plain else "weighted_transformer"
        args = argparse.Namespace(
            **sizes,
            dropout=0.1,
            attention_dropout=0.1,
            share_all_embeddings=True,
            max_source_positions=1024,
            max_target_positions=1024,
            tpu=False,
            branch_residual=name if name in READINGS else NOWHERE,
            branch_sum=ONE,
        )
        ARCH_CONFIG_REGISTRY[arch](args)
        torch.manual_seed(1)
        built[name] = (TransformerModel if plain else WeightedTransformer).build_model(args, task)
    for module in list(built[LOOP].modules()):
        if isinstance(module, BranchedFeedForward):
            module.__class__ = BranchByBranch
    return built


def draw_batch(sentences: int, length: int) -> dict[str, Tensor]:
    """Random sentences (B, T), all of one length: sources, and targets as inputs."""
    generator = torch.Generator().manual_seed(1)
    shape = sentences, length
    source, target = (torch.randint(4, SYMBOLS, shape, generator=generator) for _ in range(2))
    lengths = torch.full((sentences,), length)
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}


def matrices_step(module: nn.Module, heads: Tensor, grad: Tensor) -> Callable[[], None]:
    """A function that does a forward and a backward pass of ``heads`` (N, d)."""
    heads = heads.clone().requires_grad_()

    def step() -> None:
        module.zero_grad(set_to_none=True)
        heads.grad = None
        module(heads).backward(grad)

    return step


def matrices_inference(module: nn.Module, heads: Tensor, grad: Tensor) -> Callable[[], None]:
    """A function that does a forward pass of ``heads`` (N, d) without gradients."""

    @torch.no_grad()
    def infer() -> None:
        module.eval()(heads)

    return infer


def training_step(model: TransformerModel, batch: dict[str, Tensor]) -> Callable[[], None]:
    """A function that does an update with fairseq's Adam."""
    optimizer = AdamWithBranchWeights(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    targets = batch["prev_output_tokens"].flatten()

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        logits = model(**batch)[0].flatten(0, 1)
        F.cross_entropy(logits, targets, label_smoothing=0.1).backward()
        optimizer.step()

    return step


def generation(model: TransformerModel, batch: dict[str, Tensor]) -> Callable[[], None]:
    """A function that translates a batch by beam search, to as many tokens as the sources have."""
    length = batch["src_tokens"].size(1)
    dictionary, lengths = make_dictionary(SYMBOLS), {"max_len_b": length, "min_len": length}
    generator = SequenceGenerator([model], dictionary, beam_size=BEAM, max_len_a=0, **lengths)
    sources = {name: batch[name] for name in ("src_tokens", "src_lengths")}

    def generate() -> None:
        model.eval()
        generator.generate([model], {"net_input": sources})

    return generate


class WeightedTransformerBenchmark(Benchmark):
    """Sizes of --size in parts of --part."""

    models = MODELS
    report_class = ReadingsReport
    size_title = "size, part"
    smaller = "--size small, or fewer --tokens"
    explanation = EXPLANATION
    quick = "--size small --tokens 1024 --steps 3"
    compared = "outputs"
    # outputs are about 1
    tolerance = 1e-4
    tests = "tests/weighted_transformer/test_branched_attention.py"
    measures_memory = False

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add --size, --part, --tokens and --length."""
        add_choices(parser, "--size", SIZES)
        add_choices(parser, "--part", PARTS)
        parser.add_argument("--tokens", default="4096", help="that a step reads (4096)")
        parser.add_argument("--length", default="32", help="tokens of a sentence (32)")

    def parse_cases(self, options: argparse.Namespace) -> list[str]:
        """Each size."""
        self.parts = parse_names("--part", options.part, PARTS)
        self.tokens = parse_number("--tokens", options.tokens)
        self.length = parse_number("--length", options.length)
        return parse_names("--size", options.size, SIZES)

    def entries(self, case: str) -> list[Entry]:
        """All models."""
        return [Entry(model, FP32) for model in MODELS]

    def differences(self, case: str) -> dict[str, float]:
        """The largest difference of the outputs branch by branch from ours."""
        models, batch = build_models(SIZES[case]), draw_batch(2, 8)
        with torch.no_grad():
            ours, loop = (models[of].eval()(**batch)[0] for of in (NOWHERE, LOOP))
        return {LOOP: (ours - loop).abs().max().item()}

    def repeat_seconds(self, case: str) -> float:
        """About how long a repeat of all entries takes on two cores."""
        layers, width, inner, _ = SIZES[case]
        of_layers = layers * (12 * width**2 + 4 * width * inner) + SYMBOLS * width
        # of the matrices a pass trains, another does not, of three models; of the tokens of
        # training one in four is translated, by four beams
        passes = {MATRICES: 4 / (2 * layers), TRAINING: 3, GENERATION: 1}
        models = {MATRICES: 3, TRAINING: len(MODELS), GENERATION: len(MODELS)}
        total = sum(models[part] * passes[part] for part in self.parts)
        return self.tokens * of_layers * total / USUAL_RATE

    def work(self, size: Size, part: str) -> Iterator[tuple[str, str, int, Work]]:
        """Mode, setting, tokens, and what each model does with them."""
        if part == MATRICES:
            heads, grad = torch.randn(2, self.tokens, size.width)
            modules = build_matrices(size)
            for mode, step in [("train", matrices_step), ("inference", matrices_inference)]:
                steps = {name: step(module, heads, grad) for name, module in modules.items()}
                yield mode, str(self.tokens), self.tokens, steps
            return
        training, models = part == TRAINING, build_models(size)
        # beam search takes as long for a quarter of the sentences
        sentences = max(1, self.tokens // self.length // (1 if training else 4))
        batch = draw_batch(sentences, self.length)
        make_step = training_step if training else generation
        steps = {name: make_step(model, batch) for name, model in models.items()}
        mode, setting = "train" if training else "generate", f"{sentences}/{self.length}"
        yield mode, setting, sentences * self.length, steps

    def multiply_adds(self, size: Size, part: str, mode: str, model: str) -> int:
        """Multiply-adds of a repeat's matrices; 0 for what is not counted."""
        if part != MATRICES or model == LOOP:
            return 0
        _, width, inner, heads = size
        passes = 3 if mode == "train" else 1
        if model == PLAIN:
            return passes * self.tokens * width * (width + 2 * inner)
        # head by head into the inner width; forming the product counts in training alone
        once = width * width * inner // heads if mode == "train" else 0
        return passes * (self.tokens * inner * (width // heads + width) + once)

    def measure(self, case: str, memory: dict[Entry, dict[str, int]]) -> list[Measurement]:
        """Time the models in each part in turn."""
        size, measured = SIZES[case], []
        for part in self.parts:
            for mode, setting, tokens, steps in self.work(size, part):
                work = []
                for model, step in steps.items():
                    floor = self.floor_seconds(self.multiply_adds(size, part, mode, model), FP32)
                    name = f"{case}, {part}"
                    row = Measurement(name, mode, setting, model, FP32, tokens, floor)
                    work.append((row, step))
                measured += self.time(work)
        return measured


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return WeightedTransformerBenchmark.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
