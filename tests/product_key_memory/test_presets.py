"""The presets with product-key memories: sizes as their formulas have them."""

import pytest

from scripts.docs.tables import build, count_parameters, parse
from tests.product_key_memory.tiny import memories
from tests.recipes import HYDRA

pytestmark = pytest.mark.filterwarnings(HYDRA)

POSITIONS = 512


def preset(name, symbols=60_000, *options):
    """The language model of a preset on the meta device."""
    task = ("--task", "language_modeling", "--tokens-per-sample", str(POSITIONS))
    return build(parse(["DATA", *task, "--arch", f"pkm_transformer_lm_{name}", *options]), symbols)


def of_layer(width):
    """Parameters of attention, feed-forward and two norms; and those of feed-forward alone."""
    feed_forward = 2 * width * 4 * width + 4 * width + width
    return 4 * (width * width + width) + feed_forward + 4 * width, feed_forward


def of_memory(width, slots, heads, query_dim):
    """Parameters of values, query network with bias, and sub-keys."""
    queries = heads * query_dim
    return slots * width + queries * (width + 1) + int(2 * slots**0.5) * queries // 2


@pytest.mark.parametrize(
    ("name", "layers", "width"),
    [(f"{layers}l_{width}d", layers, width) for layers in (12, 16, 24) for width in (1024, 1600)],
)
def test_presets_are_the_models_of_table_1(name, layers, width):
    model = preset(name)
    decoder = model.decoder
    for layer in decoder.layers:
        assert (layer.self_attn.num_heads, layer.normalize_before) == (16, False)
    # learned positions
    assert decoder.embed_positions.weight.requires_grad
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert memories(model) == []
    embeddings = (60_000 + POSITIONS + 2) * width
    assert count_parameters(model) == embeddings + layers * of_layer(width)[0]


@pytest.mark.parametrize(
    ("option", "added"),
    [
        ("--memory-query-dim", 0),
        ("--memory-interleave", 2 * (of_layer(1024)[1] + 2 * 1024)),
        ("--memory-parallel", 2 * of_layer(1024)[1]),
        ("--memory-share-values", -(512**2) * 1024),
        ("--memory-output-gate", 2 * 2 * 1024 * 1024),
        ("--memory-output-norm", 2 * 2 * 1024),
    ],
)
def test_options_of_memories_have_the_parameters_of_their_formulas(option, added):
    """Section 4.3: 16 layers and 2 memories, in layers 6 and 12; and what later work has."""
    memory = ("--memory-layers", "6,12", "--memory-query-dim", "512")
    given = () if option == "--memory-query-dim" else (option,)
    model = preset("16l_1024d", 60_000, *memory, *given)
    of_layers = [len(memories(layer)) for layer in model.decoder.layers]
    assert [number for number, count in enumerate(of_layers, start=1) if count] == [6, 12]
    for memory in memories(model):
        assert (memory.heads, memory.knn) == (4, 32)
    layer, feed_forward = of_layer(1024)
    count = (60_000 + POSITIONS + 2) * 1024 + 16 * layer
    count += 2 * (of_memory(1024, 512**2, 4, 512) - feed_forward)
    assert count_parameters(model) == count + added


@pytest.mark.parametrize(
    ("name", "symbols", "layers", "width", "memory"),
    [("ablation", 60_000, 6, 1024, (5, 512**2, 256, 32)), ("tiny", 100, 4, 128, (3, 1024, 64, 8))],
)
def test_presets_with_a_memory(name, symbols, layers, width, memory):
    """Section 4.5: 6 layers, 512² slots, 4 memory heads, k = 32, memory in layer 5."""
    place, slots, query_dim, knn = memory
    model = preset(name, symbols)
    found = [len(memories(layer)) for layer in model.decoder.layers]
    assert found == [int(number == place) for number in range(1, layers + 1)]
    (only,) = memories(model)
    assert (len(only.values), only.heads, only.knn) == (slots, 4, knn)
    layer, feed_forward = of_layer(width)
    count = (symbols + POSITIONS + 2) * width + layers * layer - feed_forward
    assert count_parameters(model) == count + of_memory(width, slots, 4, query_dim)
