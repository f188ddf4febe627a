"""The presets of all-attention: ties, and variants that have as many parameters."""

import pytest

from scripts.docs.tables import build, count_parameters, parse
from tests.recipes import HYDRA

pytestmark = pytest.mark.filterwarnings(HYDRA)


def preset(name, symbols, *options):
    """The model of a preset on the meta device."""
    task = ("--task", "segment_language_modeling", "--arch", f"all_attention_lm_{name}")
    return build(parse(["DATA", *task, *options]), symbols)


def test_words_have_tied_adaptive_embeddings():
    decoder = preset("wt103", 267_735).decoder
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
    lacking = 0
    if variant == "head-split":
        # half of 2048 keys and values of width 64 of 8 heads; spans of the heads that see no text
        lacking = 36 * (8 * 2 * 2048 * 64 // 2 + 4)
    plain, model = (
        count_parameters(preset("text8_large", 28, *options))
        for options in ((), ("--persistent-variant", variant))
    )
    assert model == plain - lacking


def test_the_softmax_feed_forward_sublayer_has_fewer_layers_and_parameters():
    layers = preset("text8_large_ff_attn", 28).decoder.layers
    assert len(layers) == 24
    persistent = layers[0].feed_forward.persistent
    assert persistent.keys.shape == persistent.values.shape == (1, 3072, 512)
    assert layers[0].feed_forward.dropout == layers[0].self_attn.dropout == 0.4
    of_others = preset("text8_large", 28).decoder.layers
    # the paper: "to maintain the number of parameters same"
    assert (count_parameters(layers), count_parameters(of_others)) == (100_712_640, 113_283_360)
