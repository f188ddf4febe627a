"""The models that a benchmark of all_attention_lm compares, and their arithmetic.

Shapes: B streams, T tokens of a segment, M remembered tokens, H heads, N persistent vectors, V
symbols, d model width.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from scripts.benchmark._baselines import (
    Entry,
    MemoryReader,
    Models,
    OriginalReader,
    Reader,
    Setting,
    make_dictionary,
)
from scripts.benchmark._original_all_attention import OriginalModel, copy_weights

MODELS = Models("all_attention_lm", "feed-forward")
SYMBOLS = 205
RAMP = 32
# Where spans are uneven: the shortest and the longest of all heads but one, in tokens.
NARROW = (16, 200)


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

    def setting(self, mode: str) -> Setting:
        """What is read how; the memory is what the head with the widest span sees."""
        return Setting(mode, self.segment, int(self.reaches().max()), self.batch)


SIZES = {
    "small": Size(18, 512, 8, 1024, 8192, 0.05, 512, 1),
    "tiny": Size(6, 256, 4, 512, 1024, 0.1, 128, 8),
    "uneven": Size(18, 512, 8, 1024, 8192, None, 512, 1),
}


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


def build_readers(
    size: Size,
    setting: Setting,
    entries: list[Entry],
    device: torch.device,
    original_class: type[nn.Module] | None = None,
) -> list[Reader]:
    """One reader a entry, the original of that class and ours with the same weights."""
    dictionary, span_values = make_dictionary(SYMBOLS), size.span_values()
    torch.manual_seed(1)
    original = None
    if original_class is not None:
        original = OriginalModel(original_class, configuration(size), span_values, SYMBOLS)

    def build(entry: Entry) -> tuple[type[Reader], nn.Module]:
        if entry.model == MODELS.original:
            return OriginalReader, original
        plain = entry.model == MODELS.plain
        model = AllAttentionLanguageModel.build_model(
            configuration(size, plain), SimpleNamespace(source_dictionary=dictionary)
        )
        if original is not None and not plain:
            copy_weights(original.model, model.decoder)
        with torch.no_grad():
            for layer, values in zip(model.decoder.layers, span_values, strict=True):
                layer.self_attn.span.value.copy_(values)
        return MemoryReader, model

    # all weights are drawn before the first model moves to its device and dtype
    built = [build(entry) for entry in entries]
    return [
        kind(entry, model, setting, device)
        for entry, (kind, model) in zip(entries, built, strict=True)
    ]
