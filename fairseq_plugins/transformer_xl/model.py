"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860), its ablations, and presets."""

import math
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.modules import AdaptiveInput
from fairseq.modules.adaptive_softmax import TiedHeadModule
from fairseq.tasks import FairseqTask
from torch import nn

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.options import check_range, flag, naming_options, option
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED, Window
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
from fairseq_plugins.transformer_xl.dropout import WordDropout
from fairseq_plugins.transformer_xl.network import (
    INIT_STD,
    POSITIONS,
    PositionEncoding,
    TransformerXL,
    TransformerXLSettings,
    dropout_class,
    initialise,
    memory_modules,
)

# The published PyTorch code draws projections of adaptive bands with this standard deviation.
_ADAPTIVE_PROJECTION_STD = 0.01


@dataclass
class TransformerXLConfig(SegmentLanguageModelConfig):
    """Options of ``transformer_xl``."""

    decoder_ffn_embed_dim: int = option(2048, "inner width of the feed-forward sublayers")
    positions: ChoiceEnum(list(POSITIONS)) = option(
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
    same_length_excludes_self: bool = option(
        False,
        "with --same-length let every token see itself and --mem-len others, as in the published "
        "TensorFlow code, instead of --mem-len tokens including itself",
    )
    same_length_besides_itself: bool = option(False, "former name of --same-length-excludes-self")
    word_dropout: float = option(
        0.0, "dropout of whole words: of their embeddings everywhere in a batch"
    )
    locked_dropout: bool = option(
        False,
        "variational dropout: drop the same elements at every token of a segment (except of "
        "attention weights)",
    )
    init_std: float = option(INIT_STD, "standard deviation of the initial weights")
    initial_values: ChoiceEnum(["pytorch", "tensorflow"]) = option(
        "pytorch",
        "published code to follow for initial values: pytorch (norms around 1, projections of "
        "adaptive bands with standard deviation 0.01), or tensorflow (norms 1, vectors of the "
        "adaptive softmax's clusters 0, projections like other weights)",
    )


@register_model("transformer_xl", dataclass=TransformerXLConfig)
class TransformerXLLanguageModel(SegmentLanguageModel):
    """Transformer-XL language model (section 3), and the models of the ablation study (4.2)."""

    @classmethod
    @naming_options(PARAMETERS)
    def build_model(
        cls, cfg: TransformerXLConfig, task: FairseqTask
    ) -> "TransformerXLLanguageModel":
        """Build the model for the task's dictionary."""
        check_task(type(task))
        dictionary, positions = task.source_dictionary, POSITIONS[cfg.positions]
        # the default recurrence is a segment, or nothing where earlier segments cannot be read
        mem_len = cfg.mem_len
        if mem_len is None:
            warm = positions.relative and not cfg.extended_context
            mem_len = cfg.tokens_per_sample if warm else 0
        check_options(cfg, dictionary, mem_len)
        _check_positions(cfg, positions)

        # with same length, the published code's mem_len counts the token itself
        excludes_self = cfg.same_length_excludes_self or cfg.same_length_besides_itself
        seen_before = mem_len if excludes_self else mem_len - 1
        settings = TransformerXLSettings(
            **layer_settings(cfg),
            positions=str(cfg.positions),
            window=Window(0, seen_before if cfg.same_length else UNLIMITED),
            segment=cfg.tokens_per_sample + cfg.extended_context,
            separate_biases=cfg.untie_r,
            position_dropout=cfg.embed_dropout,
            locked_dropout=cfg.locked_dropout,
        )
        embed_tokens = build_embedding(cfg, dictionary)
        network = TransformerXL(
            cfg.decoder_layers,
            cfg.decoder_embed_dim,
            cfg.decoder_attention_heads,
            cfg.decoder_ffn_embed_dim,
            mem_len,
            cfg.dropout,
            str(cfg.attention_kernel),
            settings,
            init_std=None,  # drawn below, with the embeddings and the output
            checkpoint_activations=cfg.checkpoint_activations,
            compiled_length=compiled_length(cfg),
        )
        output = build_output(cfg, dictionary, embed_tokens)
        decoder = SegmentDecoder(
            dictionary,
            embed_tokens,
            network,
            output,
            cfg,
            dropout_class(cfg.locked_dropout),
            WordDropout(cfg.word_dropout, len(dictionary)),
            embed_scale=cfg.decoder_embed_dim**0.5,
        )
        initialise_model(decoder, cfg)
        model = cls(decoder, f"{summarise(cfg, mem_len)}, positions {cfg.positions}")
        attach_digest(model, task)
        return model


def _check_positions(cfg: TransformerXLConfig, positions: PositionEncoding) -> None:
    """Refuse options that contradict the position encoding."""
    if not positions.relative:
        for name in ("mem_len", "clamp_len"):
            if getattr(cfg, name):
                raise ValueError(
                    f"{flag(name)} is {getattr(cfg, name)} with --positions {cfg.positions}: it "
                    "needs relative positions, because the same places of two segments would look "
                    "alike (Transformer-XL, section 3.3); leave one of the two out"
                )
    check_range(cfg, 0, "word_dropout", below=1)
    if not 0 < cfg.init_std < math.inf:
        raise ValueError(f"--init-std is {cfg.init_std}: it must be above 0, and finite")
    if cfg.untie_r and not positions.biased:
        raise ValueError(
            f"--untie-r with --positions {cfg.positions}: only --positions transformer-xl has "
            "vectors u and v"
        )


def initialise_model(decoder: SegmentDecoder, cfg: TransformerXLConfig) -> None:
    """Draw the initial values of a published code; memories have their own."""
    tensorflow = cfg.initial_values == "tensorflow"
    norm_std = 0.0 if tensorflow else cfg.init_std
    initialise(decoder, cfg.init_std, norm_std, memory_modules(decoder.network))
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
    nn.init.zeros_(embedding.weight[decoder.dictionary.pad()])


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
