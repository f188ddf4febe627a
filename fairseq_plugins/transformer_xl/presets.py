"""The published Transformer-XL models: widths, dropouts and vocabularies (section 4.1)."""

from typing import Any

_CHARACTERS: dict[str, Any] = {"share_decoder_input_output_embed": True, "output_bias": True}


def _size(layers: int, width: int, heads: int, inner: int) -> dict[str, int]:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": width,
        "decoder_attention_heads": heads,
        "decoder_ffn_embed_dim": inner,
    }


def _dropouts(sublayers: float, attention: float) -> dict[str, float]:
    """The published code's one rate for all but attention weights."""
    return {
        "dropout": sublayers,
        "embed_dropout": sublayers,
        "output_dropout": sublayers,
        "activation_dropout": sublayers,
        "attention_dropout": attention,
    }


def _adaptive(cutoffs: str, factor: int) -> dict[str, Any]:
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_input_factor": factor,
        "adaptive_softmax_cutoff": cutoffs,
        "adaptive_softmax_factor": factor,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "output_bias": True,
    }


_WT103 = "20000,40000,200000"
_LM1B = "60000,100000,640000"

PRESETS: dict[str, dict[str, Any]] = {
    "transformer_xl_enwik8_base": {
        **_size(12, 512, 8, 2048),
        **_dropouts(0.1, 0.0),
        **_CHARACTERS,
    },
    # widths chosen to meet the paper's 88M: it gives only the number of layers
    "transformer_xl_enwik8_18l": {
        **_size(18, 640, 10, 2208),
        **_dropouts(0.1, 0.0),
        **_CHARACTERS,
    },
    "transformer_xl_enwik8_large": {
        **_size(24, 1024, 8, 3072),
        **_dropouts(0.15, 0.15),
        **_CHARACTERS,
    },
    "transformer_xl_text8_large": {
        **_size(24, 1024, 8, 3072),
        **_dropouts(0.15, 0.15),
        **_CHARACTERS,
    },
    "transformer_xl_wt103_base": {
        **_size(16, 410, 10, 2100),
        **_dropouts(0.1, 0.0),
        **_adaptive(_WT103, 1),
    },
    "transformer_xl_wt103_large": {
        **_size(18, 1024, 16, 4096),
        **_dropouts(0.2, 0.2),
        **_adaptive(_WT103, 4),
    },
    "transformer_xl_lm1b_base": {
        **_size(18, 1024, 8, 4096),
        **_dropouts(0.0, 0.0),
        **_adaptive(_LM1B, 4),
    },
    "transformer_xl_lm1b_large": {
        **_size(24, 1280, 16, 8192),
        **_dropouts(0.05, 0.05),
        **_adaptive(_LM1B, 4),
    },
    # our reading of the published count, 24,040,400, which leaves no room for W_kR, u and v: with
    # an extended context in place of recurrence, positions are the sinusoids of the place
    "transformer_xl_ptb": {
        **_size(16, 380, 10, 900),
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
    "transformer_xl_tiny": {
        **_size(4, 128, 4, 512),
        **_CHARACTERS,
    },
}
