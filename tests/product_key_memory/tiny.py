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
    return MemoryLanguageModel.build_model(MemoryLanguageModelConfig(**values), tiny.tiny_task())


def tiny_transformer(seed: int = 1, task_cfg: object = None, **options) -> MemoryTransformer:
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
    task = tiny.tiny_task()
    task.cfg = task_cfg
    return MemoryTransformer.build_model(args, task)


def memories(model: torch.nn.Module) -> list[ProductKeyMemory]:
    """The memories of a model or layer, in its order."""
    return [module for module in model.modules() if isinstance(module, ProductKeyMemory)]


def padded(*lengths: int, width: int | None = None) -> torch.Tensor:
    """Random sentences of these lengths with padding to ``width``, (B, T).

    The sentences are the same whatever the width.
    """
    batch = torch.full((len(lengths), width or max(lengths)), tiny.dictionary().pad())
    for number, length in enumerate(lengths):
        batch[number, :length] = tiny.tokens(1, length, seed=number)
    return batch


BUILDERS = {
    "language model": tiny_language_model,
    "translation": tiny_transformer,
    "transformer_xl": tiny.tiny_transformer_xl,
    "all_attention": tiny.tiny_model,
}


def build(kind, **options):
    """A model with a memory in its second layer, in translation in one of each part."""
    placed = {"memory_layers": "2"}
    if kind == "translation":
        placed = {"encoder_memory_layers": "2", "decoder_memory_layers": "1"}
        options["optimizer"] = options.pop("memory_optimizer", None)
    if kind == "all_attention" and "memory_parallel" in options:
        placed["decoder_ffn_embed_dim"] = 24
    return BUILDERS[kind](**{**MEMORY, **placed, **options})


def inputs_of(model, batch):
    """What scores ``batch`` (B, T), padded on the right; translation is of it into itself."""
    if not isinstance(model, MemoryTransformer):
        return (batch,)
    lengths = batch.ne(tiny.dictionary().pad()).sum(1)
    rows = zip(batch, (batch.size(1) - lengths).tolist(), strict=True)
    # as fairseq pads sources
    return torch.stack([row.roll(padding) for row, padding in rows]), lengths, batch


def score(model, batch):
    return model(*inputs_of(model, batch))[0]
