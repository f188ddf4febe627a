"""The published Weighted Transformers (table 2), and a small one.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132). As many branches as heads; one vocabulary and one
embedding for both languages and the output (section 4.1); attention dropout of 0.1 in all.
"""

from typing import Any


def _published(layers: int, width: int, heads: int, dropout: float) -> dict[str, Any]:
    return {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_embed_dim": width,
        "decoder_embed_dim": width,
        "encoder_ffn_embed_dim": 4 * width,
        "decoder_ffn_embed_dim": 4 * width,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "dropout": dropout,
        "attention_dropout": 0.1,
        "share_all_embeddings": True,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # rows (C), N=4, (A), N=8 and (B)
    "weighted_transformer_wmt_2l": _published(2, 512, 8, 0.1),
    "weighted_transformer_wmt_4l": _published(4, 512, 8, 0.1),
    "weighted_transformer_wmt_base": _published(6, 512, 8, 0.1),
    "weighted_transformer_wmt_8l": _published(8, 512, 8, 0.3),
    "weighted_transformer_wmt_big": _published(6, 1024, 16, 0.3),
    # seconds on a CPU
    "weighted_transformer_tiny": _published(2, 128, 4, 0.1),
}
