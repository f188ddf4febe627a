"""Transformer-XL's options: initial weights, adaptive embeddings, presets, errors."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import nn

from fairseq_plugins.transformer_xl.dropout import LockedDropout
from tests import tiny
from tests.tiny import dictionary, tiny_transformer_xl, tokens

ADAPTIVE = {**tiny.ADAPTIVE, "output_bias": True}
# projections of adaptive bands: of the embeddings, the softmax's head and its tails
PROJECTION = re.compile(r"embeddings\.\d\.1\.|adaptive_softmax\.(head|tail\.\d)\.0\.")


@pytest.mark.parametrize("tensorflow", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"untie_r": True},
        {**ADAPTIVE, "tie_adaptive_proj": False},
        {**ADAPTIVE, "tie_adaptive_proj": False, "tie_adaptive_weights": False},
    ],
    ids=["", "adaptive", "untied"],
)
def test_weights_start_as_published(options, tensorflow):
    code = "tensorflow" if tensorflow else "pytorch"
    sizes = {"decoder_embed_dim": 128, "init_std": 0.5}
    decoder = tiny_transformer_xl(**sizes, **options, initial_values=code).decoder
    assert decoder.embed_scale == 128**0.5
    # an untied head has scores, and no projection
    head = "" if options.get("tie_adaptive_weights", True) else "adaptive_softmax.head.0.weight"
    for name, parameter in decoder.named_parameters():
        mean, deviation = float("layer_norm" in name), 0.5
        if name.endswith("bias"):
            mean, deviation = 0, 0
        elif tensorflow and ("layer_norm" in name or "class_proj" in name):
            deviation = 0
        elif PROJECTION.search(name) and not tensorflow and name != head:
            deviation = 0.01
        if parameter.numel() >= 128 or deviation == 0:
            assert parameter.mean().item() == pytest.approx(mean, abs=0.4 * deviation), name
            assert parameter.std(correction=0).item() == pytest.approx(deviation, rel=0.3), name
    embedding = decoder.embed_tokens
    embedding = embedding.embeddings[0][0] if "adaptive_input" in options else embedding
    assert not embedding.weight[dictionary().pad()].any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_adaptive_proj": False},
        {"tie_adaptive_head_proj": True},
        {"no_adaptive_head_proj": True},
        {"no_adaptive_head_proj": True, "tie_adaptive_proj": False},
    ],
)
def test_adaptive_embeddings_and_projections_are_tied_as_asked(options):
    decoder = tiny_transformer_xl(**{**ADAPTIVE, **options}).decoder
    softmax, bands = decoder.adaptive_softmax, decoder.embed_tokens.embeddings
    *first, head, bias = softmax.head
    assert head.word_proj.weight is bands[0][0].weight
    assert bias.bias.shape == (8 + 2,)
    assert len(first) == ("no_adaptive_head_proj" not in options)
    for projection in first:
        assert projection.weight.shape == (16, 16)
        assert getattr(projection, "bias", None) is None
        assert (projection.weight is bands[0][1].weight) == ("tie_adaptive_head_proj" in options)
    for tail, band in zip(softmax.tail, bands[1:], strict=True):
        assert (tail[0].weight is band[1].weight) == options.get("tie_adaptive_proj", True)
        assert tail[2].weight is band[0].weight
        assert tail[3].bias.shape == (band[0].num_embeddings,)


FULL = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}


@pytest.mark.parametrize(("options", "largest"), [(FULL, 19), ({"no_adaptive_head_proj": True}, 7)])
def test_bands_with_full_width_need_no_projection(options, largest):
    model = tiny_transformer_xl(**{**ADAPTIVE, **options}).double()
    decoder, stream = model.decoder, tokens(2, 8).clamp(max=largest)
    bands = [band[0].weight for band in decoder.embed_tokens.embeddings]
    rows = torch.cat(bands) if largest > 7 else bands[0]
    assert torch.equal(decoder.embed_tokens(stream).double(), rows.float()[stream].double())
    features = torch.randn(3, 16, dtype=torch.float64)
    head = decoder.adaptive_softmax.head(features)
    torch.testing.assert_close(head[:, :8], features @ bands[0].T)
    with torch.no_grad():
        probs = model.get_normalized_probs(model(stream), log_probs=False)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 8).to(probs))


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("enwik8_large", [0.15, 0.15, 0.15, 0.15, 0.15, 0.0]),
        ("ptb", [0.6, 0.5, 0.2, 0.2, 0.2, 0.2]),
    ],
)
def test_presets_drop_as_published(name, rates):
    options = Namespace(tokens_per_sample=9, extended_context=0)
    ARCH_CONFIG_REGISTRY[f"transformer_xl_{name}"](options)
    with torch.device("meta"):
        decoder = tiny_transformer_xl(**vars(options)).decoder
    layer = decoder.network.layers[0]
    feed_forward = layer.feed_forward.dropout
    dropouts = [decoder.embed_dropout, decoder.output_dropout, layer.dropout, feed_forward]
    assert {type(each) for each in dropouts} == {LockedDropout if name == "ptb" else nn.Dropout}
    drawn = [*(each.p for each in dropouts), layer.self_attn.dropout, decoder.word_dropout.p]
    assert drawn == rates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "sinusoidal-absolute", "mem_len": 8}, "--mem-len is 8 with --positions sin"),
        ({"positions": "learned-absolute", "clamp_len": 8}, "--clamp-len is 8 with --positions le"),
        ({"positions": "shaw", "untie_r": True}, "--untie-r with --positions shaw: only"),
        ({"word_dropout": 1.0}, "--word-dropout is 1.0: it must be at least 0 and"),
    ],
)
def test_a_model_refuses_impossible_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_transformer_xl(**options)
