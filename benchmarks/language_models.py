"""Language models that read the same streams segment by segment, with a full memory.

Shapes: B streams, T tokens of a segment, M remembered tokens, d model width.
"""

import copy
import importlib.util
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

from benchmarks.measure import PUBLISHED, TRAINING, Case, Entry, Work, ours_of
from benchmarks.published import (
    PublishedAllAttention,
    PublishedTransformerXL,
    translate,
)
from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from fairseq_plugins.transformer_xl.model import (
    PRESETS,
    TransformerXLConfig,
    TransformerXLLanguageModel,
)

# of enwik8
SYMBOLS = 205
X_TRANSFORMERS = "x-transformers"
# segments whose losses are compared
COMPARED = 2


def make_dictionary() -> Dictionary:
    """A dictionary of as many symbols as enwik8 has, and fairseq's special ones."""
    dictionary = Dictionary()
    for number in range(SYMBOLS):
        dictionary.add_symbol(str(number))
    return dictionary


def token_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Loss (B, T) of each of the targets."""
    flat = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return flat.view_as(targets)


class Ours(nn.Module):
    """A segment language model of this package."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def remember(self, past: Tensor) -> None:
        """Begin as if (B, M, d) had entered each of the layers."""
        decoder, self.recurrence = self.model.decoder, Recurrence()
        states = [HiddenStates(past)] * len(decoder.layers)
        self.recurrence.write(decoder, 0, states, past.size(1), decoder.context.mem_len)

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first, (B, T) of (B, T + 1)."""
        scores, _ = self.model(tokens[:, :-1], recurrence=self.recurrence)
        return token_losses(scores, tokens[:, 1:])


class Plain(nn.Module):
    """fairseq's transformer_lm of the size of a Transformer-XL, without a memory."""

    def __init__(self, cfg: TransformerXLConfig, dictionary: Dictionary) -> None:
        super().__init__()
        names = TransformerLanguageModelConfig.__dataclass_fields__
        shared = {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
        options = TransformerLanguageModelConfig(
            **shared,
            decoder_input_dim=cfg.decoder_embed_dim,
            decoder_output_dim=cfg.decoder_embed_dim,
            add_bos_token=False,
            max_target_positions=cfg.tokens_per_sample,
            tpu=False,
        )
        task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
        self.model = TransformerLanguageModel.build_model(options, task)

    def remember(self, past: Tensor) -> None:
        """Do nothing: it has no memory."""

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first, (B, T) of (B, T + 1)."""
        return token_losses(self.model(tokens[:, :-1])[0], tokens[:, 1:])


class XTransformers(nn.Module):
    """The decoder of x-transformers with its recurrence and T5's relative position biases."""

    def __init__(self, cfg: TransformerXLConfig, dictionary: Dictionary) -> None:
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(
            dim=cfg.decoder_embed_dim,
            depth=cfg.decoder_layers,
            heads=cfg.decoder_attention_heads,
            attn_dim_head=cfg.decoder_embed_dim // cfg.decoder_attention_heads,
            ff_mult=cfg.decoder_ffn_embed_dim / cfg.decoder_embed_dim,
            rel_pos_bias=True,
        )
        self.model = TransformerWrapper(
            num_tokens=len(dictionary),
            max_seq_len=cfg.tokens_per_sample,
            max_mem_len=cfg.mem_len,
            attn_layers=layers,
        )
        self.depth = cfg.decoder_layers

    def remember(self, past: Tensor) -> None:
        """Begin as if (B, M, d) had entered each of the layers."""
        self.memory = [past] * self.depth

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first, (B, T) of (B, T + 1)."""
        scores, self.memory = self.model(tokens[:, :-1], mems=self.memory, return_mems=True)
        return token_losses(scores, tokens[:, 1:])


class LanguageModelCase(Case):
    """A size of a language model, and how streams are read.

    Args:
        name: of the case.
        mode: TRAINING or EVALUATION.
        cfg: options of ours, without dropout.
        memory: M.
        batch: B.
        segments: that a turn reads; in evaluation as many as renew the memory.
        title: what a plot calls the model.
    """

    def __init__(
        self,
        name: str,
        mode: str,
        cfg: Any,
        memory: int,
        batch: int,
        segments: int = 1,
        title: str = "",
    ) -> None:
        super().__init__(name, mode, segments * batch * cfg.tokens_per_sample, title)
        self.cfg, self.memory, self.batch, self.segments = cfg, memory, batch, segments

    @abstractmethod
    def build_published(self, model_class: type[nn.Module]) -> nn.Module:
        """Return the published model."""

    @abstractmethod
    def build_model(self, model: str, dictionary: Dictionary) -> nn.Module:
        """Return one of ``models``."""

    def build(
        self, entries: Sequence[Entry], device: torch.device, published: Mapping[str, Any]
    ) -> list[Work]:
        """Return what the entries do: ours has the published model's weights if that is there."""
        torch.manual_seed(1)
        dictionary, works, theirs = make_dictionary(), [], None
        past = torch.randn(self.batch, self.memory, self.cfg.decoder_embed_dim)
        length = self.cfg.tokens_per_sample + 1
        # as frequent as Zipf's law has symbols, without special ones
        special = dictionary.nspecial
        uniform = torch.rand(max(self.segments, COMPARED), self.batch, length)
        tokens = special * (len(dictionary) / special) ** uniform
        tokens = tokens.long().clamp(max=len(dictionary) - 1).to(device)
        if self.paper in published:
            theirs = self.build_published(published[self.paper])
        for entry in entries:
            torch.manual_seed(2)
            if entry.model == PUBLISHED:
                model = copy.deepcopy(theirs)
            else:
                model = self.build_model(entry.model, dictionary)
            if theirs is not None and entry.model == ours_of(self):
                weights = translate(theirs.model, theirs.options, dictionary)
                model.model.load_state_dict({**model.model.state_dict(), **weights})
            model = entry.prepare(model, device).train(self.mode == TRAINING)
            works.append(self._work(entry, model, tokens, past))
        return works

    def _work(self, entry: Entry, model: nn.Module, tokens: Tensor, past: Tensor) -> Work:
        training, device = self.mode == TRAINING, tokens.device
        states = past.to(device, next(model.parameters()).dtype)
        model.remember(states)

        def turn() -> None:
            for segment in tokens[: self.segments]:
                with entry.precision(device, training):
                    loss = model.losses(segment).mean()
                if training:
                    loss.backward()
                    model.zero_grad(set_to_none=True)

        def outputs() -> Tensor:
            model.remember(states)
            with entry.precision(device, training):
                losses = [model.losses(segment).detach() for segment in tokens[:COMPARED]]
            return torch.stack(losses).view(-1, 1)

        return Work(turn, outputs)


class TransformerXLCase(LanguageModelCase):
    """A Transformer-XL."""

    paper = "transformer_xl"
    models = ("transformer_xl", "transformer_lm", X_TRANSFORMERS)

    def present(self) -> list[str]:
        """Models whose packages are installed."""
        there = importlib.util.find_spec("x_transformers") is not None
        return [model for model in self.models if there or model != X_TRANSFORMERS]

    def build_published(self, model_class: type[nn.Module]) -> nn.Module:
        """Return the published model."""
        return PublishedTransformerXL(model_class, self.cfg, SYMBOLS + 2)

    def build_model(self, model: str, dictionary: Dictionary) -> nn.Module:
        """Return one of ``models``."""
        if model == X_TRANSFORMERS:
            return XTransformers(self.cfg, dictionary)
        if model != ours_of(self):
            return Plain(self.cfg, dictionary)
        task = SimpleNamespace(source_dictionary=dictionary)
        return Ours(TransformerXLLanguageModel.build_model(self.cfg, task))


class AllAttentionCase(LanguageModelCase):
    """An all-attention model, and the same network with feed-forward sublayers of its size."""

    paper = "all_attention"
    models = ("all_attention_lm", "feed-forward")

    def __init__(self, *options: Any, spans: float, **more: Any) -> None:
        super().__init__(*options, **more)
        self.spans = spans

    def build_published(self, model_class: type[nn.Module]) -> nn.Module:
        """Return the published model."""
        return PublishedAllAttention(model_class, self.cfg, SYMBOLS + 2, self.spans)

    def build_model(self, model: str, dictionary: Dictionary) -> nn.Module:
        """Return one of ``models``, with spans."""
        cfg = self.cfg
        if model != ours_of(self):
            sizes = {"decoder_ffn_embed_dim": cfg.persistent_vectors, "persistent_vectors": 0}
            cfg = AllAttentionConfig(**{**vars(cfg), **sizes})
        task = SimpleNamespace(source_dictionary=dictionary)
        built = AllAttentionLanguageModel.build_model(cfg, task)
        for layer in built.decoder.layers:
            nn.init.constant_(layer.self_attn.span.value, self.spans)
        return Ours(built)


def transformer_xl(segment: int, memory: int, clamp: int | None = None, **sizes: Any) -> Any:
    """Options of enwik8_base, without dropout; with a clamp, of the same length."""
    preset = PRESETS["transformer_xl_enwik8_base"].items()
    values = {name: value for name, value in preset if "dropout" not in name}
    return TransformerXLConfig(
        **{**values, **sizes},
        dropout=0.0,
        attention_dropout=0.0,
        tokens_per_sample=segment,
        extended_context=0,
        mem_len=memory,
        clamp_len=clamp,
        same_length=clamp is not None,
    )


def all_attention(
    layers: int, width: int, heads: int, vectors: int, span: int, segment: int
) -> Any:
    """Options without dropout, with adaptive spans."""
    return AllAttentionConfig(
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
