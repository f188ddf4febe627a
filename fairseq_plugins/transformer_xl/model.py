"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860), its ablations, and presets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.modules import AdaptiveInput
from fairseq.modules.adaptive_softmax import TiedHeadModule
from torch import nn

from fairseq_plugins.fairseq_integration.options import flag, option
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.product_key_memory.memory import MemorySublayer
from fairseq_plugins.product_key_memory.options import MemoryLayersOptions, MemorySublayers
from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED, Window
from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
from fairseq_plugins.segment_language_model.model import SegmentLanguageModel, check_task
from fairseq_plugins.segment_language_model.options import (
    SegmentLanguageModelConfig,
    adaptive_preset,
    size_preset,
)
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedAbsolutePositions,
    LearnedRelativeKeys,
    RelativeKeyProjection,
    SinusoidalAbsolutePositions,
    SinusoidalRelativePositions,
)
from fairseq_plugins.transformer_xl.layers import LockedDropout, WordDropout

RELATIVE = ("transformer-xl", "shaw")
ABSOLUTE = ("learned-absolute", "sinusoidal-absolute")
# The published PyTorch code draws projections of adaptive bands with this standard deviation.
_ADAPTIVE_PROJECTION_STD = 0.01


@dataclass
class TransformerXLConfig(SegmentLanguageModelConfig, MemoryLayersOptions):
    """Options of ``transformer_xl``."""

    decoder_ffn_embed_dim: int = option(2048, "inner width of the feed-forward sublayers")
    positions: ChoiceEnum([*RELATIVE, *ABSOLUTE]) = option(
        "transformer-xl",
        "position encoding: transformer-xl (section 3.3); shaw (a learned vector for each "
        "distance, without u and v, as in section 3.3; attn_type 1 of the published code adds a u "
        "for each layer and a learned number for each distance and head); learned-absolute (a "
        "learned vector for each place, added in each layer: Al-Rfou et al. 2018); "
        "sinusoidal-absolute (added to the embeddings: Vaswani et al. 2017). Absolute encodings "
        "exclude recurrence",
    )
    untie_r: bool = option(
        False, "give each layer its own vectors u and v, instead of one pair for all"
    )
    same_length_besides_itself: bool = option(
        False,
        "with --same-length let every token see itself and --mem-len others, as in the published "
        "TensorFlow code, instead of --mem-len tokens including itself",
    )
    word_dropout: float = option(
        0.0, "dropout of whole words: of their embeddings everywhere in a batch"
    )
    locked_dropout: bool = option(
        False,
        "variational dropout: drop the same elements at every token of a segment (except of "
        "attention weights)",
    )
    init_std: float = option(0.02, "standard deviation of the initial weights")
    initial_values: ChoiceEnum(["pytorch", "tensorflow"]) = option(
        "pytorch",
        "published code to follow for initial values: pytorch (norms around 1, projections of "
        "adaptive bands with standard deviation 0.01), or tensorflow (norms 1, vectors of the "
        "adaptive softmax's clusters 0, projections like other weights)",
    )


@register_model("transformer_xl", dataclass=TransformerXLConfig)
class TransformerXLLanguageModel(SegmentLanguageModel):
    """Transformer-XL language model (section 3), and the models of the ablation study (4.2)."""

    added_sublayers = MemorySublayers

    @classmethod
    def recurrence_length(cls, cfg: TransformerXLConfig) -> int:
        """Return ``--mem-len``; the default is a segment, or 0 without recurrence."""
        if cfg.mem_len is not None:
            return cfg.mem_len
        return 0 if cfg.positions in ABSOLUTE or cfg.extended_context else cfg.tokens_per_sample

    @classmethod
    def build_sublayers(
        cls, cfg: TransformerXLConfig, mem_len: int
    ) -> Iterator[tuple[RelativeAttention, nn.Module | None]]:
        """Yield each layer's attention (section 3.3) and feed-forward sublayer."""
        heads = cfg.decoder_attention_heads
        head_dim = cfg.decoder_embed_dim // heads
        # with same length, mem_len counts the token itself
        seen_before = mem_len if cfg.same_length_besides_itself else mem_len - 1
        window = Window(0, seen_before if cfg.same_length else UNLIMITED)
        biases = PositionBiases(heads, head_dim) if cfg.positions == "transformer-xl" else None
        for number in range(cfg.decoder_layers):
            projection = None
            if cfg.positions == "transformer-xl":
                projection = RelativeKeyProjection(cfg.decoder_embed_dim, heads)
                if cfg.untie_r and number > 0:
                    biases = PositionBiases(heads, head_dim)
            elif cfg.positions == "shaw":
                farthest = max(1, mem_len + cfg.tokens_per_sample + cfg.extended_context - 1)
                farthest = min(farthest, cfg.clamp_len or farthest)
                projection = LearnedRelativeKeys(heads, farthest, head_dim)
            attention = RelativeAttention(
                cfg.decoder_embed_dim,
                heads,
                window,
                projection,
                biases,
                cfg.attention_dropout,
                str(cfg.attention_kernel),
            )
            yield attention, cls.build_feed_forward(cfg)

    @classmethod
    def build_positions(cls, cfg: TransformerXLConfig) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the encoding of distances (section 3.3) or, in ablations, of places."""
        width = cfg.decoder_embed_dim
        if cfg.positions == "transformer-xl":
            dropout = cls.dropout_class(cfg)(cfg.embed_dropout) if cfg.embed_dropout else None
            return SinusoidalRelativePositions(width, cfg.clamp_len, dropout), None
        if cfg.positions == "shaw":
            return Distances(cfg.clamp_len), None
        if cfg.positions == "learned-absolute":
            places = cfg.tokens_per_sample + cfg.extended_context
            return None, LearnedAbsolutePositions(cfg.decoder_layers, places, width)
        return None, SinusoidalAbsolutePositions(width)

    @classmethod
    def dropout_class(cls, cfg: TransformerXLConfig) -> type[nn.Module]:
        """Return the class of dropout for elements."""
        return LockedDropout if cfg.locked_dropout else nn.Dropout

    @classmethod
    def build_word_dropout(cls, cfg: TransformerXLConfig, dictionary: Dictionary) -> nn.Module:
        """Return the dropout of whole words."""
        return WordDropout(cfg.word_dropout, len(dictionary))

    @classmethod
    def describe(cls, cfg: TransformerXLConfig, mem_len: int) -> str:
        """Return the kind of positions."""
        return f"positions {cfg.positions}"

    @classmethod
    def check_options(cls, cfg: TransformerXLConfig) -> None:
        """Refuse options that contradict each other or are out of range."""
        if cfg.positions in ABSOLUTE:
            if cfg.mem_len:
                raise ValueError(
                    f"--mem-len is {cfg.mem_len} with --positions {cfg.positions}: a remembered "
                    "token and one of the segment at the same place would look alike "
                    "(Transformer-XL, section 3.3); give --mem-len 0, or relative positions"
                )
            for name in ("clamp_len", "same_length"):
                if getattr(cfg, name):
                    raise ValueError(
                        f"{flag(name)} with --positions {cfg.positions}: it acts on distances, "
                        "which absolute positions do not encode; leave one of the two out"
                    )
        if cfg.untie_r and cfg.positions != "transformer-xl":
            raise ValueError(
                f"--untie-r with --positions {cfg.positions}: only --positions transformer-xl has "
                "vectors u and v"
            )
        if not 0 <= cfg.word_dropout < 1:
            raise ValueError(f"--word-dropout is {cfg.word_dropout}: it must be in [0, 1)")
        if cfg.init_std <= 0:
            raise ValueError(f"--init-std is {cfg.init_std}: it must be above 0")

    @classmethod
    def initialise(
        cls, decoder: SegmentDecoder, cfg: TransformerXLConfig, dictionary: Dictionary
    ) -> None:
        """Draw all weights as the published codes do: N(0, std), norms around 1, biases 0.

        Product-key memories keep their own initial values.
        """
        tensorflow = cfg.initial_values == "tensorflow"
        decoder.embed_scale = cfg.decoder_embed_dim**0.5
        memories = [m for m in decoder.modules() if isinstance(m, MemorySublayer)]
        of_memories = {module for memory in memories for module in memory.modules()}
        for module in decoder.modules():
            if module in of_memories:
                continue
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.0 if tensorflow else cfg.init_std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=cfg.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding | LearnedRelativeKeys | LearnedAbsolutePositions):
                nn.init.normal_(module.weight, std=cfg.init_std)
            elif isinstance(module, PositionBiases):
                nn.init.normal_(module.u, std=cfg.init_std)
                nn.init.normal_(module.v, std=cfg.init_std)
        embedding = decoder.embed_tokens
        projections = []
        if isinstance(embedding, AdaptiveInput):
            projections += [band[1] for band in embedding.embeddings]
            embedding = embedding.embeddings[0][0]
        if decoder.adaptive_softmax is not None:
            projections += [tail[0] for tail in decoder.adaptive_softmax.tail]
            if isinstance(decoder.adaptive_softmax.head, nn.Sequential):
                projections += decoder.adaptive_softmax.head[:-2]
        for projection in projections:
            # tied projections are drawn with the embeddings, and full-width bands have none
            if isinstance(projection, nn.Linear):
                std = cfg.init_std if tensorflow else _ADAPTIVE_PROJECTION_STD
                nn.init.normal_(projection.weight, std=std)
        if tensorflow and decoder.adaptive_softmax is not None:
            for module in decoder.adaptive_softmax.modules():
                if isinstance(module, TiedHeadModule):
                    nn.init.zeros_(module.class_proj.weight)
        nn.init.zeros_(embedding.weight[dictionary.pad()])


# The published Transformer-XL models: widths, dropouts and vocabularies (section 4.1).

_CHARACTERS: dict[str, Any] = {"share_decoder_input_output_embed": True, "output_bias": True}


def _preset(
    layers: int, width: int, heads: int, inner: int, dropout: float, attention_dropout: float
) -> dict[str, float]:
    """Return a preset; the published code has one dropout rate, except for attention weights."""
    names = ("dropout", "embed_dropout", "output_dropout", "activation_dropout")
    return {
        **size_preset(layers, width, heads, inner),
        **dict.fromkeys(names, dropout),
        "attention_dropout": attention_dropout,
    }


_WT103 = "20000,40000,200000"
# neither published code ties projections on One Billion Word
_LM1B = adaptive_preset("60000,100000,640000", 4, tied_projections=False)

PRESETS: dict[str, dict[str, Any]] = {
    "transformer_xl_enwik8_base": {**_preset(12, 512, 8, 2048, 0.1, 0.0), **_CHARACTERS},
    # widths chosen to reach the paper's 88M; it gives only the number of layers
    "transformer_xl_enwik8_18l": {**_preset(18, 640, 10, 2208, 0.1, 0.0), **_CHARACTERS},
    "transformer_xl_enwik8_large": {**_preset(24, 1024, 8, 3072, 0.15, 0.15), **_CHARACTERS},
    "transformer_xl_text8_base": {**_preset(12, 512, 8, 2048, 0.1, 0.0), **_CHARACTERS},
    "transformer_xl_text8_large": {**_preset(24, 1024, 8, 3072, 0.15, 0.15), **_CHARACTERS},
    "transformer_xl_wt103_base": {
        **_preset(16, 410, 10, 2100, 0.1, 0.0),
        **adaptive_preset(_WT103, 1),
    },
    "transformer_xl_wt103_large": {
        **_preset(18, 1024, 16, 4096, 0.2, 0.2),
        **adaptive_preset(_WT103, 4),
    },
    # tables 6 and 10 give only 128M parameters: the base model with layers to match
    "transformer_xl_wt103_ablation": {
        **_preset(7, 410, 10, 2100, 0.1, 0.0),
        **adaptive_preset(_WT103, 1),
    },
    "transformer_xl_lm1b_base": {**_preset(18, 1024, 8, 4096, 0.0, 0.0), **_LM1B},
    # the paper's 0.46B, by its author (kimiyoung/transformer-xl#69); heads as in the base model
    "transformer_xl_lm1b_20l": {**_preset(20, 1024, 8, 6144, 0.0, 0.0), **_LM1B},
    "transformer_xl_lm1b_large": {**_preset(24, 1280, 16, 8192, 0.05, 0.05), **_LM1B},
    # table 7 gives 20 layers and about 0.3B parameters: the base model with a smaller inner width
    "transformer_xl_lm1b_ablation": {**_preset(20, 1024, 8, 2048, 0.0, 0.0), **_LM1B},
    # our reading: the published count, 24,040,400, leaves no room for W_kR, u and v, so positions
    # are sinusoids of places, with an extended context instead of recurrence
    "transformer_xl_ptb": {
        **size_preset(16, 380, 10, 900),
        "share_decoder_input_output_embed": True,
        "output_bias": True,
        "positions": "sinusoidal-absolute",
        "word_dropout": 0.2,
        "embed_dropout": 0.6,
        "attention_dropout": 0.2,
        "dropout": 0.2,
        "activation_dropout": 0.2,
        "output_dropout": 0.5,
        "locked_dropout": True,
    },
    "transformer_xl_tiny": {**size_preset(4, 128, 4, 512), **_CHARACTERS},
}

register_presets("transformer_xl", PRESETS, check_task)
