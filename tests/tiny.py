"""Models, text and dictionaries that fit a test."""

import torch
from fairseq.data import Dictionary

import fairseq_plugins  # noqa: F401 (registers the models)
from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from fairseq_plugins.transformer_xl.model import TransformerXLConfig, TransformerXLLanguageModel

VOCABULARY = 20
_SPECIAL = 4
# what fairseq takes over from the task's options
SEGMENTS = {"tokens_per_sample": 8, "extended_context": 0}


def dictionary() -> Dictionary:
    """20 symbols: <s> <pad> </s> <unk> and sixteen letters."""
    made = Dictionary()
    for letter in "abcdefghijklmnop":
        made.add_symbol(letter)
    return made


def tiny_model(seed: int = 1, **options) -> AllAttentionLanguageModel:
    """An all-attention model of 3 layers, d 16, 2 heads, N 5, span 6, without dropout."""
    values = {
        "decoder_layers": 3,
        "decoder_embed_dim": 16,
        "decoder_attention_heads": 2,
        "persistent_vectors": 5,
        "attention_span": 6,
        **SEGMENTS,
        **options,
    }
    torch.manual_seed(seed)
    task = type("Task", (), {"source_dictionary": dictionary()})()
    return AllAttentionLanguageModel.build_model(AllAttentionConfig(**values), task)


def tiny_transformer_xl(seed: int = 1, **options) -> TransformerXLLanguageModel:
    """A Transformer-XL of 3 layers, d 16, 2 heads, f 24, memory 8, without dropout."""
    values = {
        "decoder_layers": 3,
        "decoder_embed_dim": 16,
        "decoder_attention_heads": 2,
        "decoder_ffn_embed_dim": 24,
        "init_std": 0.2,
        **SEGMENTS,
        **options,
    }
    torch.manual_seed(seed)
    task = type("Task", (), {"source_dictionary": dictionary()})()
    return TransformerXLLanguageModel.build_model(TransformerXLConfig(**values), task)


def tokens(streams: int, length: int, seed: int = 2) -> torch.Tensor:
    """Random letters, (streams, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_SPECIAL, VOCABULARY, (streams, length), generator=generator)
