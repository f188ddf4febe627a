"""Transformers with product-key memories, and sentences, that fit a test."""

import argparse

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

import fairseq_plugins  # noqa: F401 (registers the models)
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.model import (
    MemoryLanguageModel,
    MemoryLanguageModelConfig,
    MemoryTransformer,
)
from tests import tiny

# in place of the published sizes
MEMORY = {
    "memory_slots": 49,
    "memory_heads": 2,
    "memory_knn": 3,
    "memory_query_dim": 8,
}
# what fairseq takes over from other options
_OTHERS = {
    "add_bos_token": False,
    "tokens_per_sample": 16,
    "max_target_positions": None,
    "tpu": False,
    "memory_optimizer": None,
}


def _task():
    dictionary = tiny.dictionary()
    return argparse.Namespace(
        source_dictionary=dictionary, target_dictionary=dictionary, src_dict=dictionary
    )


def tiny_language_model(seed: int = 1, **options) -> MemoryLanguageModel:
    """3 layers, d 16, f 24, 2 heads, without dropout; memories of 49 slots."""
    values = {
        "decoder_layers": 3,
        "decoder_embed_dim": 16,
        "decoder_ffn_embed_dim": 24,
        "decoder_attention_heads": 2,
        "dropout": 0.0,
        **MEMORY,
        **_OTHERS,
        **options,
    }
    torch.manual_seed(seed)
    return MemoryLanguageModel.build_model(MemoryLanguageModelConfig(**values), _task())


def tiny_transformer(seed: int = 1, **options) -> MemoryTransformer:
    """Encoder and decoder of 2 layers, d 16, f 24, 2 heads, without dropout; 49 slots."""
    args = argparse.Namespace(
        encoder_layers=2,
        decoder_layers=2,
        encoder_embed_dim=16,
        encoder_ffn_embed_dim=24,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        dropout=0.0,
        **{**MEMORY, **options},
    )
    ARCH_CONFIG_REGISTRY["pkm_transformer"](args)
    torch.manual_seed(seed)
    return MemoryTransformer.build_model(args, _task())


def memories(model: torch.nn.Module) -> list[ProductKeyMemory]:
    """The memories of a model or layer, in its order."""
    return [module for module in model.modules() if isinstance(module, ProductKeyMemory)]


def padded(*lengths: int, width: int | None = None, left: bool = False) -> torch.Tensor:
    """Random sentences of these lengths with padding to ``width``, (B, T).

    The sentences are the same whatever the width and the side of the padding.
    """
    width = width or max(lengths)
    batch = torch.full((len(lengths), width), tiny.dictionary().pad())
    for number, length in enumerate(lengths):
        place = slice(width - length, width) if left else slice(0, length)
        batch[number, place] = tiny.tokens(1, length, seed=number)
    return batch
