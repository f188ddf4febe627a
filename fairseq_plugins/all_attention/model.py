"""All-attention (Sukhbaatar et al. 2019, arXiv:1907.01470), its ablations, and presets."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import JOINT
from fairseq_plugins.all_attention.network import (
    FEED_FORWARD,
    VARIANTS,
    AllAttentionNetwork,
    AllAttentionSettings,
    learned_spans,
)
from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.options import check_range, flag, naming_options, option
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.segment_language_model.model import (
    SegmentDecoder,
    SegmentLanguageModel,
    build_embedding,
    build_output,
    check_task,
    layer_settings,
    summarise,
)
from fairseq_plugins.segment_language_model.options import (
    PARAMETERS,
    SegmentLanguageModelConfig,
    adaptive_preset,
    check_options,
    compiled_length,
    size_preset,
)
from fairseq_plugins.segment_language_model.positions import LearnedRelativePositions

logger = logging.getLogger(__name__)


@dataclass
class AllAttentionConfig(SegmentLanguageModelConfig):
    """Options of ``all_attention_lm``."""

    persistent_vectors: int = option(
        1024, "number of persistent key-value pairs per head (N in the paper); 0 for none"
    )
    persistent_variant: ChoiceEnum(VARIANTS) = option(
        JOINT,
        "how attention uses persistent vectors (section 5.3): all (in one softmax with the "
        "context), attn-split (in a separate softmax), head-split (half of the heads see only "
        "them, the other half only the context), single-head (attn-split with one head as wide as "
        "the model), ff-attn (in a separate sublayer after attention)",
    )
    attention_span: int = option(
        512,
        "number of earlier tokens that a token attends to (L in the paper); with --adaptive-span "
        "the largest number",
    )
    adaptive_span: bool = option(
        False, "let each head learn its span; use it with --criterion segment_loss --span-loss"
    )
    span_ramp: int = option(
        32, "number of tokens over which the mask of an adaptive span falls from 1 to 0"
    )
    span_init: float = option(
        0.0, "initial value of adaptive spans, as a fraction (0 to 1) of --attention-span"
    )
    span_epsilon: float = option(
        0.0,
        "number added to the sum of attention weights after the mask of an adaptive span; models "
        "of the published code have 1e-8, which costs a second attention",
    )


@register_model("all_attention_lm", dataclass=AllAttentionConfig)
class AllAttentionLanguageModel(SegmentLanguageModel):
    """All-attention language model (section 4), its ablations (5.3), and adaptive span with FFN."""

    @classmethod
    @naming_options(PARAMETERS)
    def build_model(cls, cfg: AllAttentionConfig, task: FairseqTask) -> "AllAttentionLanguageModel":
        """Build the model for the task's dictionary."""
        check_task(type(task))
        dictionary = task.source_dictionary
        mem_len = cfg.attention_span if cfg.mem_len is None else cfg.mem_len
        check_options(cfg, dictionary, mem_len)
        _check_attention(cfg)

        seen = mem_len if cfg.same_length else cfg.attention_span
        settings = AllAttentionSettings(
            **layer_settings(cfg),
            persistent=str(cfg.persistent_variant),
            learned_spans=cfg.adaptive_span,
            span_ramp=cfg.span_ramp,
            span_init=cfg.span_init,
            span_epsilon=cfg.span_epsilon,
            seen=seen,
            ffn_dim=cfg.decoder_ffn_embed_dim,
        )
        embed_tokens = build_embedding(cfg, dictionary)
        with torch.random.fork_rng(devices=[]):  # they are drawn below
            head_dim = cfg.decoder_embed_dim // cfg.decoder_attention_heads
            positions = LearnedRelativePositions(cfg.attention_span, head_dim, cfg.clamp_len)
        network = AllAttentionNetwork(
            cfg.decoder_layers,
            cfg.decoder_embed_dim,
            cfg.decoder_attention_heads,
            cfg.persistent_vectors,
            cfg.attention_span,
            cfg.dropout,
            str(cfg.attention_kernel),
            settings,
            positions,
            mem_len=mem_len,
            checkpoint_activations=cfg.checkpoint_activations,
            compiled_length=compiled_length(cfg),
        )
        output = build_output(cfg, dictionary, embed_tokens)
        # drawn last, so that a seed gives the weights that it always gave
        positions.reset_parameters()
        decoder = SegmentDecoder(dictionary, embed_tokens, network, output, cfg)
        kind = "adaptive attention span up to" if cfg.adaptive_span else "attention span"
        vectors = f"{cfg.persistent_vectors} persistent vectors"
        if cfg.persistent_vectors:
            vectors += f" ({settings.persistent})"
        summary = f"{summarise(cfg, mem_len)}, {kind} {seen}, {vectors}"
        model = cls(decoder, summary)
        attach_digest(model, task)
        return model

    def learned_spans(self) -> list[AdaptiveSpan]:
        """Return the learned spans, layer by layer; [] if spans are fixed."""
        return learned_spans(self.decoder.network)

    def prepare_for_inference_(self, cfg: DictConfig) -> None:
        """Log the learned spans, too."""
        super().prepare_for_inference_(cfg)
        for layer, span in enumerate(self.learned_spans(), start=1):
            tokens = span.tokens()
            logger.info(
                "layer %d: attention spans %.0f tokens on average, %.0f at most, ramp included",
                layer,
                tokens.mean(),
                tokens.max(),
            )


def _check_attention(cfg: AllAttentionConfig) -> None:
    """Refuse spans and persistent vectors that contradict each other or are out of range."""
    check_range(cfg, 0, "persistent_vectors")
    check_range(cfg, 1, "attention_span", "span_ramp")
    check_range(cfg, 0, "span_epsilon", below=1)
    if not 0 <= cfg.span_init <= 1:
        raise ValueError(f"--span-init is {cfg.span_init}: it must be in [0, 1]")
    if cfg.compile_layers and cfg.span_epsilon > 0:
        raise ValueError(
            f"--span-epsilon is {cfg.span_epsilon} with --compile-layers: compiled layers compute "
            "whole spans, and epsilon depends on what is left out; leave one of the two out"
        )
    for name in ("span_init", "span_epsilon"):
        if getattr(cfg, name) > 0 and not cfg.adaptive_span:
            raise ValueError(f"{flag(name)} is {getattr(cfg, name)}: it needs --adaptive-span")
    if cfg.mem_len is not None and cfg.mem_len > cfg.attention_span:
        raise ValueError(
            f"--mem-len is {cfg.mem_len}: attention reaches no farther back than "
            f"--attention-span, {cfg.attention_span} tokens"
        )
    if cfg.persistent_variant != JOINT and cfg.persistent_vectors == 0:
        raise ValueError(
            f"--persistent-variant is {cfg.persistent_variant} with --persistent-vectors 0: "
            "there are none to place; leave the variant out, or give a number of vectors"
        )
    if cfg.persistent_variant == FEED_FORWARD and cfg.decoder_ffn_embed_dim:
        raise ValueError(
            f"--decoder-ffn-embed-dim is {cfg.decoder_ffn_embed_dim} with --persistent-variant "
            "ff-attn, whose --persistent-vectors are the feed-forward sublayer: leave it out"
        )


# The published all-attention and adaptive-span models: sizes, spans, dropouts (section 5.1).

_CHARACTER_SPAN = 8192
_CHARACTERS: dict[str, Any] = {"output_bias": True}


def _adaptive_span(largest: int) -> dict[str, Any]:
    return {"attention_span": largest, "adaptive_span": True}


def _all_attention(layers: int, vectors: int, span: int, dropout: float) -> dict[str, Any]:
    return {
        **size_preset(layers, 512, 8),
        **_adaptive_span(span),
        "persistent_vectors": vectors,
        "attention_dropout": dropout,
    }


def _feed_forward(layers: int, width: int, inner: int, dropout: float) -> dict[str, Any]:
    """Return a transformer with adaptive spans; the published code has one dropout rate."""
    return {
        **size_preset(layers, width, 8),
        **_adaptive_span(_CHARACTER_SPAN),
        "persistent_vectors": 0,
        "decoder_ffn_embed_dim": inner,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        **_CHARACTERS,
    }


# the paper uses the same settings for both character data sets
_SMALL = {**_all_attention(18, 1024, _CHARACTER_SPAN, 0.3), **_CHARACTERS}
_LARGE = {**_all_attention(36, 2048, _CHARACTER_SPAN, 0.4), **_CHARACTERS}
_SMALL_FEED_FORWARD = _feed_forward(12, 512, 2048, 0.3)
_LARGE_FEED_FORWARD = _feed_forward(24, 768, 4096, 0.4)

PRESETS: dict[str, dict[str, Any]] = {
    "all_attention_lm_enwik8_small": _SMALL,
    "all_attention_lm_enwik8_large": _LARGE,
    "all_attention_lm_text8_small": _SMALL,
    "all_attention_lm_text8_large": _LARGE,
    # figure 2, right, FF-attn: section 5.3 has 24 layers and inner size 3072 "to maintain the
    # number of parameters same", but without embeddings that gives 100.7M instead of 113.3M
    "all_attention_lm_text8_large_ff_attn": {
        **_all_attention(24, 3072, _CHARACTER_SPAN, 0.4),
        **_CHARACTERS,
        "persistent_variant": "ff-attn",
    },
    "all_attention_lm_wt103": {
        **_all_attention(36, 2048, 2048, 0.3),
        "embed_dropout": 0.1,
        "output_dropout": 0.1,
        **adaptive_preset("20000,40000,200000", 4),
        "tie_adaptive_head_proj": True,
    },
    # the baselines of tables 1 and 2: Sukhbaatar et al. 2019, arXiv:1905.07799
    "adaptive_span_lm_enwik8_small": _SMALL_FEED_FORWARD,
    "adaptive_span_lm_enwik8_large": _LARGE_FEED_FORWARD,
    "adaptive_span_lm_text8_small": _SMALL_FEED_FORWARD,
    "adaptive_span_lm_text8_large": _LARGE_FEED_FORWARD,
    # the authors' enwik8_small.sh trains this model on one GPU; the paper does not mention it
    "adaptive_span_lm_enwik8_8l": {
        **_feed_forward(8, 256, 1024, 0.0),
        "decoder_attention_heads": 4,
        "attention_span": 1024,
    },
    "all_attention_lm_tiny": {
        **size_preset(6, 128, 4),
        "persistent_vectors": 64,
        "attention_span": 128,
    },
    "adaptive_span_lm_tiny": {
        **size_preset(4, 128, 4, 512),
        **_adaptive_span(256),
        "persistent_vectors": 0,
    },
}

register_presets("all_attention_lm", PRESETS, check_task)
