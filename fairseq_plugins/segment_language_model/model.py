"""The language model around a segment decoder, and how a paper's model is put together.

:meth:`SegmentLanguageModel.build_model` assembles every one of them. A paper's model is a subclass
that says what is its own: how far back it reads, each layer's sublayers, positions, perhaps dropout
and initial values.

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

import ast
import difflib
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.checkpoint_files import (
    checkpoint_of,
    weights_loaded_into,
)
from fairseq_plugins.product_key_memory.added_memories import fit_to_memories
from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.options import (
    INSTEAD,
    PARALLEL,
    MemoryBuilder,
    parse_memory_layers,
    placement,
)
from fairseq_plugins.segment_language_model.adaptive_softmax import BiasedAdaptiveSoftmax
from fairseq_plugins.segment_language_model.attention import RelativeAttention
from fairseq_plugins.segment_language_model.decoder import (
    Context,
    EmbeddingDropout,
    SegmentDecoder,
)
from fairseq_plugins.segment_language_model.evaluation import evaluate_probs
from fairseq_plugins.segment_language_model.layer import FeedForward, SegmentLayer
from fairseq_plugins.segment_language_model.model_config import (
    SegmentLanguageModelConfig,
    check_config,
    parse_cutoffs,
)
from fairseq_plugins.segment_language_model.recurrence import Recurrence

CHANGED_IN_EVALUATION = ("attention_kernel", "clamp_len", "mem_len", "same_length")

logger = logging.getLogger(__name__)


class Positions(NamedTuple):
    """How a model knows where tokens are: by their distance, or by their place in a segment.

    ``relative`` encodes distances, and ``absolute`` adds to embeddings or layers; None for nothing.
    """

    relative: nn.Module | None = None
    absolute: nn.Module | None = None


class Dropouts(NamedTuple):
    """The kind of dropout of embeddings, sublayers and activations, and what drops whole words."""

    kind: type[nn.Module] = nn.Dropout
    words: nn.Module | None = None


class SegmentLanguageModel(FairseqLanguageModel):
    """A language model over streams of text, read segment by segment.

    Args:
        decoder: its :class:`SegmentDecoder`.
        summary: recurrence, clamp and what is the model's own in words, for the log.
    """

    decoder_class = SegmentDecoder

    def __init__(self, decoder: SegmentDecoder, summary: str) -> None:
        super().__init__(decoder)
        self.summary = summary
        self.softmax_temperature = 1.0  # of evaluation: the task may set another

    @classmethod
    def build_model(cls, cfg: SegmentLanguageModelConfig, task: Any) -> "SegmentLanguageModel":
        """Build the model for the task's dictionary."""
        check_task(task)
        dictionary = task.source_dictionary
        check_config(cfg, dictionary)
        cls.check_options(cfg)
        dropouts = cls.build_dropouts(cfg, dictionary)
        mem_len = cls.recurrence_length(cfg)
        memories = MemoryBuilder(cfg)
        # each of these draws its initial values, in this order
        embed_tokens = build_embedding(cfg, dictionary)
        layers = [
            build_layer(cfg, number, attention, feed_forward, dropouts.kind(cfg.dropout), memories)
            for number, (attention, feed_forward) in enumerate(
                cls.build_sublayers(cfg, mem_len, dropouts.kind), start=1
            )
        ]
        output = build_output(cfg, dictionary, embed_tokens)
        positions = cls.build_positions(cfg, dropouts.kind)
        # √d for embeddings that start with variance 1/d
        small = cfg.share_decoder_input_output_embed or cfg.adaptive_input
        decoder = cls.decoder_class(
            dictionary,
            embed_tokens,
            embed_scale=math.sqrt(cfg.decoder_embed_dim) if small else 1.0,
            layers=layers,
            output=output,
            context=Context(mem_len, cfg.tokens_per_sample + cfg.extended_context, cfg.zero_memory),
            dropout=EmbeddingDropout(
                dropouts.words, dropouts.kind(cfg.embed_dropout), dropouts.kind(cfg.output_dropout)
            ),
            positions=positions.relative,
            absolute_positions=positions.absolute,
            layer_norm=build_final_norm(cfg),
            checkpoint_activations=cfg.checkpoint_activations,
        )
        cls.initialise(decoder, cfg, dictionary)
        model = cls(decoder, f"{summarise(cfg, mem_len)}, {cls.describe(cfg, mem_len)}")
        memories.finish(model, model.memories_by_name())
        return model

    # What a paper's model says of itself.

    @classmethod
    def check_options(cls, cfg: Any) -> None:
        """Raise ``ValueError`` for options of this model that it cannot be built from."""

    @classmethod
    def recurrence_length(cls, cfg: Any) -> int:
        """Return how many tokens before a segment the layers read."""
        raise NotImplementedError

    @classmethod
    def build_sublayers(
        cls, cfg: Any, mem_len: int, dropout: type[nn.Module]
    ) -> Iterator[tuple[RelativeAttention, nn.Module | None]]:
        """Yield the attention and the feed-forward sublayer, or None, of each layer, in order."""
        raise NotImplementedError

    @classmethod
    def build_positions(cls, cfg: Any, dropout: type[nn.Module]) -> Positions:
        """Return the encoding of distances, or of places."""
        raise NotImplementedError

    @classmethod
    def build_dropouts(cls, cfg: Any, dictionary: Dictionary) -> Dropouts:
        """Return the kinds of dropout."""
        return Dropouts()

    @classmethod
    def initialise(cls, decoder: SegmentDecoder, cfg: Any, dictionary: Dictionary) -> None:
        """Draw initial values other than those that the parts of the decoder drew."""

    @classmethod
    def describe(cls, cfg: Any, mem_len: int) -> str:
        """Return in words what is this model's own, for the log."""
        raise NotImplementedError

    @property
    def product_key_memories(self) -> dict[int, ProductKeyMemory]:
        """Return the product-key memories by the number of their layer, from 1."""
        return {
            number: module
            for number, layer in enumerate(self.decoder.layers, start=1)
            for module in layer.modules()
            if isinstance(module, ProductKeyMemory)
        }

    def memories_by_name(self) -> dict[str, ProductKeyMemory]:
        """Return the memories by the names that validation logs."""
        return {f"memory{number}": memory for number, memory in self.product_key_memories.items()}

    def fit_weights(self, state_dict: dict) -> dict:
        """Return a checkpoint's weights fitted to the options of this model."""
        return state_dict

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        recurrence: Recurrence | None = None,
        start: int | None = None,
    ) -> tuple[Tensor, None]:
        """Score what follows each of ``src_tokens`` (B, T); see :meth:`SegmentDecoder.forward`."""
        return self.decoder(src_tokens, recurrence=recurrence, start=start)

    def get_normalized_probs(
        self, net_output: tuple[Tensor, Any], log_probs: bool, sample: dict | None = None
    ) -> Tensor:
        """Return (log-)probabilities (B, T, V): :func:`.evaluate_probs` of fairseq's."""
        probs = super().get_normalized_probs(net_output, log_probs, sample)
        return evaluate_probs(
            probs, log_probs, sample, self.softmax_temperature, self.decoder.dictionary
        )

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Say with which recurrence the figures that follow are measured.

        ``--model-overrides`` may change how far back the model reads, and its kernel: fairseq would
        ignore others, or build another model than was trained.
        """
        super().prepare_for_inference_(cfg)
        overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        for name in overrides:
            if name not in CHANGED_IN_EVALUATION:
                near = difflib.get_close_matches(name.replace("-", "_"), CHANGED_IN_EVALUATION, n=1)
                there = ", ".join(CHANGED_IN_EVALUATION)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {there}"
                raise ValueError(
                    f"--model-overrides names {name!r}, which evaluation cannot change: {hint}"
                )
        temperature = self.softmax_temperature
        tempered = "" if temperature == 1 else f", softmax temperature {temperature}"
        logger.info("%s%s", self.summary, tempered)

    def load_state_dict(self, state_dict: dict, *args: Any, **kwargs: Any):
        """Load weights, fitted to the options of this model, also those without its memories."""
        rows = sum(
            weight.size(0)
            for name, weight in state_dict.items()
            if name == "decoder.embed_tokens.weight"
            or (name.startswith("decoder.embed_tokens.embeddings.") and name.endswith(".0.weight"))
        )
        if rows != len(self.decoder.dictionary):
            raise ValueError(
                f"{checkpoint_of(state_dict)} has embeddings of {rows} symbols and the dictionary "
                f"(dict.txt) has {len(self.decoder.dictionary)}: use the data that the model was "
                "trained with"
            )
        places = state_dict.get("decoder.absolute_positions.weight")
        if places is not None and places.shape != self.decoder.absolute_positions.weight.shape:
            raise ValueError(
                f"{checkpoint_of(state_dict)} has position vectors for segments of "
                f"{places.size(1)} tokens, and this model for "
                f"{self.decoder.absolute_positions.weight.size(1)}: resume with the "
                "--tokens-per-sample and --extended-context that it was trained with"
            )
        fitted = fit_to_memories(self, self.fit_weights(state_dict))
        with weights_loaded_into(self, state_dict):
            return super().load_state_dict(fitted, *args, **kwargs)


def check_task(task: Any) -> None:
    """Raise ``ValueError`` for a task that would give the model no recurrence."""
    if isinstance(task, FairseqTask) and not getattr(task, "reads_streams", False):
        raise ValueError(
            f"the task is {type(task).__name__}, which keeps no states of the segments before, so "
            "its figures would be wrong: give --task segment_language_modeling"
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
        # unit variance after scaling by √d, and logits of unit variance from the same weights
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
            # bands as wide as the model need no projection, and have none in the published models
            for band in [*embed_tokens.embeddings, *output.tail]:
                band[1 if isinstance(band[0], nn.Embedding) else 0] = nn.Identity()
        if cfg.no_adaptive_head_proj:
            embed_tokens.embeddings[0][1] = nn.Identity()
        return output
    projection = nn.Linear(cfg.decoder_embed_dim, len(dictionary), bias=cfg.output_bias)
    if cfg.share_decoder_input_output_embed:
        projection.weight = embed_tokens.weight
    return projection


def build_feed_forward(cfg: SegmentLanguageModelConfig, dropout: type[nn.Module]) -> Any:
    """Return a layer's feed-forward sublayer, or None where layers have none."""
    if cfg.decoder_ffn_embed_dim == 0:
        return None
    return FeedForward(
        cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, dropout(cfg.activation_dropout)
    )


def build_layer(
    cfg: SegmentLanguageModelConfig,
    number: int,
    attention: RelativeAttention,
    feed_forward: nn.Module | None,
    dropout: nn.Module,
    memories: MemoryBuilder,
) -> SegmentLayer:
    """Return layer ``number``, from 1, around its sublayers.

    A product-key memory takes the place of ``feed_forward`` (product-key memory, section 3.3), or
    with ``--memory-interleave`` comes after it, or with ``--memory-parallel`` beside it.
    """
    memory = None
    if number in parse_memory_layers(cfg.memory_layers, cfg.decoder_layers, "--memory-layers"):
        if placement(cfg) == PARALLEL and feed_forward is None:
            raise ValueError(
                "--memory-parallel with --decoder-ffn-embed-dim 0: layers have no feed-forward "
                "sublayer to stand beside; leave one of the two out"
            )
        memory = MemorySublayer(memories.build(cfg.decoder_embed_dim))
        if placement(cfg) == INSTEAD:
            feed_forward, memory = memory, None
    return SegmentLayer(
        cfg.decoder_embed_dim,
        attention,
        feed_forward,
        dropout,
        cfg.decoder_normalize_before,
        memory,
        cfg.layer_norm_epsilon,
        parallel=placement(cfg) == PARALLEL,
    )


def build_final_norm(cfg: SegmentLanguageModelConfig) -> nn.LayerNorm | None:
    """Return the norm after the last layer, which pre-norm layers need."""
    if not cfg.decoder_normalize_before or cfg.no_decoder_final_norm:
        return None
    return nn.LayerNorm(cfg.decoder_embed_dim, cfg.layer_norm_epsilon)


def summarise(cfg: SegmentLanguageModelConfig, mem_len: int) -> str:
    """Return what a reader of the log needs to trust a figure: recurrence, clamp, same length."""
    summary = (
        f"recurrence {mem_len} tokens, clamp {cfg.clamp_len or 'none'}, "
        f"same length {'yes' if cfg.same_length else 'no'}"
    )
    if cfg.zero_memory:
        summary += ", zero vectors at the start"
    if cfg.memory_layers:
        summary += f", product-key memories in layers {cfg.memory_layers}"
    return summary
