"""The presets of all-attention and adaptive span: what is published, parameter for parameter."""

import argparse
import dataclasses

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY

from fairseq_plugins.all_attention.model import PRESETS, AllAttentionConfig
from scripts.evaluate.evaluation_speed import build, sizes_of_arch

# symbols of the published vocabularies
SYMBOLS = {"enwik8": 205, "text8": 28, "wt103": 267_735}
# parameters of the published code; where it has no script (text8, ff-attn), by its arithmetic
PARAMETERS = {
    "all_attention_lm_enwik8_small": 38_501_725,
    "all_attention_lm_enwik8_large": 114_017_773,
    "all_attention_lm_text8_small": 38_320_300,
    "all_attention_lm_text8_large": 113_836_348,
    "all_attention_lm_text8_large_ff_attn": 101_265_628,
    "all_attention_lm_wt103": 132_493_746,
    "adaptive_span_lm_enwik8_small": 38_538_541,
    "adaptive_span_lm_enwik8_large": 208_910_221,
    "adaptive_span_lm_enwik8_8l": 6_480_621,
    "adaptive_span_lm_text8_small": 38_357_116,
    "adaptive_span_lm_text8_large": 208_638_172,
}
# layers, width, persistent vectors, inner width, largest span; dropout of weights, activations;
# 8 heads but for the model of 8 layers
PUBLISHED = {
    "all_attention_lm_enwik8_small": (18, 512, 1024, 0, 8192, 0.3, 0.0),
    "all_attention_lm_enwik8_large": (36, 512, 2048, 0, 8192, 0.4, 0.0),
    "all_attention_lm_text8_small": (18, 512, 1024, 0, 8192, 0.3, 0.0),
    "all_attention_lm_text8_large": (36, 512, 2048, 0, 8192, 0.4, 0.0),
    "all_attention_lm_wt103": (36, 512, 2048, 0, 2048, 0.3, 0.0),
    "adaptive_span_lm_enwik8_small": (12, 512, 0, 2048, 8192, 0.3, 0.3),
    "adaptive_span_lm_enwik8_large": (24, 768, 0, 4096, 8192, 0.4, 0.4),
    "adaptive_span_lm_enwik8_8l": (8, 256, 0, 1024, 1024, 0.0, 0.0),
    "adaptive_span_lm_text8_small": (12, 512, 0, 2048, 8192, 0.3, 0.3),
    "adaptive_span_lm_text8_large": (24, 768, 0, 4096, 8192, 0.4, 0.4),
}
TINY = {"all_attention_lm_tiny", "adaptive_span_lm_tiny"}


def build_preset(name, symbols=None, **changes):
    """The model of a preset on the meta device, for ``symbols`` symbols, special ones included."""
    symbols = symbols or next(count for data, count in SYMBOLS.items() if data in name)
    with torch.device("meta"):
        return build(sizes_of_arch(name, symbols), 8, 0, **changes)[0]


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_preset_is_tested():
    named = set(ARCH_MODEL_INV_REGISTRY["all_attention_lm"]) - {"all_attention_lm"}
    assert named == {*PARAMETERS, *TINY}


def test_presets_set_options_that_there_are():
    known = {field.name for field in dataclasses.fields(AllAttentionConfig)}
    assert {option for values in PRESETS.values() for option in values} <= known


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name):
    assert parameters(build_preset(name)) == PARAMETERS[name]


def test_tiny_presets_have_the_numbers_of_the_readme():
    assert parameters(build_preset("all_attention_lm_tiny", 99)) == 522_496
    # 4 layers of q, k, v, o, feed-forward with biases, norms, spans; positions; embeddings, output
    layer = 4 * 128 * 128 + 2 * 128 * 512 + 512 + 128 + 4 * 128 + 4
    count = 4 * layer + 256 * 32 + 2 * 100 * 128
    assert parameters(build_preset("adaptive_span_lm_tiny", 100)) == count == 824_848


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_set_what_is_published(name):
    layers, width, vectors, inner, span, attention, activation = PUBLISHED[name]
    heads = 4 if layers == 8 else 8
    model = build_preset(name)
    decoder = model.decoder
    assert len(decoder.layers) == layers
    for layer in decoder.layers:
        assert (layer.self_attn.num_heads, layer.self_attn.head_dim) == (heads, width // heads)
        assert layer.self_attn.dropout == attention
        assert (layer.self_attn.span.max_span, layer.self_attn.span.ramp) == (span, 32)
        assert (layer.dropout.p, layer.normalize_before) == (0, False)
        if vectors:
            assert layer.self_attn.persistent.keys.shape == (8, vectors, width // 8)
            assert layer.feed_forward is None
        else:
            assert layer.self_attn.persistent is None
            assert layer.feed_forward.fc1.weight.shape == (inner, width)
            assert layer.feed_forward.dropout.p == activation
    dropouts = (decoder.embed_dropout.p, decoder.output_dropout.p)
    if name.endswith("wt103"):
        assert dropouts == (0.1, 0.1)
    else:
        assert dropouts == (0, 0)
        assert decoder.output_projection.weight is not decoder.embed_tokens.weight
        assert decoder.output_projection.bias is not None


def test_words_have_tied_adaptive_embeddings():
    options = PRESETS["all_attention_lm_wt103"]
    assert options["adaptive_input_cutoff"] == options["adaptive_softmax_cutoff"]
    decoder = build_preset("all_attention_lm_wt103").decoder
    bands, softmax = decoder.embed_tokens.embeddings, decoder.adaptive_softmax
    assert [tuple(embedding.weight.shape) for embedding, _ in bands] == [
        (20_000, 512),
        (20_000, 128),
        (160_000, 32),
        (67_735, 8),
    ]
    assert softmax.head[0].weight is bands[0][1].weight
    for (embedding, projection), tail in zip(bands[1:], softmax.tail, strict=True):
        assert tail[0].weight is projection.weight
        assert any(parameter is embedding.weight for parameter in tail.parameters())


@pytest.mark.parametrize("variant", ["attn-split", "single-head", "head-split"])
def test_variants_have_as_many_parameters_but_for_head_split(variant):
    name = "all_attention_lm_text8_large"
    lacking = 0
    if variant == "head-split":
        # half of 2048 keys and values of width 64 of 8 heads; spans of the heads that see no text
        lacking = 36 * (8 * 2 * 2048 * 64 // 2 + 4)
    count = parameters(build_preset(name, persistent_variant=variant))
    assert count == PARAMETERS[name] - lacking


def test_the_softmax_feed_forward_sublayer_has_fewer_layers_and_parameters():
    layers = build_preset("all_attention_lm_text8_large_ff_attn").decoder.layers
    assert len(layers) == 24
    persistent = layers[0].feed_forward.persistent
    assert persistent.keys.shape == persistent.values.shape == (1, 3072, 512)
    assert layers[0].feed_forward.dropout == layers[0].self_attn.dropout == 0.4
    of_others = build_preset("all_attention_lm_text8_large").decoder.layers
    # the paper: "to maintain the number of parameters same"
    assert (parameters(layers), parameters(of_others)) == (100_712_640, 113_283_360)


def test_presets_differ_but_for_the_data_sets():
    seen = [{}]
    for name, values in PRESETS.items():
        if name in (
            *("all_attention_lm_text8_small", "all_attention_lm_text8_large"),
            *("adaptive_span_lm_text8_small", "adaptive_span_lm_text8_large"),
        ):
            # "we set": one choice for both data sets of characters
            assert values == PRESETS[name.replace("text8", "enwik8")]
            continue
        assert values not in seen, name
        seen.append(values)


def test_a_preset_leaves_what_the_command_line_says():
    given = argparse.Namespace(persistent_vectors=3072)
    ARCH_CONFIG_REGISTRY["all_attention_lm_text8_large"](given)
    assert (given.persistent_vectors, given.decoder_layers) == (3072, 36)
