"""All-attention network: attention layers with persistent vectors in place of feed-forward layers.

Sukhbaatar, Grave, Lample, Jegou, Joulin: Augmenting Self-attention with Persistent Memory
(2019, arXiv:1907.01470).
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.persistent_vectors import SoftmaxFeedForward
from fairseq_plugins.all_attention.presets import PRESETS
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.segment_language_model.attention import (
    HEAD_SPLIT,
    JOINT,
    SINGLE_HEAD,
    SPLIT,
    RelativeAttention,
)
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.decoder import Context, EmbeddingDropout, SegmentDecoder
from fairseq_plugins.segment_language_model.layer import SegmentLayer
from fairseq_plugins.segment_language_model.model import (
    SegmentLanguageModel,
    build_embedding,
    build_feed_forward,
    build_final_norm,
    build_output,
    check_task,
    embedding_scale,
    place_memory,
    summarise,
)
from fairseq_plugins.segment_language_model.model_config import (
    SegmentLanguageModelConfig,
    check_config,
)
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedDistanceTable,
)

FEED_FORWARD = "ff-attn"
VARIANTS = (JOINT, SPLIT, HEAD_SPLIT, SINGLE_HEAD, FEED_FORWARD)


@dataclass
class AllAttentionConfig(SegmentLanguageModelConfig):
    """Options of ``all_attention_lm``."""

    persistent_vectors: int = field(
        default=1024,
        metadata={"help": "persistent key-value pairs a head (N in the paper); 0 for none"},
    )
    persistent_variant: ChoiceEnum(VARIANTS) = field(
        default=JOINT,
        metadata={
            "help": "how persistent vectors take part (section 5.3): all (one softmax with the "
            "context), attn-split (a softmax of their own), head-split (half of the heads see them "
            "alone, the other half the context alone), single-head (attn-split with one head as "
            "wide as the model), ff-attn (a sublayer of its own after the attention)"
        },
    )
    attention_span: int = field(
        default=512,
        metadata={
            "help": "how many tokens before its own a token attends to (L in the paper); with "
            "--adaptive-span at most"
        },
    )
    adaptive_span: bool = field(
        default=False,
        metadata={
            "help": "let each head learn how far it sees; goes with --criterion "
            "span_cross_entropy or span_exact_adaptive_loss"
        },
    )
    span_ramp: int = field(
        default=32,
        metadata={"help": "over how many tokens the mask of an adaptive span falls from 1 to 0"},
    )
    span_init: float = field(
        default=0.0,
        metadata={"help": "adaptive spans start as this part, 0 to 1, of --attention-span"},
    )
    span_epsilon: float = field(
        default=0.0,
        metadata={
            "help": "what is added to the sum of attention weights after the mask of an adaptive "
            "span: models of the published code have 1e-8, which costs a second attention"
        },
    )


@register_model("all_attention_lm", dataclass=AllAttentionConfig)
class AllAttentionLanguageModel(SegmentLanguageModel):
    """All-attention language model (section 4), its ablations (5.3) and adaptive span with FFN."""

    @classmethod
    def build_model(cls, cfg: AllAttentionConfig, task: Any) -> "AllAttentionLanguageModel":
        """Build the model for the task's dictionary.

        Raises:
            ValueError: an option has a value that no such model has, or two do not go together.
        """
        check_task(task)
        dictionary = task.source_dictionary
        check_config(cfg, dictionary)
        _check_options(cfg)
        mem_len = cfg.attention_span if cfg.mem_len is None else cfg.mem_len
        # the context of a token ends before the token itself (section 4.3)
        window = Window(1, mem_len if cfg.same_length else cfg.attention_span)
        embed_tokens = build_embedding(cfg, dictionary)
        decoder = SegmentDecoder(
            dictionary,
            embed_tokens,
            embed_scale=embedding_scale(cfg),
            layers=[_build_layer(cfg, window, n) for n in range(1, cfg.decoder_layers + 1)],
            output=build_output(cfg, dictionary, embed_tokens),
            context=Context(mem_len, cfg.tokens_per_sample + cfg.extended_context, cfg.zero_memory),
            dropout=EmbeddingDropout(
                None, nn.Dropout(cfg.embed_dropout), nn.Dropout(cfg.output_dropout)
            ),
            positions=LearnedRelativePositions(
                cfg.attention_span,
                cfg.decoder_embed_dim // cfg.decoder_attention_heads,
                cfg.clamp_len,
            ),
            layer_norm=build_final_norm(cfg),
            checkpoint_activations=cfg.checkpoint_activations,
        )
        kind = "adaptive attention span up to" if cfg.adaptive_span else "attention span"
        vectors = f"{cfg.persistent_vectors} persistent vectors"
        if cfg.persistent_vectors:
            vectors += f" ({cfg.persistent_variant})"
        return cls(decoder, f"{summarise(cfg, mem_len)}, {kind} {window.farthest}, {vectors}")


def _check_options(cfg: AllAttentionConfig) -> None:
    for option, least in (("persistent_vectors", 0), ("attention_span", 1), ("span_ramp", 1)):
        value = getattr(cfg, option)
        if value < least:
            flag = option.replace("_", "-")
            raise ValueError(f"--{flag} is {value}: it must be at least {least}")
    if not 0 <= cfg.span_init <= 1:
        raise ValueError(
            f"--span-init is {cfg.span_init}: it is a part of --attention-span, from 0 to 1"
        )
    if cfg.span_init > 0 and not cfg.adaptive_span:
        raise ValueError(f"--span-init is {cfg.span_init}: it needs --adaptive-span")
    if not 0 <= cfg.span_epsilon < 1:
        raise ValueError(f"--span-epsilon is {cfg.span_epsilon}: it must be in [0, 1)")
    if cfg.span_epsilon > 0 and not cfg.adaptive_span:
        raise ValueError(f"--span-epsilon is {cfg.span_epsilon}: it needs --adaptive-span")
    if cfg.mem_len is not None and cfg.mem_len > cfg.attention_span:
        raise ValueError(
            f"--mem-len is {cfg.mem_len}: attention reaches no farther back than "
            f"--attention-span, {cfg.attention_span} tokens"
        )
    if cfg.persistent_variant != JOINT and cfg.persistent_vectors == 0:
        raise ValueError(
            f"--persistent-variant is {cfg.persistent_variant} with --persistent-vectors 0: there "
            "are none to place; leave the variant out, or give a number of vectors"
        )
    if cfg.persistent_variant == HEAD_SPLIT and cfg.decoder_attention_heads % 2:
        raise ValueError(
            f"--persistent-variant head-split with --decoder-attention-heads "
            f"{cfg.decoder_attention_heads}: half of them see the context; give an even number"
        )
    if cfg.persistent_variant == FEED_FORWARD and cfg.decoder_ffn_embed_dim:
        raise ValueError(
            f"--decoder-ffn-embed-dim is {cfg.decoder_ffn_embed_dim} with --persistent-variant "
            "ff-attn, whose --persistent-vectors are the feed-forward sublayer: leave it out"
        )


def _build_layer(cfg: AllAttentionConfig, window: Window, number: int) -> SegmentLayer:
    separate = cfg.persistent_variant == FEED_FORWARD
    heads = cfg.decoder_attention_heads
    span = None
    if cfg.adaptive_span:
        see_context = heads // 2 if cfg.persistent_variant == HEAD_SPLIT else heads
        span = AdaptiveSpan(
            see_context, cfg.attention_span, cfg.span_ramp, cfg.span_init, cfg.span_epsilon
        )
    attention = RelativeAttention(
        cfg.decoder_embed_dim,
        heads,
        window,
        SharedDistanceTable(),
        dropout=cfg.attention_dropout,
        num_persistent=0 if separate else cfg.persistent_vectors,
        variant=JOINT if separate else cfg.persistent_variant,
        span=span,
    )
    if separate:
        feed_forward = SoftmaxFeedForward(
            cfg.persistent_vectors, cfg.decoder_embed_dim, cfg.attention_dropout
        )
    else:
        feed_forward = build_feed_forward(cfg, nn.Dropout)
    feed_forward, memory_sublayer = place_memory(cfg, number, feed_forward)
    return SegmentLayer(
        cfg.decoder_embed_dim,
        attention,
        feed_forward,
        nn.Dropout(cfg.dropout),
        cfg.decoder_normalize_before,
        memory_sublayer,
    )


register_presets("all_attention_lm", PRESETS)
