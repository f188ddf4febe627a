"""All-attention network: attention layers with persistent vectors in place of feed-forward layers.

Sukhbaatar, Grave, Lample, Jegou, Joulin: Augmenting Self-attention with Persistent Memory
(2019, arXiv:1907.01470).
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.models import register_model
from torch import nn

from fairseq_plugins.models.presets import register_presets
from fairseq_plugins.models.segment_decoder import Context, EmbeddingDropout, SegmentDecoder
from fairseq_plugins.models.segment_language_model import (
    SegmentLanguageModel,
    build_embedding,
    build_feed_forward,
    build_final_norm,
    build_output,
    check_task,
    embedding_scale,
    summarise,
)
from fairseq_plugins.models.segment_language_model_config import (
    SegmentLanguageModelConfig,
    check_config,
)
from fairseq_plugins.modules.relative_attention import RelativeAttention
from fairseq_plugins.modules.relative_positions import (
    LearnedRelativePositions,
    SharedDistanceTable,
)
from fairseq_plugins.modules.segment_layer import SegmentLayer
from fairseq_plugins.modules.window_attention import Window


@dataclass
class AllAttentionConfig(SegmentLanguageModelConfig):
    """Options of ``all_attention_lm``."""

    persistent_vectors: int = field(
        default=1024,
        metadata={"help": "persistent key-value pairs a head (N in the paper); 0 for none"},
    )
    attention_span: int = field(
        default=512,
        metadata={"help": "how many tokens before its own a token attends to (L in the paper)"},
    )


@register_model("all_attention_lm", dataclass=AllAttentionConfig)
class AllAttentionLanguageModel(SegmentLanguageModel):
    """All-attention language model (section 4) with a fixed span."""

    @classmethod
    def build_model(cls, cfg: AllAttentionConfig, task: Any) -> "AllAttentionLanguageModel":
        """Build the model for the task's dictionary.

        Raises:
            ValueError: an option has a value that no such model has.
        """
        check_task(task)
        dictionary = task.source_dictionary
        check_config(cfg, dictionary)
        if cfg.persistent_vectors < 0:
            raise ValueError(
                f"--persistent-vectors is {cfg.persistent_vectors}: it must be at least 0"
            )
        if cfg.attention_span < 1:
            raise ValueError(f"--attention-span is {cfg.attention_span}: it must be at least 1")
        if cfg.mem_len is not None and cfg.mem_len > cfg.attention_span:
            raise ValueError(
                f"--mem-len is {cfg.mem_len}: attention reaches no farther back than "
                f"--attention-span, {cfg.attention_span} tokens"
            )

        mem_len = cfg.attention_span if cfg.mem_len is None else cfg.mem_len
        # the context of a token ends before the token itself (section 4.3)
        window = Window(1, mem_len if cfg.same_length else cfg.attention_span)
        layers = [
            SegmentLayer(
                cfg.decoder_embed_dim,
                RelativeAttention(
                    cfg.decoder_embed_dim,
                    cfg.decoder_attention_heads,
                    window,
                    SharedDistanceTable(),
                    dropout=cfg.attention_dropout,
                    num_persistent=cfg.persistent_vectors,
                ),
                build_feed_forward(cfg, nn.Dropout),
                nn.Dropout(cfg.dropout),
                cfg.decoder_normalize_before,
            )
            for _ in range(cfg.decoder_layers)
        ]
        embed_tokens = build_embedding(cfg, dictionary)
        decoder = SegmentDecoder(
            dictionary,
            embed_tokens,
            embed_scale=embedding_scale(cfg),
            layers=layers,
            output=build_output(cfg, dictionary, embed_tokens),
            context=Context(mem_len, cfg.tokens_per_sample + cfg.extended_context),
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
        return cls(decoder, f"{summarise(cfg, mem_len)}, attention span {window.farthest}")


register_presets(
    "all_attention_lm",
    {
        "all_attention_lm_tiny": {
            "decoder_layers": 6,
            "decoder_embed_dim": 128,
            "decoder_attention_heads": 4,
            "persistent_vectors": 64,
            "attention_span": 128,
        },
    },
)
