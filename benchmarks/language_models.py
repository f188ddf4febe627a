"""Language models that read the same streams segment by segment, with a full past.

Shapes: B streams, T tokens of a segment, M tokens of the past, d model width.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

from benchmarks.measure import (
    AUTOCAST,
    BF16,
    FP32,
    PUBLISHED,
    TRAINING,
    Case,
    Model,
    Setting,
    Work,
)
from benchmarks.published import PublishedAllAttention, PublishedTransformerXL, translate
from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from fairseq_plugins.segment_language_model.past import HiddenStates, Past
from fairseq_plugins.transformer_xl.model import (
    PRESETS,
    TransformerXLConfig,
    TransformerXLLanguageModel,
)

# number of symbols in enwik8
SYMBOLS = 205
# our model with --compile-layers
COMPILED = "transformer_xl, compiled layers"
# segments whose losses are compared
COMPARED = 2


def make_dictionary() -> Dictionary:
    """Return a dictionary of as many symbols as in enwik8, and fairseq's special symbols."""
    dictionary = Dictionary()
    for number in range(SYMBOLS):
        dictionary.add_symbol(str(number))
    return dictionary


class StreamTask:
    """A task with all that building a segment language model needs."""

    reads_streams = True

    def __init__(self, dictionary: Dictionary) -> None:
        self.source_dictionary = self.target_dictionary = dictionary


class Reader(nn.Module):
    """A language model that reads segment by segment; this base class keeps no past."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def remember(self, past: Tensor) -> None:
        """Start as if ``past`` (B, M, d) had been the input of each layer."""

    def scores(self, tokens: Tensor) -> Tensor:
        """Return the scores of each token's successor."""
        return self.model(tokens)[0]

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first, (B, T) of (B, T + 1)."""
        scores, targets = self.scores(tokens[:, :-1]), tokens[:, 1:]
        flat = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return flat.view_as(targets)


class Ours(Reader):
    """A segment language model of this package."""

    def remember(self, past: Tensor) -> None:  # noqa: D102
        states = (HiddenStates((past,)),) * len(self.model.decoder.network.layers)
        self.past = Past(states, past.size(1))

    def scores(self, tokens: Tensor) -> Tensor:  # noqa: D102
        features, self.past = self.model.decoder.extract_features(tokens, past=self.past)
        return self.model.decoder.output_layer(features)


class XTransformers(Reader):
    """The decoder of x-transformers with its recurrence."""

    def __init__(self, model: nn.Module, depth: int) -> None:
        super().__init__(model)
        self.depth = depth

    def remember(self, past: Tensor) -> None:  # noqa: D102
        self.past = [past] * self.depth

    def scores(self, tokens: Tensor) -> Tensor:  # noqa: D102
        scores, self.past = self.model(tokens, mems=self.past, return_mems=True)
        return scores


def build_plain(cfg: TransformerXLConfig, dictionary: Dictionary) -> Reader:
    """Build fairseq's transformer_lm of the size of a Transformer-XL."""
    names = TransformerLanguageModelConfig.__dataclass_fields__
    options = TransformerLanguageModelConfig(
        **{name: getattr(cfg, name) for name in names if hasattr(cfg, name)},
        decoder_input_dim=cfg.decoder_embed_dim,
        decoder_output_dim=cfg.decoder_embed_dim,
        add_bos_token=False,
        max_target_positions=cfg.tokens_per_sample,
        tpu=False,
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return Reader(TransformerLanguageModel.build_model(options, task))


def build_x_transformers(cfg: TransformerXLConfig, dictionary: Dictionary, rotary: bool) -> Reader:
    """Build x-transformers' decoder of the same size, with T5's position biases or rotary ones."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=cfg.decoder_embed_dim,
        depth=cfg.decoder_layers,
        heads=cfg.decoder_attention_heads,
        attn_dim_head=cfg.decoder_embed_dim // cfg.decoder_attention_heads,
        ff_mult=cfg.decoder_ffn_embed_dim / cfg.decoder_embed_dim,
        rel_pos_bias=not rotary,
        rotary_pos_emb=rotary,
    )
    model = TransformerWrapper(
        num_tokens=len(dictionary),
        max_seq_len=cfg.tokens_per_sample,
        max_mem_len=cfg.mem_len,
        attn_layers=layers,
    )
    return XTransformers(model, cfg.decoder_layers)


class Reading(NamedTuple):
    """How the models of a case read their streams.

    Args:
        name: name of the case.
        mode: TRAINING or EVALUATION.
        past: M.
        streams: B.
        segments: number of segments per turn; in evaluation, enough to renew the past.
        title: our model's name in plots.
    """

    name: str
    mode: str
    past: int
    streams: int
    segments: int = 1
    title: str = ""


def language_model_case(
    paper: str, reading: Reading, cfg: Any, makers: dict[str, Callable[[], nn.Module]]
) -> Case:
    """Return a case of the models that ``makers`` build; a published model has our weights."""
    training = reading.mode == TRAINING

    def build(make: Callable[[], nn.Module], setting: Setting) -> Work:
        past = torch.randn(reading.streams, reading.past, cfg.decoder_embed_dim)
        # symbols are distributed by Zipf's law, without special symbols
        special, symbols = Dictionary().nspecial, len(make_dictionary())
        shape = max(reading.segments, COMPARED), reading.streams, cfg.tokens_per_sample + 1
        tokens = (special * (symbols / special) ** torch.rand(shape)).long()
        tokens = tokens.clamp(max=symbols - 1).to(setting.device)
        model = setting.prepare(make()).train(training)
        states = past.to(next(model.parameters()))
        model.remember(states)

        def turn() -> None:
            for segment in tokens[: reading.segments]:
                with setting.precision(training):
                    loss = model.losses(segment).mean()
                if training:
                    loss.backward()
                    model.zero_grad(set_to_none=True)

        def outputs() -> Tensor:
            model.remember(states)
            with setting.precision(training):
                losses = [model.losses(segment).detach() for segment in tokens[:COMPARED]]
            return torch.stack(losses).view(-1, 1)

        return Work(turn, outputs)

    models = {name: Model(partial(build, make)) for name, make in makers.items()}
    if COMPILED in models:
        models[COMPILED] = models[COMPILED]._replace(same=True, dtypes=(FP32, BF16))
    if PUBLISHED in models:
        models[PUBLISHED] = models[PUBLISHED]._replace(same=True, dtypes=(FP32, AUTOCAST))
    tokens = reading.segments * reading.streams * cfg.tokens_per_sample
    return Case(paper, reading.name, reading.mode, tokens, models, reading.title)


def transformer_xl_case(
    reading: Reading,
    published: type[nn.Module] | None,
    segment: int,
    clamp: int | None = None,
    kernels: Sequence[str] = (),
    **options: int,
) -> Case:
    """Return a case of enwik8_base in segments of T, without dropout; a clamp sets same_length.

    ``kernels`` of attention take part beside the default. The options replace those of the preset.
    """
    preset = PRESETS["transformer_xl_enwik8_base"].items()
    values = {name: value for name, value in preset if "dropout" not in name}
    cfg = TransformerXLConfig(
        **{**values, **options},
        dropout=0.0,
        attention_dropout=0.0,
        tokens_per_sample=segment,
        extended_context=0,
        mem_len=reading.past,
        clamp_len=clamp,
        same_length=clamp is not None,
    )
    dictionary = make_dictionary()
    task = StreamTask(dictionary)

    def build(**options: Any) -> Ours:
        return Ours(TransformerXLLanguageModel.build_model(replace(cfg, **options), task))

    makers: dict[str, Callable[[], nn.Module]] = {"transformer_xl": build}
    for kernel in kernels:
        makers[f"transformer_xl, {kernel}"] = partial(build, attention_kernel=kernel)
    if reading.mode == TRAINING:
        makers[COMPILED] = partial(build, compile_layers=True)
    makers["transformer_lm"] = lambda: build_plain(cfg, dictionary)
    if importlib.util.find_spec("x_transformers"):
        for name, rotary in {"x-transformers": False, "x-transformers, rotary": True}.items():
            makers[name] = partial(build_x_transformers, cfg, dictionary, rotary)
    if published:
        add_published(makers, lambda: PublishedTransformerXL(published, cfg, SYMBOLS + 2))
    return language_model_case("transformer_xl", reading, cfg, makers)


def all_attention_case(
    reading: Reading,
    published: type[nn.Module] | None,
    size: tuple[int, int, int, int, int, int],
    spans: float,
) -> Case:
    """Return a case of an all-attention model and the same network with feed-forward sublayers.

    ``size`` has the numbers of layers, d, heads, persistent vectors, the largest span and T;
    ``spans`` is the span of every head as a fraction of the largest.
    """
    layers, width, heads, vectors, span, segment = size
    cfg = AllAttentionConfig(
        decoder_layers=layers,
        decoder_embed_dim=width,
        decoder_attention_heads=heads,
        decoder_ffn_embed_dim=0,
        persistent_vectors=vectors,
        attention_span=span,
        adaptive_span=True,
        span_ramp=32,
        output_bias=True,
        dropout=0.0,
        tokens_per_sample=segment,
        extended_context=0,
    )
    task = StreamTask(make_dictionary())

    def build(**sizes: int) -> Ours:
        built = AllAttentionLanguageModel.build_model(replace(cfg, **sizes), task)
        for span in built.learned_spans():
            nn.init.constant_(span.value, spans)
        return Ours(built)

    makers = {
        "all_attention_lm": build,
        "feed-forward": lambda: build(decoder_ffn_embed_dim=vectors, persistent_vectors=0),
    }
    if published:
        add_published(makers, lambda: PublishedAllAttention(published, cfg, SYMBOLS + 2, spans))
    return language_model_case("all_attention", reading, cfg, makers)


def add_published(
    makers: dict[str, Callable[[], nn.Module]], make: Callable[[], nn.Module]
) -> None:
    """Add a published model, and let ours, the first and its compiled one, have its weights."""

    def with_their_weights(make_ours: Callable[[], nn.Module]) -> nn.Module:
        theirs, ours = make(), make_ours()
        weights = translate(theirs.model, theirs.options, make_dictionary())
        ours.model.load_state_dict({**ours.model.state_dict(), **weights})
        return ours

    for name in {next(iter(makers)), COMPILED} & makers.keys():
        makers[name] = partial(with_their_weights, makers[name])
    makers[PUBLISHED] = make
