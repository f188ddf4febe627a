"""The language model that Transformer-XL, all-attention and adaptive span are settings of.

A stack of layers over a segment of text and a memory of the segments before. Four things are
chosen: position encoding, span of the attention, persistent vectors, feed-forward sublayer.

Shapes: B streams, T tokens of a segment, M remembered tokens, V symbols, d model width.
"""

import ast
import difflib
import logging
import math
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_plugins.models.segment_language_model_config import (
    SegmentLanguageModelConfig,
    parse_cutoffs,
)
from fairseq_plugins.modules.segment_layer import SegmentLayer
from fairseq_plugins.modules.segment_memory import Cursor, SegmentMemory
from fairseq_plugins.tasks.segment_language_modeling import SegmentLanguageModelingTask

logger = logging.getLogger(__name__)


def check_task(task: Any) -> None:
    """Raise ``ValueError`` for a task that would give the model no memory."""
    if isinstance(task, FairseqTask) and not isinstance(task, SegmentLanguageModelingTask):
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
        return AdaptiveSoftmax(
            len(dictionary),
            cfg.decoder_embed_dim,
            parse_cutoffs(cfg, "adaptive_softmax", dictionary),
            cfg.adaptive_softmax_dropout,
            cfg.adaptive_softmax_factor,
            embed_tokens if cfg.tie_adaptive_weights else None,
            cfg.tie_adaptive_proj,
        )
    projection = nn.Linear(cfg.decoder_embed_dim, len(dictionary), bias=cfg.output_bias)
    if cfg.share_decoder_input_output_embed:
        projection.weight = embed_tokens.weight
    return projection


class SegmentDecoder(FairseqIncrementalDecoder):
    """Embeddings, layers and output of a segment language model.

    Args:
        dictionary: the symbols.
        embed_tokens: tokens (B, T) to embeddings (B, T, d).
        embed_scale: what the embeddings are multiplied by.
        positions: the farthest distance to position vectors of all distances, falling to -1.
        layers: the layers, first to last.
        output: projection to V scores, or an adaptive softmax.
        mem_len: M, how many tokens before a segment its layers may read.
        dropout: probability of dropping an element of embeddings and final representation.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        embed_scale: float,
        positions: nn.Module,
        layers: list[SegmentLayer],
        output: nn.Module,
        mem_len: int,
        dropout: float,
    ) -> None:
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        self.embed_scale = embed_scale
        self.positions = positions
        self.layers = nn.ModuleList(layers)
        adaptive = isinstance(output, AdaptiveSoftmax)
        self.adaptive_softmax = output if adaptive else None
        self.output_projection = None if adaptive else output
        self.mem_len = mem_len
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[str, Any] | None = None,
        memory: Cursor | None = None,
    ) -> tuple[Tensor, None]:
        """Return the scores of the symbols that may follow each token.

        Args:
            prev_output_tokens: the segment, (B, T); with ``incremental_state`` all tokens so far,
                of which only those it has not seen are computed.
            encoder_out: None; fairseq's generator passes it.
            incremental_state: fairseq's dictionary of one generation.
            memory: the segment's place in its streams; None for a segment without a past, which
                also leaves no trace.

        Returns:
            (B, T, V) scores, or the (B, T, d) input of the adaptive softmax; and None for
            attention, which is not kept.
        """
        features, extra = self.extract_features(
            prev_output_tokens, encoder_out, incremental_state, memory
        )
        return self.output_layer(features), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[str, Any] | None = None,
        memory: Cursor | None = None,
    ) -> tuple[Tensor, None]:
        """Return the final representation (B, T, d); arguments as in :meth:`forward`."""
        if incremental_state is not None:
            generated = incremental_state.setdefault("segment_memory", SegmentMemory())
            memory = generated.at(generated.end(self))
            prev_output_tokens = prev_output_tokens[:, memory.start :]
        # fairseq's adaptive input cannot gather what automatic mixed precision makes of its bands
        with torch.autocast(prev_output_tokens.device.type, enabled=False):
            x = self.embed_scale * self.embed_tokens(prev_output_tokens)
        x = self.dropout(x)
        past = None if memory is None else memory.read(self, like=x)
        remembered = 0 if past is None else past[0][0].size(-2)
        positions = self.positions(remembered + x.size(1) - 1)
        states = []
        for layer, state in zip(self.layers, past or [None] * len(self.layers), strict=True):
            x, state = layer(x, positions, state)
            states.append(state)
        if memory is not None:
            memory.write(self, states, x.size(1), self.mem_len)
        return self.dropout(x), None

    def output_layer(self, features: Tensor) -> Tensor:
        """Map (B, T, d) to scores (B, T, V); the adaptive softmax does its own part later."""
        return features if self.output_projection is None else self.output_projection(features)

    def get_normalized_probs(
        self, net_output: tuple[Tensor, Any], log_probs: bool, sample: dict | None = None
    ) -> Tensor:
        """Return (log-)probabilities of all symbols, (B, T, V).

        Raises:
            FloatingPointError: a target's log-probability is not finite; fairseq-eval-lm would
                leave that token out of its average.
        """
        probs = super().get_normalized_probs(net_output, log_probs, sample)
        if log_probs and sample is not None:
            of_targets = probs.gather(-1, sample["target"].unsqueeze(-1))
            if not of_targets.isfinite().all():
                raise FloatingPointError(
                    "the log-probability of a token is not finite: evaluate without --fp16, or "
                    "look for NaN in the checkpoint"
                )
        return probs

    def reorder_incremental_state(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        """Let beam i go on from beam ``new_order[i]``."""
        if "segment_memory" in incremental_state:
            incremental_state["segment_memory"].reorder(new_order)

    def max_positions(self) -> int:
        """Return how long an input may be: relative positions set no limit."""
        return 1_000_000_000


class SegmentLanguageModel(FairseqLanguageModel):
    """A language model over streams of text, read segment by segment.

    Args:
        decoder: its :class:`SegmentDecoder`.
        summary: memory, clamp and span in words, for the log.
    """

    def __init__(self, decoder: SegmentDecoder, summary: str) -> None:
        super().__init__(decoder)
        self.summary = summary

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, memory: Cursor | None = None
    ) -> tuple[Tensor, None]:
        """Score what follows each of ``src_tokens`` (B, T); see :meth:`SegmentDecoder.forward`."""
        return self.decoder(src_tokens, memory=memory)

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Say what memory the figures that follow were got with.

        Raises:
            ValueError: ``--model-overrides`` names no option of the model; fairseq would ignore it.
        """
        super().prepare_for_inference_(cfg)
        options = sorted(getattr(self, "__dataclass").__dataclass_fields__)
        for name in ast.literal_eval(cfg.common_eval.model_overrides):
            if name not in options:
                near = difflib.get_close_matches(name.replace("-", "_"), options, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(options)}"
                raise ValueError(
                    f"--model-overrides names {name!r}, no option of the model: {hint}"
                )
        logger.info(self.summary)

    def load_state_dict(self, state_dict: dict, *args: Any, **kwargs: Any):
        """Load weights.

        Raises:
            ValueError: they belong to a dictionary of another size, or to another attention span.
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
        trained = state_dict.get("decoder.positions.weight")
        if trained is not None and trained.shape != self.decoder.positions.weight.shape:
            raise ValueError(
                f"the checkpoint has position vectors for {trained.size(0)} distances and "
                f"--attention-span is {self.decoder.positions.weight.size(0)}: leave the span as "
                "it was trained; --mem-len may be changed"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)


def embedding_scale(cfg: SegmentLanguageModelConfig) -> float:
    """Return √d for embeddings that start with variance 1/d, 1 for those with variance 1."""
    small = cfg.share_decoder_input_output_embed or cfg.adaptive_input
    return math.sqrt(cfg.decoder_embed_dim) if small else 1.0
