"""The published all-attention and adaptive-span models: sizes, spans, dropouts (section 5.1)."""

from typing import Any

_CHARACTER_SPAN = 8192
_CHARACTERS: dict[str, Any] = {"output_bias": True}


def _size(layers: int, width: int) -> dict[str, int]:
    return {"decoder_layers": layers, "decoder_embed_dim": width, "decoder_attention_heads": 8}


def _adaptive_span(largest: int) -> dict[str, Any]:
    return {"attention_span": largest, "adaptive_span": True}


def _all_attention(layers: int, vectors: int, span: int, dropout: float) -> dict[str, Any]:
    return {
        **_size(layers, 512),
        **_adaptive_span(span),
        "persistent_vectors": vectors,
        "attention_dropout": dropout,
    }


def _feed_forward(layers: int, width: int, inner: int, dropout: float) -> dict[str, Any]:
    """A transformer with adaptive spans; the published code has one rate for both dropouts."""
    return {
        **_size(layers, width),
        **_adaptive_span(_CHARACTER_SPAN),
        "persistent_vectors": 0,
        "decoder_ffn_embed_dim": inner,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        **_CHARACTERS,
    }


def _adaptive(cutoffs: str) -> dict[str, Any]:
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_input_factor": 4,
        "adaptive_softmax_cutoff": cutoffs,
        "adaptive_softmax_factor": 4,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "tie_adaptive_head_proj": True,
        "output_bias": True,
    }


# the paper has the same settings for both character data sets
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
    # number of parameters same", but without embeddings that makes 100.7M against 113.3M
    "all_attention_lm_text8_large_ff_attn": {
        **_all_attention(24, 3072, _CHARACTER_SPAN, 0.4),
        **_CHARACTERS,
        "persistent_variant": "ff-attn",
    },
    "all_attention_lm_wt103": {
        **_all_attention(36, 2048, 2048, 0.3),
        "embed_dropout": 0.1,
        "output_dropout": 0.1,
        **_adaptive("20000,40000,200000"),
    },
    # the baselines of tables 1 and 2: Sukhbaatar et al. 2019, arXiv:1905.07799
    "adaptive_span_lm_enwik8_small": _SMALL_FEED_FORWARD,
    "adaptive_span_lm_enwik8_large": _LARGE_FEED_FORWARD,
    "adaptive_span_lm_text8_small": _SMALL_FEED_FORWARD,
    "adaptive_span_lm_text8_large": _LARGE_FEED_FORWARD,
    "all_attention_lm_tiny": {
        "decoder_layers": 6,
        "decoder_embed_dim": 128,
        "decoder_attention_heads": 4,
        "persistent_vectors": 64,
        "attention_span": 128,
    },
    "adaptive_span_lm_tiny": {
        "decoder_layers": 4,
        "decoder_embed_dim": 128,
        "decoder_attention_heads": 4,
        **_adaptive_span(256),
        "persistent_vectors": 0,
        "decoder_ffn_embed_dim": 512,
    },
}
