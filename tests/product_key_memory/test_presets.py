"""The presets with product-key memories: what the paper says of them, and their sizes."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY

from fairseq_plugins.product_key_memory.model import (
    MemoryLanguageModel,
    MemoryLanguageModelConfig,
    MemoryTransformer,
)
from tests.product_key_memory.tiny import dictionary, memories, parameters

POSITIONS = 512
# layers and width; 16 heads (section 4.3)
PUBLISHED = {
    f"pkm_transformer_lm_{layers}l_{width}d": (layers, width)
    for layers in (12, 16, 24)
    for width in (1024, 1600)
}
# with 60,000 symbols (section 4.1: "60k BPE splits") and 512 positions
PARAMETERS = {
    "pkm_transformer_lm_12l_1024d": 213_121_024,
    "pkm_transformer_lm_12l_1600d": 465_712_000,
    "pkm_transformer_lm_16l_1024d": 263_505_920,
    "pkm_transformer_lm_16l_1600d": 588_675_200,
    "pkm_transformer_lm_24l_1024d": 364_275_712,
    "pkm_transformer_lm_24l_1600d": 834_601_600,
    "pkm_transformer_lm_ablation": 399_159_296,
}


def build(name, symbols=60_000, **changes):
    """The language model of a preset on the meta device."""
    given = argparse.Namespace(**changes)
    ARCH_CONFIG_REGISTRY[name](given)
    others = {"tokens_per_sample": POSITIONS, "max_target_positions": None, "tpu": False}
    config = MemoryLanguageModelConfig(
        **{"add_bos_token": False, "memory_optimizer": None, **others, **vars(given)}
    )
    task = argparse.Namespace(source_dictionary=dictionary(symbols))
    task.target_dictionary = task.source_dictionary
    with torch.device("meta"):
        return MemoryLanguageModel.build_model(config, task)


def of_layer(width):
    """Parameters of attention, feed-forward and two norms; and those of feed-forward alone."""
    feed_forward = 2 * width * 4 * width + 4 * width + width
    return 4 * (width * width + width) + feed_forward + 4 * width, feed_forward


def of_memory(width, slots, heads, query_dim, batch_norm=False):
    queries = heads * query_dim
    keys = int(2 * slots**0.5) * queries // 2
    return slots * width + queries * (width + 1) + keys + (2 * queries if batch_norm else 0)


def test_every_preset_is_tested():
    language_models = set(ARCH_MODEL_INV_REGISTRY["pkm_transformer_lm"])
    assert language_models == {*PARAMETERS, "pkm_transformer_lm", "pkm_transformer_lm_tiny"}
    assert set(PARAMETERS) - set(PUBLISHED) == {"pkm_transformer_lm_ablation"}
    translation = set(ARCH_MODEL_INV_REGISTRY["pkm_transformer"])
    assert translation == {"pkm_transformer", "pkm_transformer_tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_set_what_is_published(name):
    layers, width = PUBLISHED[name]
    model = build(name)
    decoder = model.decoder
    assert len(decoder.layers) == layers
    for layer in decoder.layers:
        assert (layer.self_attn.num_heads, layer.embed_dim) == (16, width)
        assert layer.fc1.weight.shape == (4 * width, width)
        assert not layer.normalize_before
    # learned positions
    assert decoder.embed_positions.weight.requires_grad
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert memories(model) == []
    embeddings = (60_000 + POSITIONS + 2) * width
    assert parameters(model) == embeddings + layers * of_layer(width)[0] == PARAMETERS[name]


def test_memories_go_into_layers_of_ones_choice():
    """Section 4.3: 16 layers and 2 memories, in layers 6 and 12, of the published size."""
    model = build("pkm_transformer_lm_16l_1024d", memory_layers="6,12")
    of_layers = [len(memories(layer)) for layer in model.decoder.layers]
    assert [number for number, count in enumerate(of_layers, start=1) if count] == [6, 12]
    for memory in memories(model):
        assert (len(memory.values), memory.heads, memory.knn) == (512**2, 4, 32)
    added = of_memory(1024, 512**2, 4, 256) - of_layer(1024)[1]
    assert parameters(model) == PARAMETERS["pkm_transformer_lm_16l_1024d"] + 2 * added
    assert 2 * 512**2 * 1024 / parameters(model) > 0.6


@pytest.mark.parametrize(
    ("option", "count"),
    [
        ({}, 789_884_928),
        ({"memory_interleave": True}, 806_676_480),
        ({"memory_parallel": True}, 806_672_384),
        ({"memory_share_values": True}, 521_449_472),
        ({"memory_output_gate": True}, 794_079_232),
        ({"memory_output_norm": True}, 789_889_024),
    ],
)
def test_options_beyond_the_paper_have_the_parameters_of_their_formulas(option, count):
    model = build(
        "pkm_transformer_lm_16l_1024d", memory_layers="6,12", memory_query_dim=512, **option
    )
    width, slots = 1024, 512**2
    _, feed_forward = of_layer(width)
    of_one = of_memory(width, slots, 4, 512)
    expected = PARAMETERS["pkm_transformer_lm_16l_1024d"] + 2 * (of_one - feed_forward)
    expected += {
        "memory_interleave": 2 * (feed_forward + 2 * width),
        "memory_parallel": 2 * feed_forward,
        "memory_share_values": -slots * width,
        "memory_output_gate": 2 * 2 * width * width,
        "memory_output_norm": 2 * 2 * width,
    }.get(next(iter(option), ""), 0)
    assert parameters(model) == expected == count


def test_the_ablations_have_the_published_model():
    """Section 4.5: 6 layers, 8 heads, 512² slots, 4 memory heads, k = 32, memory in layer 5."""
    model = build("pkm_transformer_lm_ablation")
    decoder = model.decoder
    assert [len(memories(layer)) for layer in decoder.layers] == [0, 0, 0, 0, 1, 0]
    assert {layer.self_attn.num_heads for layer in decoder.layers} == {8}
    (memory,) = memories(model)
    assert (len(memory.values), memory.heads, memory.knn) == (512**2, 4, 32)
    layer, feed_forward = of_layer(1024)
    count = (60_000 + POSITIONS + 2) * 1024 + 6 * layer - feed_forward
    count += of_memory(1024, 512**2, 4, 256)
    assert parameters(model) == count == PARAMETERS["pkm_transformer_lm_ablation"]


def test_the_tiny_presets():
    model = build("pkm_transformer_lm_tiny", 100)
    assert [len(memories(layer)) for layer in model.decoder.layers] == [0, 0, 1, 0]
    layer, feed_forward = of_layer(128)
    count = (100 + POSITIONS + 2) * 128 + 4 * layer - feed_forward
    count += of_memory(128, 1024, 4, 64)
    assert parameters(model) == count == 912_256
    (memory,) = memories(model)
    assert memory.knn == 8
    args = argparse.Namespace()
    ARCH_CONFIG_REGISTRY["pkm_transformer_tiny"](args)
    task = argparse.Namespace(source_dictionary=dictionary(100))
    task.target_dictionary = task.source_dictionary
    with torch.device("meta"):
        model = MemoryTransformer.build_model(args, task)
    assert [len(memories(layer)) for layer in model.encoder.layers] == [0, 1]
    assert [len(memories(layer)) for layer in model.decoder.layers] == [1, 0]


def test_a_preset_leaves_what_the_command_line_says():
    given = argparse.Namespace(memory_slots=16384, memory_layers="3")
    ARCH_CONFIG_REGISTRY["pkm_transformer_lm_ablation"](given)
    assert (given.memory_slots, given.memory_layers, given.memory_knn) == (16384, "3", 32)
