"""The published models with product-key memories, and small ones.

The paper says (sections 4.3 and 4.5): 12, 16 or 24 layers, 16 heads, width 1024 or 1600, learned
positions; memories of 512² slots, 4 heads, 32 slots a head, in layers of one's choice; for the
ablations 6 layers and 8 heads, memory in layer 5.

It says nothing of the following, which is our own choice: feed-forward sublayers four times as wide
as the model; normalisation after each sublayer, GELU and dropouts of 0.1 as in BERT, with which the
paper compares its size of 24 layers; tied input and output embeddings; the ablations' width of
1024.
"""

from typing import Any

_AS_IN_BERT: dict[str, Any] = {
    "decoder_normalize_before": False,
    "activation_fn": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
}


def _language_model(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": 4 * width,
        "decoder_attention_heads": heads,
        "decoder_learned_pos": True,
        "share_decoder_input_output_embed": True,
        **_AS_IN_BERT,
    }


# seconds on a CPU
_TINY_MEMORY: dict[str, Any] = {
    "memory_slots": 1024,
    "memory_heads": 4,
    "memory_knn": 8,
    "memory_query_dim": 64,
}

LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    **{
        f"pkm_transformer_lm_{layers}l_{width}d": _language_model(layers, width, 16)
        for layers in (12, 16, 24)
        for width in (1024, 1600)
    },
    "pkm_transformer_lm_ablation": {
        **_language_model(6, 1024, 8),
        "memory_layers": "5",
        "memory_slots": 512**2,
        "memory_heads": 4,
        "memory_knn": 32,
    },
    "pkm_transformer_lm_tiny": {
        **_language_model(4, 128, 4),
        "memory_layers": "3",
        **_TINY_MEMORY,
    },
}

TRANSLATION_MODELS: dict[str, dict[str, Any]] = {
    "pkm_transformer_tiny": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_embed_dim": 128,
        "encoder_ffn_embed_dim": 512,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_memory_layers": "2",
        "decoder_memory_layers": "1",
        **_TINY_MEMORY,
    },
}
