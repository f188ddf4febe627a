"""The language model around a segment decoder.

:meth:`SegmentLanguageModel.build_model` assembles the model. A paper's subclass adds its own parts:
how far back it reads, each layer's sublayers, positions, perhaps dropout and initial values.

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

import ast
import logging
import math
from collections.abc import Iterator
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.segment_language_model.adaptive_softmax import BiasedAdaptiveSoftmax
from fairseq_plugins.segment_language_model.attention import (
    FeedForward,
    RelativeAttention,
    SegmentLayer,
)
from fairseq_plugins.segment_language_model.decoder import Context, SegmentDecoder
from fairseq_plugins.segment_language_model.evaluation import evaluate_probs
from fairseq_plugins.segment_language_model.options import (
    SegmentLanguageModelConfig,
    check_config,
    parse_cutoffs,
)
from fairseq_plugins.segment_language_model.recurrence import Recurrence

CHANGED_IN_EVALUATION = ("attention_kernel", "clamp_len", "mem_len", "same_length")

logger = logging.getLogger(__name__)


class SegmentLanguageModel(FairseqLanguageModel):
    """A language model over streams of text, read segment by segment.

    ``added_sublayers`` builds another paper's sublayers from the options, as
    :class:`.MemorySublayers` does. Evaluation logs ``summary``.
    """

    decoder_class = SegmentDecoder
    added_sublayers: type[Any]

    def __init__(self, decoder: SegmentDecoder, summary: str) -> None:
        super().__init__(decoder)
        self.summary = summary
        self.softmax_temperature = 1.0  # the task may set another for evaluation

    @classmethod
    def build_model(cls, cfg: SegmentLanguageModelConfig, task: Any) -> "SegmentLanguageModel":
        """Build the model for the task's dictionary."""
        if isinstance(task, FairseqTask):
            check_task(type(task))
        dictionary = task.source_dictionary
        check_config(cfg, dictionary)
        cls.check_options(cfg)
        dropout = cls.dropout_class(cfg)
        mem_len = cls.recurrence_length(cfg)
        if cfg.same_length and mem_len == 0:
            raise ValueError(
                "--same-length without recurrence leaves nothing to attend to: give --mem-len "
                "(and no --extended-context), or leave --same-length out"
            )
        added = cls.added_sublayers(cfg)
        # each part draws its initial values here, in this order
        embed_tokens = build_embedding(cfg, dictionary)
        layers: list[SegmentLayer] = []
        for attention, feed_forward in cls.build_sublayers(cfg, mem_len):
            feed_forward, added_sublayer = added.place(len(layers) + 1, feed_forward)
            layer = SegmentLayer(
                cfg.decoder_embed_dim,
                attention,
                feed_forward,
                dropout(cfg.dropout),
                cfg.decoder_normalize_before,
                added_sublayer,
                cfg.layer_norm_epsilon,
                added.parallel,
            )
            layers.append(layer)
        output = build_output(cfg, dictionary, embed_tokens)
        relative, absolute = cls.build_positions(cfg)
        layer_norm = None
        if cfg.decoder_normalize_before and not cfg.no_decoder_final_norm:
            layer_norm = nn.LayerNorm(cfg.decoder_embed_dim, cfg.layer_norm_epsilon)
        # √d for embeddings that start with variance 1/d
        small = cfg.share_decoder_input_output_embed or cfg.adaptive_input
        decoder = cls.decoder_class(
            dictionary,
            embed_tokens,
            embed_scale=math.sqrt(cfg.decoder_embed_dim) if small else 1.0,
            layers=layers,
            output=output,
            context=Context(mem_len, cfg.tokens_per_sample + cfg.extended_context, cfg.zero_memory),
            word_dropout=cls.build_word_dropout(cfg, dictionary),
            embed_dropout=dropout(cfg.embed_dropout),
            output_dropout=dropout(cfg.output_dropout),
            positions=relative,
            absolute_positions=absolute,
            layer_norm=layer_norm,
            checkpoint_activations=cfg.checkpoint_activations,
        )
        cls.initialise(decoder, cfg, dictionary)
        summary = summarise(cfg, mem_len) + added.describe()
        model = cls(decoder, f"{summary}, {cls.describe(cfg, mem_len)}")
        added.finish(model)
        attach_digest(model, task)
        return model

    # What a paper's model adds.

    @classmethod
    def check_options(cls, cfg: Any) -> None:
        """Refuse options from which no model can be built."""

    @classmethod
    def recurrence_length(cls, cfg: Any) -> int:
        """Return how many tokens before a segment the layers read."""
        raise NotImplementedError

    @classmethod
    def build_sublayers(
        cls, cfg: Any, mem_len: int
    ) -> Iterator[tuple[RelativeAttention, nn.Module | None]]:
        """Yield each layer's attention and feed-forward sublayer, or None, in order."""
        raise NotImplementedError

    @classmethod
    def build_positions(cls, cfg: Any) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the encodings of distances and of places in a segment, or None for either."""
        raise NotImplementedError

    @classmethod
    def dropout_class(cls, cfg: Any) -> type[nn.Module]:
        """Return the class of dropout for embeddings, sublayers and activations."""
        return nn.Dropout

    @classmethod
    def build_word_dropout(cls, cfg: Any, dictionary: Dictionary) -> nn.Module | None:
        """Return the dropout of whole words, or None."""
        return None

    @classmethod
    def initialise(cls, decoder: SegmentDecoder, cfg: Any, dictionary: Dictionary) -> None:
        """Replace initial values of the decoder."""

    @classmethod
    def describe(cls, cfg: Any, mem_len: int) -> str:
        """Return what the log says about this model's own parts."""
        raise NotImplementedError

    @classmethod
    def build_feed_forward(cls, cfg: SegmentLanguageModelConfig) -> FeedForward | None:
        """Return a layer's feed-forward sublayer, or None."""
        if cfg.decoder_ffn_embed_dim == 0:
            return None
        dropout = cls.dropout_class(cfg)(cfg.activation_dropout)
        return FeedForward(cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, dropout)

    def fit_weights(self, state_dict: dict) -> dict:
        """Return a checkpoint's weights, fitted to this model's options."""
        return state_dict

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        recurrence: Recurrence | None = None,
        start: int | None = None,
    ) -> tuple[Tensor, None]:
        """Score what follows each token, as :meth:`.SegmentDecoder.extract_features` documents."""
        return self.decoder(src_tokens, recurrence=recurrence, start=start)

    def get_normalized_probs(
        self, net_output: tuple[Tensor, Any], log_probs: bool, sample: dict | None = None
    ) -> Tensor:
        """Return (log-)probabilities (B, T, V) by :func:`.evaluate_probs`."""
        temperature = self.softmax_temperature
        # given targets, an adaptive softmax skips other clusters, which a temperature needs
        probs = super().get_normalized_probs(
            net_output, log_probs, sample if temperature == 1 else None
        )
        return evaluate_probs(probs, log_probs, sample, temperature, self.decoder.dictionary)

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Log the recurrence that the figures depend on, and check ``--model-overrides``.

        fairseq would ignore other overrides, or build another model than was trained.
        """
        super().prepare_for_inference_(cfg)
        overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        for name in overrides:
            if name not in CHANGED_IN_EVALUATION:
                raise ValueError(
                    f"--model-overrides names {name!r}, which evaluation cannot change: there are "
                    f"{', '.join(CHANGED_IN_EVALUATION)}"
                )
        temperature = self.softmax_temperature
        tempered = "" if temperature == 1 else f", softmax temperature {temperature}"
        logger.info("%s%s", self.summary, tempered)

    def load_state_dict(self, state_dict: dict, *args: Any, **kwargs: Any):
        """Load weights, fitted to this model's options."""
        fitted = self.added_sublayers.fit_weights(self, self.fit_weights(state_dict))
        return super().load_state_dict(fitted, *args, **kwargs)


def check_task(task: type[FairseqTask]) -> None:
    """Refuse a task that reads no streams: it keeps nothing of earlier segments."""
    if not getattr(task, "reads_streams", False):
        raise ValueError(
            f"the task is {task.__name__}, which keeps no states of earlier segments, so its "
            "figures would be wrong: give --task segment_language_modeling"
        )


def build_embedding(cfg: SegmentLanguageModelConfig, dictionary: Dictionary) -> nn.Module:
    """Return the map of tokens (B, T) to input embeddings (B, T, d)."""
    if cfg.adaptive_input:
        return AdaptiveInput(
            len(dictionary),
            dictionary.pad(),
            cfg.decoder_embed_dim,
            cfg.adaptive_input_factor,
            cfg.decoder_embed_dim,
            parse_cutoffs(cfg, "adaptive_input", dictionary),
        )
    embedding = nn.Embedding(len(dictionary), cfg.decoder_embed_dim, dictionary.pad())
    if cfg.share_decoder_input_output_embed:
        # scaled by √d, embeddings have unit variance, as have the logits from the same weights
        nn.init.normal_(embedding.weight, std=cfg.decoder_embed_dim**-0.5)
        nn.init.zeros_(embedding.weight[dictionary.pad()])
    return embedding


def build_output(
    cfg: SegmentLanguageModelConfig, dictionary: Dictionary, embed_tokens: nn.Module
) -> nn.Module:
    """Return the output projection (B, T, d) -> (B, T, V), or an adaptive softmax."""
    if cfg.adaptive_softmax_cutoff is not None:
        options = (
            len(dictionary),
            cfg.decoder_embed_dim,
            parse_cutoffs(cfg, "adaptive_softmax", dictionary),
            cfg.adaptive_softmax_dropout,
            cfg.adaptive_softmax_factor,
            embed_tokens if cfg.tie_adaptive_weights else None,
            cfg.tie_adaptive_proj,
        )
        if cfg.output_bias:
            head_projection = cfg.tie_adaptive_weights and cfg.adaptive_softmax_factor != 1
            head_projection = head_projection and not cfg.no_adaptive_head_proj
            output = BiasedAdaptiveSoftmax(*options, head_projection, cfg.tie_adaptive_head_proj)
        else:
            output = AdaptiveSoftmax(*options)
        if cfg.tie_adaptive_proj and cfg.adaptive_softmax_factor == 1:
            # the published models do not project bands as wide as the model
            for band in [*embed_tokens.embeddings, *output.tail]:
                band[1 if isinstance(band[0], nn.Embedding) else 0] = nn.Identity()
        if cfg.no_adaptive_head_proj:
            embed_tokens.embeddings[0][1] = nn.Identity()
        return output
    projection = nn.Linear(cfg.decoder_embed_dim, len(dictionary), bias=cfg.output_bias)
    if cfg.share_decoder_input_output_embed:
        projection.weight = embed_tokens.weight
    return projection


def summarise(cfg: SegmentLanguageModelConfig, mem_len: int) -> str:
    """Describe for the log what the figures depend on: recurrence, clamp, same length."""
    summary = (
        f"recurrence {mem_len} tokens, clamp {cfg.clamp_len or 'none'}, "
        f"same length {'yes' if cfg.same_length else 'no'}"
    )
    if cfg.zero_memory:
        summary += ", zero vectors at the start"
    return summary
