"""Small transformers with product-key memories, and sentences, for tests."""

import torch

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.model import (
    MemoryLanguageModel,
    MemoryLanguageModelConfig,
    MemoryTransformer,
)
from tests import tiny

# in place of the published sizes
MEMORY = {"memory_slots": 49, "memory_heads": 2, "memory_knn": 3, "memory_query_dim": 8}


def tiny_language_model(seed: int = 1, **options) -> MemoryLanguageModel:
    """Build a model of 3 layers, d 16, f 24, 2 heads, without dropout; memories have 49 slots."""
    sizes = {**tiny.SIZES, "decoder_ffn_embed_dim": 24, "dropout": 0.0, **MEMORY}
    # values that fairseq takes from other options
    other_options = {"add_bos_token": False, "tokens_per_sample": 16, "max_target_positions": None}
    other_options |= {"tpu": False, "memory_optimizer": None}
    cfg = MemoryLanguageModelConfig(**{**sizes, **other_options, **options})
    torch.manual_seed(seed)
    return MemoryLanguageModel.build_model(cfg, tiny.tiny_task())


def tiny_transformer(seed: int = 1, **options) -> MemoryTransformer:
    """Build encoder and decoder of 2 layers, d 16, f 24, 2 heads, without dropout; 49 slots."""
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, **MEMORY}
    sizes["share_all_embeddings"] = False
    return tiny.translation_model(
        MemoryTransformer, "pkm_transformer", seed, **{**sizes, **options}
    )


def memories(model: torch.nn.Module) -> list[ProductKeyMemory]:
    """Return the memories of a model or layer, in its order."""
    return [module for module in model.modules() if isinstance(module, ProductKeyMemory)]


def padded(*lengths: int, width: int | None = None) -> torch.Tensor:
    """Return random sentences (B, T) of these lengths; ``width`` changes only their padding."""
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
    """Build a model with a memory in layer 2; translation also has one in decoder layer 1."""
    placed = {"memory_layers": "2"}
    if kind == "translation":
        placed = {"encoder_memory_layers": "2", "decoder_memory_layers": "1"}
        options["optimizer"] = options.pop("memory_optimizer", None)
    return BUILDERS[kind](**{**MEMORY, **placed, **options})


def model_inputs(model, batch):
    """Return a model's inputs for ``batch`` (B, T), padded on the right: source and target."""
    if not isinstance(model, MemoryTransformer):
        return (batch,)
    lengths = batch.ne(tiny.dictionary().pad()).sum(1)
    rows = zip(batch, (batch.size(1) - lengths).tolist(), strict=True)
    # fairseq pads sources on the left
    return torch.stack([row.roll(padding) for row, padding in rows]), lengths, batch


def score(model, batch):
    return model(*model_inputs(model, batch))[0]
