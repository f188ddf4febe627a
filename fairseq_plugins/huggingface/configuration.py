"""Configurations of the models: the options of fairseq-train that describe a model, and its sizes.

docs/options.md explains each option. Product-key memories are the only ones that are left out.
"""

from typing import Any, ClassVar

from transformers import PreTrainedConfig


class SegmentConfig(PreTrainedConfig):
    """Options that Transformer-XL and all-attention share, with fairseq-train's names.

    ``mem_len`` is the number of tokens to remember, 0 for none. ``pad_token_id`` and so on are
    those of fairseq's dictionaries, whose ``</s>`` ends a line, and not a text.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "decoder_embed_dim",
        "intermediate_size": "decoder_ffn_embed_dim",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    vocab_size: int = 32_000
    decoder_layers: int = 6
    decoder_embed_dim: int = 512
    decoder_attention_heads: int = 8
    decoder_ffn_embed_dim: int = 0
    decoder_normalize_before: bool = False
    no_decoder_final_norm: bool = False
    layer_norm_epsilon: float | int = 1e-5
    tokens_per_sample: int = 512
    extended_context: int = 0
    mem_len: int = 512
    clamp_len: int | None = None
    same_length: bool = False
    zero_past: bool = False
    dropout: float | int = 0.0
    embed_dropout: float | int = 0.0
    output_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    attention_kernel: str = "fast"
    share_decoder_input_output_embed: bool = False
    output_bias: bool = False
    adaptive_input: bool = False
    adaptive_input_cutoff: str | None = None
    adaptive_input_factor: float | int = 4
    adaptive_softmax_cutoff: str | None = None
    adaptive_softmax_factor: float | int = 4
    adaptive_softmax_dropout: float | int = 0.0
    tie_adaptive_weights: bool = False
    tie_adaptive_proj: bool = False
    tie_adaptive_head_proj: bool = False
    no_adaptive_head_proj: bool = False
    # of Hugging Face
    use_cache: bool = True
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int | None = None

    def band_ends(self, part: str) -> list[int]:
        """Return where the bands of ``part``, "adaptive_input" or "adaptive_softmax", end."""
        cutoffs = str(getattr(self, f"{part}_cutoff")).strip("[]()").split(",")
        return [*map(int, cutoffs), self.vocab_size]

    def layer_settings(self) -> dict[str, Any]:
        """Return the arguments of a :class:`.LayerSettings`."""
        return {
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "clamp_len": self.clamp_len,
            "normalize_before": self.decoder_normalize_before,
            "final_norm": not self.no_decoder_final_norm,
            "layer_norm_epsilon": self.layer_norm_epsilon,
        }


class TransformerXLConfig(SegmentConfig):
    """Options of ``transformer_xl``."""

    model_type: ClassVar[str] = "transformer_xl"

    decoder_ffn_embed_dim: int = 2048
    positions: str = "transformer-xl"
    untie_r: bool = False
    same_length_excludes_self: bool = False
    word_dropout: float | int = 0.0
    locked_dropout: bool = False


class AllAttentionConfig(SegmentConfig):
    """Options of ``all_attention_lm``; spans stay as they were learned."""

    model_type: ClassVar[str] = "all_attention"

    persistent_vectors: int = 1024
    persistent_variant: str = "all"
    attention_span: int = 512
    adaptive_span: bool = False
    span_ramp: int = 32
    span_init: float | int = 0.0
    span_epsilon: float | int = 0.0
