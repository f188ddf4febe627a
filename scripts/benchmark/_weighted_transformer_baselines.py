"""What a benchmark of the Weighted Transformer compares: sublayers and whole models.

Shapes: B sentences, T tokens of each, N tokens, M branches, d model width, h head width.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchSchedule, BranchWeights
from fairseq_plugins.weighted_transformer.branched_attention import BranchedFeedForward
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights
from scripts.benchmark._baselines import Models

MODELS = Models("merged", "transformer", "branch by branch")
# By how much outputs of the same weights may differ, and how long outputs are beside it: about 1.
TOLERANCE = 1e-4
SYMBOLS = 8000
BEAM = 4


class Size(NamedTuple):
    """Layers of encoder and of decoder, d, inner width and M."""

    layers: int
    width: int
    inner: int
    heads: int


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


class PlainSublayers(nn.Module):
    """Output projection and feed-forward network of a plain transformer, one after the other."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.out_proj = nn.Linear(size.width, size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads side by side (…, d) to (…, d)."""
        return self.fc2(F.relu(self.fc1(self.out_proj(heads))))


def build_sublayers(size: Size) -> dict[str, nn.Module]:
    """Return output projection and feed-forward network of each model, by its name."""
    torch.manual_seed(1)
    weights = BranchWeights(size.heads, BranchSchedule(1.0, 400))
    merged = BranchedFeedForward(size.width, size.inner, weights)
    loop = BranchByBranch(size.width, size.inner, weights)
    loop.load_state_dict(merged.state_dict())
    return {MODELS.ours: merged, MODELS.plain: PlainSublayers(size), MODELS.original: loop}


def dictionary() -> Dictionary:
    """Return a dictionary of SYMBOLS made-up symbols."""
    made = Dictionary()
    for number in range(SYMBOLS - len(made)):
        made.add_symbol(str(number))
    return made


def build_models(size: Size) -> dict[str, TransformerModel]:
    """Return whole models by their names, with dropout of 0.1 and one embedding."""
    symbols = dictionary()
    task = argparse.Namespace(source_dictionary=symbols, target_dictionary=symbols)
    built = {}
    for name in MODELS:
        plain = name == MODELS.plain
        arch = "transformer" if plain else "weighted_transformer"
        args = argparse.Namespace(
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            encoder_embed_dim=size.width,
            decoder_embed_dim=size.width,
            encoder_ffn_embed_dim=size.inner,
            decoder_ffn_embed_dim=size.inner,
            encoder_attention_heads=size.heads,
            decoder_attention_heads=size.heads,
            dropout=0.1,
            attention_dropout=0.1,
            share_all_embeddings=True,
            max_source_positions=1024,
            max_target_positions=1024,
            tpu=False,
        )
        ARCH_CONFIG_REGISTRY[arch](args)
        torch.manual_seed(1)
        built[name] = (TransformerModel if plain else WeightedTransformer).build_model(args, task)
    for module in list(built[MODELS.original].modules()):
        if isinstance(module, BranchedFeedForward):
            module.__class__ = BranchByBranch
    return built


def draw_batch(sentences: int, length: int) -> dict[str, Tensor]:
    """Return random sentences (B, T), all of one length: sources, and targets as inputs."""
    generator = torch.Generator().manual_seed(1)
    shape = sentences, length
    source, target = (torch.randint(4, SYMBOLS, shape, generator=generator) for _ in range(2))
    lengths = torch.full((sentences,), length)
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}


def check_same_outputs(size: Size, batch: dict[str, Tensor]) -> float:
    """Return the largest difference between the outputs of ours and those branch by branch.

    Raises ValueError when one computes something else.
    """
    models = build_models(size)
    with torch.no_grad():
        ours, loop = (models[name].eval()(**batch)[0] for name in (MODELS.ours, MODELS.original))
    difference = (ours - loop).abs().max().item()
    if not difference <= TOLERANCE:
        raise ValueError(
            f"the outputs of {MODELS.ours} and {MODELS.original} differ by {difference:.2g} with "
            f"the same weights (allowed is {TOLERANCE}): speeds of models that compute different "
            "things are not compared; find the wrong one with "
            "tests/weighted_transformer/test_branched_attention.py"
        )
    return difference


def sublayer_step(module: nn.Module, heads: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return a function that does a forward and a backward pass of ``heads`` (N, d)."""
    heads = heads.clone().requires_grad_()

    def step() -> None:
        module.zero_grad(set_to_none=True)
        heads.grad = None
        module(heads).backward(grad)

    return step


def sublayer_inference(module: nn.Module, heads: Tensor) -> Callable[[], None]:
    """Return a function that does a forward pass without gradients."""

    @torch.no_grad()
    def infer() -> None:
        module.eval()
        module(heads)

    return infer


def training_step(model: TransformerModel, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Return a function that does an update with fairseq's Adam."""
    optimizer = AdamWithBranchWeights(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    targets = batch["prev_output_tokens"].flatten()

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        logits = model(**batch)[0].flatten(0, 1)
        F.cross_entropy(logits, targets, label_smoothing=0.1).backward()
        optimizer.step()

    return step


def generation(
    model: TransformerModel, batch: dict[str, Tensor], length: int
) -> Callable[[], None]:
    """Return a function that translates a batch by beam search, ``length`` tokens a sentence."""
    generator = SequenceGenerator(
        [model], dictionary(), beam_size=BEAM, max_len_a=0, max_len_b=length, min_len=length
    )
    sources = {name: batch[name] for name in ("src_tokens", "src_lengths")}

    def generate() -> None:
        model.eval()
        generator.generate([model], {"net_input": sources})

    return generate
