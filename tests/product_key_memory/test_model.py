"""Where product-key memories stand in fairseq's transformers and in segment language models."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.product_key_memory.memory import MemorySublayer
from tests import tiny
from tests.product_key_memory.tiny import MEMORY, memories, tiny_language_model, tiny_transformer

PLACES = pytest.mark.parametrize(
    "place",
    [{}, {"memory_interleave": True}, {"memory_parallel": True}],
    ids=["replaced", "interleaved", "parallel"],
)
NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
SEGMENT_MODELS = pytest.mark.parametrize(
    "build", [tiny.tiny_transformer_xl, tiny.tiny_model], ids=["transformer_xl", "all_attention"]
)


def add(x, sublayer, layer_norm, pre_norm):
    """A residual sublayer, normalised before it or after."""
    return x + sublayer(layer_norm(x)) if pre_norm else layer_norm(x + sublayer(x))


def with_memory(layer, attended, feed_forward, place):
    """A layer after its attention, as the equations have it."""
    (memory,) = memories(layer)
    if not place:
        return add(attended, memory, layer.final_layer_norm, layer.normalize_before)
    if "memory_parallel" in place:

        def both(x):
            return feed_forward(x) + memory(x)

        return add(attended, both, layer.final_layer_norm, layer.normalize_before)
    x = add(attended, feed_forward, layer.final_layer_norm, layer.normalize_before)
    names = ("memory_layer_norm", "added_layer_norm")  # of fairseq's layers and of segment models
    (norm,) = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return add(x, memory, norm, layer.normalize_before)


def attended_to(layer, x, mask=None):
    """fairseq's layer up to its feed-forward sublayer, of tokens (T, B, d)."""

    def attention(x):
        return layer.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0]

    return add(x, attention, layer.self_attn_layer_norm, layer.normalize_before)


def feed_forward_of(layer):
    """By the weights alone: a memory beside them comes with the modules."""

    def feed_forward(x):
        inner = torch.relu(F.linear(x, layer.fc1.weight, layer.fc1.bias))
        return F.linear(inner, layer.fc2.weight, layer.fc2.bias)

    return feed_forward


@PLACES
@NORMS
def test_a_decoder_layer_is_what_is_written_out(place, pre_norm):
    model = tiny_language_model(
        memory_layers="2", **place, decoder_normalize_before=pre_norm
    ).eval()
    x, mask = torch.randn(5, 3, 16), torch.triu(torch.full((5, 5), float("-inf")), 1)
    plain, layer, _ = model.decoder.layers
    attended = attended_to(layer, x, mask)
    expected = with_memory(layer, attended, feed_forward_of(layer), place)
    torch.testing.assert_close(layer(x, self_attn_mask=mask)[0], expected)
    attended = attended_to(plain, x, mask)
    expected = add(attended, feed_forward_of(plain), plain.final_layer_norm, pre_norm)
    torch.testing.assert_close(plain(x, self_attn_mask=mask)[0], expected)


@PLACES
@NORMS
def test_an_encoder_layer_is_what_is_written_out(place, pre_norm):
    model = tiny_transformer(
        encoder_memory_layers="1",
        **place,
        encoder_normalize_before=pre_norm,
    ).eval()
    layer, x = model.encoder.layers[0], torch.randn(5, 3, 16)
    expected = with_memory(layer, attended_to(layer, x), feed_forward_of(layer), place)
    torch.testing.assert_close(layer(x, None), expected)


@SEGMENT_MODELS
@PLACES
@NORMS
def test_a_segment_layer_is_what_is_written_out(build, place, pre_norm):
    model = build(
        **MEMORY,
        memory_layers="2",
        **place,
        decoder_normalize_before=pre_norm,
        decoder_ffn_embed_dim=24,
    ).eval()
    layer, x = model.decoder.layers[1], torch.randn(3, 5, 16)
    positions = model.decoder.compute_positions(4)[1]
    attended = add(
        x, lambda x: layer.self_attn(x, positions, None)[0], layer.self_attn_layer_norm, pre_norm
    )
    expected = with_memory(layer, attended, layer.feed_forward, place)
    torch.testing.assert_close(layer(x, positions)[0], expected)


def test_all_attention_layers_without_feed_forward_get_the_memory_added():
    for interleave in (False, True):
        model = tiny.tiny_model(**MEMORY, memory_layers="1,3", memory_interleave=interleave)
        assert [len(memories(layer)) for layer in model.decoder.layers] == [1, 0, 1]


def test_the_memory_replaces_persistent_vectors_in_a_sublayer_of_their_own():
    model = tiny.tiny_model(**MEMORY, memory_layers="2", persistent_variant="ff-attn")
    kinds = [type(layer.feed_forward).__name__ for layer in model.decoder.layers]
    assert kinds == ["SoftmaxFeedForward", "MemorySublayer", "SoftmaxFeedForward"]


def test_dropped_layers_keep_their_numbers():
    model = tiny_language_model(memory_layers="3", decoder_layerdrop=0.9)
    assert isinstance(model.decoder.layers[2].fc1, MemorySublayer)
    assert len(memories(model)) == 1
