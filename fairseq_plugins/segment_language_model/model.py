"""What the segment models share on fairseq's side: decoder, model, embeddings and output.

Each paper's ``build_model`` builds a :class:`.SegmentNetwork` and puts it between these parts.

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder, FairseqLanguageModel
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from omegaconf import DictConfig
from torch import Tensor, nn

from fairseq_plugins.precision import without_autocast
from fairseq_plugins.product_key_memory.options import warn_without_memories
from fairseq_plugins.segment_language_model.adaptive_softmax import BiasedAdaptiveSoftmax
from fairseq_plugins.segment_language_model.evaluation import check_and_tally
from fairseq_plugins.segment_language_model.network import SegmentNetwork
from fairseq_plugins.segment_language_model.options import (
    SegmentLanguageModelConfig,
    parse_cutoffs,
)
from fairseq_plugins.segment_language_model.past import HiddenStates, Past

if TYPE_CHECKING:
    from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts

logger = logging.getLogger(__name__)


class SegmentDecoder(FairseqDecoder):
    """Embeddings, network and output of a segment language model.

    Args:
        embed_tokens: maps tokens (B, T) to embeddings (B, T, d).
        network: layers that read a segment and its past.
        output: projection to V scores, or an adaptive softmax.
        cfg: has the dropout rates, ``zero_past`` and the length of a training segment.
        dropout: class of the dropout of embeddings and output.
        word_dropout: acts on the embeddings and sees their tokens.
        embed_scale: factor of the embeddings.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        network: SegmentNetwork,
        output: nn.Module,
        cfg: SegmentLanguageModelConfig,
        dropout: type[nn.Module] = nn.Dropout,
        word_dropout: nn.Module | None = None,
        embed_scale: float | None = None,
    ) -> None:
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        # √d for embeddings that start with variance 1/d
        small = cfg.share_decoder_input_output_embed or cfg.adaptive_input
        default_scale = math.sqrt(cfg.decoder_embed_dim) if small else 1.0
        self.embed_scale = default_scale if embed_scale is None else embed_scale
        self.word_dropout = word_dropout
        self.embed_dropout = dropout(cfg.embed_dropout)
        self.network = network
        self.output_dropout = dropout(cfg.output_dropout)
        adaptive = isinstance(output, AdaptiveSoftmax)
        self.adaptive_softmax = output if adaptive else None
        self.output_projection = None if adaptive else output
        self.zero_past = cfg.zero_past or cfg.zero_memory
        # what a model without recurrence sees in generation, its length in training
        self.segment = cfg.tokens_per_sample + cfg.extended_context
        self.masks_padding = bool(cfg.memory_layers)
        if cfg.memory_layers and cfg.memory_interleave:
            from fairseq_plugins.product_key_memory.fairseq_layers import allow_new

            for layer in network.layers:
                if layer.memory is not None:
                    allow_new(layer.memory_layer_norm, cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        past: Past | None = None,
        keep: int | None = None,
    ) -> tuple[Tensor, Past]:
        """Return the final representation (B, T, d) of a segment (B, T), and the next past.

        For ``past`` and ``keep`` see :meth:`.SegmentNetwork.forward`.
        """
        tokens, past = prev_output_tokens, Past() if past is None else past
        # under autocast fairseq's adaptive input gives bands of different types, and fails
        with without_autocast(tokens):
            x = self.embed_scale * self.embed_tokens(tokens)
        if self.word_dropout is not None:
            x = self.word_dropout(x, tokens)
        if self.network.absolute_positions is not None:
            x = self.network.absolute_positions.add_to_embeddings(x, past.next_place)
        x = self.embed_dropout(x)
        if self.zero_past and not past.layers and self.network.mem_len > 0:
            zeros = HiddenStates((x.new_zeros(x.size(0), self.network.mem_len, x.size(2)),))
            past = replace(past, layers=(zeros,) * len(self.network.layers))
        x, past = self.network(x, past, keep, self._padding_mask(tokens))
        return self.output_dropout(x), past

    def _padding_mask(self, tokens: Tensor) -> Tensor | None:
        """Return where ``tokens`` (B, T) are padding, if a memory has to know."""
        if not self.masks_padding:
            return None
        padding_mask = tokens.eq(self.dictionary.pad())
        # on an accelerator, reading the mask would make the host wait
        if tokens.device.type == "cpu" and not padding_mask.any():
            return None
        return padding_mask

    def output_layer(self, features: Tensor) -> Tensor:
        """Map (B, T, d) to scores (B, T, V); the loss applies an adaptive softmax itself."""
        return features if self.output_projection is None else self.output_projection(features)

    def max_positions(self) -> int:
        """Return the most tokens that an input may have; relative positions set no limit."""
        return 1_000_000_000 if self.network.absolute_positions is None else self.segment


class SegmentLanguageModel(FairseqLanguageModel):
    """A language model over streams of text, read segment by segment.

    Evaluation logs ``summary``.
    """

    def __init__(self, decoder: SegmentDecoder, summary: str) -> None:
        super().__init__(decoder)
        self.summary = summary

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        pasts: EnsemblePasts | None = None,
        start: int = 0,
    ) -> tuple[Tensor, None]:
        """Return scores (B, T, V), or the (B, T, d) input of the adaptive softmax; and None.

        ``src_tokens`` (B, T) are the segment at place ``start`` of the streams with these
        ``pasts``, or, without them, a text by itself.
        """
        return self.decoder.output_layer(self.read_segment(src_tokens, pasts, start)), None

    def read_segment(
        self, tokens: Tensor, pasts: EnsemblePasts | None = None, start: int = 0
    ) -> Tensor:
        """Return the final representation (B, T, d) of a segment; ``pasts`` get the next past."""
        if pasts is None:
            return self.decoder.extract_features(tokens, keep=0)[0]
        stream_pasts = pasts[self]
        features, past = self.decoder.extract_features(tokens, past=stream_pasts.before(start))
        stream_pasts.after(past)
        return features

    def get_normalized_probs(
        self, net_output: tuple[Tensor, Any], log_probs: bool, sample: dict | None = None
    ) -> Tensor:
        """Return (log-)probabilities (B, T, V); evaluation checks and tallies the targets."""
        probs = super().get_normalized_probs(net_output, log_probs, sample)
        if sample is not None:
            check_and_tally(probs, log_probs, sample, self.decoder.dictionary)
        return probs

    def learned_spans(self) -> list[Any]:
        """Return the attention spans that training learns, layer by layer; here []."""
        return []

    def prepare_for_inference_(self, cfg: DictConfig) -> None:
        """Log the recurrence that the figures depend on."""
        super().prepare_for_inference_(cfg)
        logger.info(self.summary)


def check_task(task: type) -> None:
    """Refuse a task that reads no streams: it keeps nothing of earlier segments."""
    if not getattr(task, "reads_streams", False):
        raise ValueError(
            f"the task is {task.__name__}, which keeps no past of earlier segments, so its "
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
    if cfg.adaptive_softmax_cutoff is None:
        projection = nn.Linear(cfg.decoder_embed_dim, len(dictionary), bias=cfg.output_bias)
        if cfg.share_decoder_input_output_embed:
            projection.weight = embed_tokens.weight
        return projection
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


def layer_settings(cfg: SegmentLanguageModelConfig) -> dict[str, Any]:
    """Return the arguments of a :class:`.LayerSettings`."""
    settings = {
        "attention_dropout": cfg.attention_dropout,
        "activation_dropout": cfg.activation_dropout,
        "clamp_len": cfg.clamp_len,
        "normalize_before": cfg.decoder_normalize_before,
        "final_norm": not cfg.no_decoder_final_norm,
        "layer_norm_epsilon": cfg.layer_norm_epsilon,
        "memory_interleave": cfg.memory_interleave,
    }
    if not cfg.memory_layers:
        warn_without_memories(cfg, "memory_layers")
        return settings
    from fairseq_plugins.product_key_memory.fairseq_layers import MemoryBuilder

    return settings | {"memory": MemoryBuilder(cfg, cfg.decoder_embed_dim, cfg.decoder_layers)}


def summarise(cfg: SegmentLanguageModelConfig, mem_len: int) -> str:
    """Describe for the log what the figures depend on: recurrence, clamp, same length, memories."""
    summary = (
        f"recurrence {mem_len} tokens, clamp {cfg.clamp_len or 'none'}, "
        f"same length {'yes' if cfg.same_length else 'no'}"
    )
    if cfg.zero_past or cfg.zero_memory:
        summary += ", zero vectors at the start"
    if cfg.memory_layers:
        summary += f", product-key memories in layers {cfg.memory_layers}"
    return summary
