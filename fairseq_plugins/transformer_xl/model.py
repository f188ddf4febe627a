"""Transformer-XL: segment-level recurrence with relative positions, and its ablations.

Dai, Yang, Yang, Carbonell, Le, Salakhutdinov: Transformer-XL: Attentive Language Models Beyond a
Fixed-Length Context (2019, arXiv:1901.02860).
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.modules import AdaptiveInput
from torch import nn

from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.segment_language_model.absolute_positions import (
    LearnedAbsolutePositions,
    SinusoidalAbsolutePositions,
)
from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED, Window
from fairseq_plugins.segment_language_model.decoder import Context, EmbeddingDropout, SegmentDecoder
from fairseq_plugins.segment_language_model.layer import SegmentLayer
from fairseq_plugins.segment_language_model.model import (
    SegmentLanguageModel,
    build_embedding,
    build_feed_forward,
    build_final_norm,
    build_output,
    check_task,
    place_memory,
    summarise,
)
from fairseq_plugins.segment_language_model.model_config import (
    SegmentLanguageModelConfig,
    check_config,
)
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedDistanceTable,
    ProjectedDistanceTable,
    SinusoidalRelativePositions,
)
from fairseq_plugins.transformer_xl.locked_dropout import LockedDropout, WordDropout
from fairseq_plugins.transformer_xl.presets import PRESETS

RELATIVE = ("transformer-xl", "shaw")
ABSOLUTE = ("learned-absolute", "sinusoidal-absolute")
# The published code draws the projections of adaptive bands narrower than the other weights.
_ADAPTIVE_PROJECTION_STD = 0.01


@dataclass
class TransformerXLConfig(SegmentLanguageModelConfig):
    """Options of ``transformer_xl``."""

    decoder_ffn_embed_dim: int = field(
        default=2048, metadata={"help": "inner width of the feed-forward sublayers"}
    )
    positions: ChoiceEnum([*RELATIVE, *ABSOLUTE]) = field(
        default="transformer-xl",
        metadata={
            "help": "position encoding: transformer-xl (section 3.3), shaw (a learned vector a "
            "distance, without u and v), learned-absolute (a learned vector a place, added in each "
            "layer: Al-Rfou et al. 2018), sinusoidal-absolute (added to the embeddings: Vaswani et "
            "al. 2017); the absolute ones go without a memory"
        },
    )
    untie_r: bool = field(
        default=False,
        metadata={"help": "give each layer vectors u and v of its own, in place of one pair"},
    )
    word_dropout: float = field(
        default=0.0,
        metadata={"help": "dropout of the embeddings of whole words, the same in all the batch"},
    )
    locked_dropout: bool = field(
        default=False,
        metadata={
            "help": "variational dropout: drop the same elements at every token of a segment "
            "(attention weights aside)"
        },
    )
    init_std: float = field(
        default=0.02, metadata={"help": "standard deviation that the weights are drawn with"}
    )


@register_model("transformer_xl", dataclass=TransformerXLConfig)
class TransformerXLLanguageModel(SegmentLanguageModel):
    """Transformer-XL language model (section 3) and the models of its ablation study (4.2)."""

    @classmethod
    def build_model(cls, cfg: TransformerXLConfig, task: Any) -> "TransformerXLLanguageModel":
        """Build the model for the task's dictionary.

        Raises:
            ValueError: an option has a value that no such model has, or two do not go together.
        """
        check_task(task)
        dictionary = task.source_dictionary
        check_config(cfg, dictionary)
        _check_options(cfg)
        mem_len = _memory_length(cfg)
        embed_tokens = build_embedding(cfg, dictionary)
        dropout = _dropout(cfg)
        decoder = SegmentDecoder(
            dictionary,
            embed_tokens,
            embed_scale=cfg.decoder_embed_dim**0.5,
            layers=_build_layers(cfg, mem_len),
            output=build_output(cfg, dictionary, embed_tokens),
            context=Context(mem_len, cfg.tokens_per_sample + cfg.extended_context, cfg.zero_memory),
            dropout=EmbeddingDropout(
                WordDropout(cfg.word_dropout, len(dictionary)),
                dropout(cfg.embed_dropout),
                dropout(cfg.output_dropout),
            ),
            positions=_build_relative_positions(cfg),
            absolute_positions=_build_absolute_positions(cfg),
            layer_norm=build_final_norm(cfg),
            checkpoint_activations=cfg.checkpoint_activations,
        )
        initialise(decoder, cfg.init_std, dictionary)
        return cls(decoder, f"{summarise(cfg, mem_len)}, positions {cfg.positions}")


def _check_options(cfg: TransformerXLConfig) -> None:
    if cfg.positions in ABSOLUTE:
        if cfg.mem_len:
            raise ValueError(
                f"--mem-len is {cfg.mem_len} with --positions {cfg.positions}: a remembered token "
                "and one of the segment at the same place would look alike (Transformer-XL, "
                "section 3.3); give --mem-len 0, or relative positions"
            )
        for option in ("clamp_len", "same_length"):
            if getattr(cfg, option):
                raise ValueError(
                    f"--{option.replace('_', '-')} with --positions {cfg.positions}: it acts on "
                    "distances, which absolute positions do not encode; drop one of the two"
                )
    if cfg.same_length and _memory_length(cfg) == 0:
        raise ValueError(
            "--same-length: without a memory there is nothing to attend to; give --mem-len (and no "
            "--extended-context), or leave --same-length out"
        )
    if cfg.untie_r and cfg.positions != "transformer-xl":
        raise ValueError(
            f"--untie-r with --positions {cfg.positions}: only transformer-xl has vectors u and v"
        )
    if cfg.decoder_embed_dim % 2 and cfg.positions in ("transformer-xl", "sinusoidal-absolute"):
        raise ValueError(
            f"--decoder-embed-dim is {cfg.decoder_embed_dim}: sinusoids need an even width"
        )
    if not 0 <= cfg.word_dropout < 1:
        raise ValueError(f"--word-dropout is {cfg.word_dropout}: it must be in [0, 1)")
    if cfg.init_std <= 0:
        raise ValueError(f"--init-std is {cfg.init_std}: it must be above 0")


def _memory_length(cfg: TransformerXLConfig) -> int:
    if cfg.mem_len is not None:
        return cfg.mem_len
    return 0 if cfg.positions in ABSOLUTE or cfg.extended_context else cfg.tokens_per_sample


def _dropout(cfg: TransformerXLConfig) -> type[nn.Module]:
    return LockedDropout if cfg.locked_dropout else nn.Dropout


def _build_layers(cfg: TransformerXLConfig, mem_len: int) -> list[SegmentLayer]:
    heads, head_dim = (
        cfg.decoder_attention_heads,
        cfg.decoder_embed_dim // cfg.decoder_attention_heads,
    )
    # a token itself is one of the mem_len that each token sees in evaluation at the same length
    window = Window(0, mem_len - 1 if cfg.same_length else UNLIMITED)
    shared_biases = PositionBiases(heads, head_dim)

    def distance_table() -> nn.Module | None:
        if cfg.positions == "transformer-xl":
            return ProjectedDistanceTable(cfg.decoder_embed_dim, heads)
        if cfg.positions == "shaw":
            farthest = max(1, mem_len + cfg.tokens_per_sample + cfg.extended_context - 1)
            return LearnedDistanceTable(heads, min(farthest, cfg.clamp_len or farthest), head_dim)
        return None

    def biases() -> PositionBiases | None:
        if cfg.positions != "transformer-xl":
            return None
        return PositionBiases(heads, head_dim) if cfg.untie_r else shared_biases

    def layer(number: int) -> SegmentLayer:
        attention = RelativeAttention(
            cfg.decoder_embed_dim,
            heads,
            window,
            distance_table(),
            biases(),
            cfg.attention_dropout,
        )
        feed_forward, memory_sublayer = place_memory(
            cfg, number, build_feed_forward(cfg, _dropout(cfg))
        )
        return SegmentLayer(
            cfg.decoder_embed_dim,
            attention,
            feed_forward,
            _dropout(cfg)(cfg.dropout),
            cfg.decoder_normalize_before,
            memory_sublayer,
        )

    return [layer(number) for number in range(1, cfg.decoder_layers + 1)]


def _build_relative_positions(cfg: TransformerXLConfig) -> nn.Module | None:
    if cfg.positions == "transformer-xl":
        dropout = _dropout(cfg)(cfg.embed_dropout)
        return SinusoidalRelativePositions(cfg.decoder_embed_dim, cfg.clamp_len, dropout)
    return Distances(cfg.clamp_len) if cfg.positions == "shaw" else None


def _build_absolute_positions(cfg: TransformerXLConfig) -> nn.Module | None:
    if cfg.positions == "learned-absolute":
        places = cfg.tokens_per_sample + cfg.extended_context
        return LearnedAbsolutePositions(cfg.decoder_layers, places, cfg.decoder_embed_dim)
    if cfg.positions == "sinusoidal-absolute":
        return SinusoidalAbsolutePositions(cfg.decoder_embed_dim)
    return None


def initialise(decoder: SegmentDecoder, std: float, dictionary: Dictionary) -> None:
    """Draw all weights as the published code does: N(0, std), norms N(1, std), biases 0.

    Product-key memories, which that code does not have, keep all of their own.
    """
    of_memories = {
        module for memory in decoder.product_key_memories.values() for module in memory.modules()
    }
    for module in decoder.modules():
        if module in of_memories:
            continue
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, std)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | LearnedDistanceTable | LearnedAbsolutePositions):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, PositionBiases):
            nn.init.normal_(module.u, std=std)
            nn.init.normal_(module.v, std=std)
    embedding = decoder.embed_tokens
    projections = []
    if isinstance(embedding, AdaptiveInput):
        projections += [band[1] for band in embedding.embeddings]
        embedding = embedding.embeddings[0][0]
    if decoder.adaptive_softmax is not None:
        projections += [tail[0] for tail in decoder.adaptive_softmax.tail]
        if isinstance(decoder.adaptive_softmax.head, nn.Sequential):
            projections.append(decoder.adaptive_softmax.head[0])
    for projection in projections:
        # tied ones are drawn with the embeddings, and bands of full width have none
        if isinstance(projection, nn.Linear):
            nn.init.normal_(projection.weight, std=_ADAPTIVE_PROJECTION_STD)
    nn.init.zeros_(embedding.weight[dictionary.pad()])


register_presets("transformer_xl", PRESETS)
