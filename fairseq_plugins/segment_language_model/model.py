"""The language model around a segment decoder, and the parts of it that options choose.

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

import ast
import difflib
import logging
import math
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import MemorySublayer
from fairseq_plugins.product_key_memory.options import (
    build_memory,
    keep_shards_apart,
    parse_memory_layers,
    watch_memories,
)
from fairseq_plugins.segment_language_model.adaptive_softmax import BiasedAdaptiveSoftmax
from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
from fairseq_plugins.segment_language_model.layer import FeedForward
from fairseq_plugins.segment_language_model.model_config import (
    SegmentLanguageModelConfig,
    parse_cutoffs,
)
from fairseq_plugins.segment_language_model.recurrence import Cursor

CHANGED_IN_EVALUATION = ("clamp_len", "mem_len", "same_length")

logger = logging.getLogger(__name__)


def check_task(task: Any) -> None:
    """Raise ``ValueError`` for a task that would give the model no memory."""
    if isinstance(task, FairseqTask) and not getattr(task, "reads_streams", False):
        raise ValueError(
            f"the task is {type(task).__name__}, which keeps no memory of the segments before, so "
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
            output = BiasedAdaptiveSoftmax(*options, head_projection, cfg.tie_adaptive_head_proj)
        else:
            output = AdaptiveSoftmax(*options)
        if cfg.tie_adaptive_proj and cfg.adaptive_softmax_factor == 1:
            # bands as wide as the model need no projection, and have none in the published models
            for band in [*embed_tokens.embeddings, *output.tail]:
                band[1 if isinstance(band[0], nn.Embedding) else 0] = nn.Identity()
        return output
    projection = nn.Linear(cfg.decoder_embed_dim, len(dictionary), bias=cfg.output_bias)
    if cfg.share_decoder_input_output_embed:
        projection.weight = embed_tokens.weight
    return projection


class SegmentLanguageModel(FairseqLanguageModel):
    """A language model over streams of text, read segment by segment.

    Args:
        decoder: its :class:`SegmentDecoder`.
        summary: memory, clamp and span in words, for the log.
    """

    def __init__(self, decoder: SegmentDecoder, summary: str) -> None:
        super().__init__(decoder)
        self.summary = summary
        keep_shards_apart(self)
        memories = decoder.product_key_memories
        watch_memories(self, {f"memory{number}": memories[number] for number in memories})

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, memory: Cursor | None = None
    ) -> tuple[Tensor, None]:
        """Score what follows each of ``src_tokens`` (B, T); see :meth:`SegmentDecoder.forward`."""
        return self.decoder(src_tokens, memory=memory)

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Say what memory the figures that follow were got with.

        Raises:
            ValueError: ``--model-overrides`` names something else than how far back the model
                reads: fairseq would ignore it, or build another model than was trained.
            FloatingPointError: a weight is not finite, which fused attention may pass over.
        """
        super().prepare_for_inference_(cfg)
        for name, parameter in self.named_parameters():
            if not parameter.isfinite().all():
                raise FloatingPointError(
                    f"{name} has a number that is not finite: the checkpoint is of a training that "
                    "diverged; use an earlier one"
                )
        for name in ast.literal_eval(cfg.common_eval.model_overrides):
            if name not in CHANGED_IN_EVALUATION:
                near = difflib.get_close_matches(name.replace("-", "_"), CHANGED_IN_EVALUATION, n=1)
                there = ", ".join(CHANGED_IN_EVALUATION)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {there}"
                raise ValueError(
                    f"--model-overrides names {name!r}, which evaluation cannot change: {hint}"
                )
        logger.info(self.summary)
        for layer, span in enumerate(self.decoder.spans, start=1):
            tokens = span.tokens()
            logger.info(
                "layer %d: attention spans %.0f tokens in the mean, %.0f at most, ramp included",
                layer,
                tokens.mean(),
                tokens.max(),
            )

    def load_state_dict(self, state_dict: dict, *args: Any, **kwargs: Any):
        """Load weights; those of another, or a fixed, attention span are fitted to this one.

        Raises:
            ValueError: they belong to a dictionary of another size, or to longer or shorter
                segments with learned absolute positions, or have learned spans and this model not.
        """
        rows = sum(
            weight.size(0)
            for name, weight in state_dict.items()
            if name == "decoder.embed_tokens.weight"
            or (name.startswith("decoder.embed_tokens.embeddings.") and name.endswith(".0.weight"))
        )
        if rows != len(self.decoder.dictionary):
            raise ValueError(
                f"the checkpoint has embeddings of {rows} symbols and the dictionary (dict.txt) "
                f"has {len(self.decoder.dictionary)}: use the data that the model was trained with"
            )
        places = state_dict.get("decoder.absolute_positions.weight")
        if places is not None and places.shape != self.decoder.absolute_positions.weight.shape:
            raise ValueError(
                f"the checkpoint has position vectors for segments of {places.size(1)} tokens, and "
                f"this model for {self.decoder.absolute_positions.weight.size(1)}: resume with the "
                "--tokens-per-sample and --extended-context that it was trained with"
            )
        return super().load_state_dict(self._fit_to_span(state_dict), *args, **kwargs)

    def _fit_to_span(self, state_dict: dict) -> dict:
        """Return weights of models with another largest span, or a fixed one, as weights of this.

        Distances that had no vector get the farthest one's; heads see as far as before, or as far
        as they now may.

        Raises:
            ValueError: they have learned spans, and this model does not.
        """
        spans = {f"decoder.layers.{i}.self_attn.span.value" for i in range(len(self.decoder.spans))}
        if not spans and any(name.endswith(".self_attn.span.value") for name in state_dict):
            raise ValueError(
                "the checkpoint has learned attention spans, and this model has none: leave "
                "--adaptive-span as it was trained"
            )
        if spans and spans.isdisjoint(state_dict):
            # heads of a fixed span see all of it
            values = (span.value for span in self.decoder.spans)
            opened = dict(zip(sorted(spans), map(torch.ones_like, values), strict=True))
            state_dict = {**state_dict, **opened}
        trained = state_dict.get("decoder.positions.weight")
        if trained is None or len(trained) == len(self.decoder.positions.weight):
            return state_dict
        before, now = len(trained), len(self.decoder.positions.weight)
        logger.warning(
            "the checkpoint was trained with --attention-span %d, and here it is %d: its position "
            "vectors and learned spans are fitted to it; continue training with --reset-optimizer, "
            "or --finetune-from-model",
            before,
            now,
        )
        added = trained[-1:].expand(max(0, now - before), -1)
        fitted = {**state_dict, "decoder.positions.weight": torch.cat([trained[:now], added])}
        for name, value in state_dict.items():
            if name.endswith(".self_attn.span.value"):
                fitted[name] = (value * before / now).clamp(max=1)
        return fitted


def build_feed_forward(cfg: SegmentLanguageModelConfig, dropout: type[nn.Module]) -> Any:
    """Return a layer's feed-forward sublayer, or None where layers have none."""
    if cfg.decoder_ffn_embed_dim == 0:
        return None
    return FeedForward(
        cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, dropout(cfg.activation_dropout)
    )


def place_memory(
    cfg: SegmentLanguageModelConfig, number: int, feed_forward: nn.Module | None
) -> tuple[nn.Module | None, MemorySublayer | None]:
    """Return the feed-forward sublayer of layer ``number``, from 1, and the memory after it.

    Where the layer has a memory, that takes the place of ``feed_forward``, or with
    ``--memory-interleave`` comes after it (product-key memory, section 3.3).
    """
    if number not in parse_memory_layers(cfg.memory_layers, cfg.decoder_layers, "--memory-layers"):
        return feed_forward, None
    memory = MemorySublayer(build_memory(cfg, cfg.decoder_embed_dim))
    return (feed_forward, memory) if cfg.memory_interleave else (memory, None)


def build_final_norm(cfg: SegmentLanguageModelConfig) -> nn.LayerNorm | None:
    """Return the norm after the last layer, which pre-norm layers need."""
    if not cfg.decoder_normalize_before or cfg.no_decoder_final_norm:
        return None
    return nn.LayerNorm(cfg.decoder_embed_dim)


def summarise(cfg: SegmentLanguageModelConfig, mem_len: int) -> str:
    """Return what a reader of the log needs to trust a figure: memory, clamp, same length."""
    summary = (
        f"memory {mem_len} tokens, clamp {cfg.clamp_len or 'none'}, "
        f"same length {'yes' if cfg.same_length else 'no'}"
    )
    if cfg.zero_memory:
        summary += ", zero vectors at the start"
    if cfg.memory_layers:
        summary += f", product-key memories in layers {cfg.memory_layers}"
    return summary


def embedding_scale(cfg: SegmentLanguageModelConfig) -> float:
    """Return √d for embeddings that start with variance 1/d, 1 for those with variance 1."""
    small = cfg.share_decoder_input_output_embed or cfg.adaptive_input
    return math.sqrt(cfg.decoder_embed_dim) if small else 1.0
