"""Transformer-XL's options: weights at the start, adaptive embeddings, dropouts, refusals."""

import pytest
import torch

from fairseq_plugins.transformer_xl.layers import LockedDropout, WordDropout
from tests import tiny
from tests.tiny import dictionary, tiny_transformer_xl, tokens


def test_weights_are_drawn_as_published():
    model = tiny_transformer_xl(
        decoder_embed_dim=128, decoder_ffn_embed_dim=256, init_std=0.05, untie_r=True
    )
    decoder = model.decoder
    assert decoder.embed_scale == 128**0.5
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.numel() >= 128:
            mean = 1 if "layer_norm" in name else 0
            assert abs(parameter.mean() - mean) < 0.02, name
            assert abs(parameter.std() - 0.05) < 0.02, name
    assert not decoder.embed_tokens.weight[dictionary().pad()].any()


ADAPTIVE = {**tiny.ADAPTIVE, "output_bias": True}


def test_adaptive_projections_are_drawn_narrower():
    wide = {"decoder_embed_dim": 64, "init_std": 0.5, "tie_adaptive_proj": False}
    decoder = tiny_transformer_xl(**{**ADAPTIVE, **wide}).decoder
    softmax = decoder.adaptive_softmax
    projections = [band[1] for band in decoder.embed_tokens.embeddings]
    for projection in [*projections, softmax.head[0], *(tail[0] for tail in softmax.tail)]:
        assert abs(projection.weight.std() - 0.01) < 0.002
    assert abs(decoder.embed_tokens.embeddings[0][0].weight.std() - 0.5) < 0.1


def test_initial_values_of_the_tensorflow_code():
    wide = {"decoder_embed_dim": 64, "init_std": 0.5, "tie_adaptive_proj": False}
    model = tiny_transformer_xl(**{**ADAPTIVE, **wide}, initial_values="tensorflow")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "class_proj" in name:
            assert not parameter.any(), name
        elif "layer_norm" in name:
            assert (parameter == 1).all(), name
        elif parameter.numel() >= 128:
            assert abs(parameter.std() - 0.5) < 0.1, name


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_band_has_no_projection_on_request(tied):
    options = {**ADAPTIVE, "tie_adaptive_proj": tied, "no_adaptive_head_proj": True}
    model = tiny_transformer_xl(**options).double()
    decoder, stream = model.decoder, tokens(2, 8).clamp(max=7)
    frequent = decoder.embed_tokens.embeddings[0][0].weight
    torch.testing.assert_close(decoder.embed_tokens(stream), frequent[stream])
    head, bias = decoder.adaptive_softmax.head
    features = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(head(features)[:, :8], features @ frequent.T)
    assert bias.bias.shape == (8 + 2,)
    kept = [
        tail[0].weight is band[1].weight
        for tail, band in zip(
            decoder.adaptive_softmax.tail, decoder.embed_tokens.embeddings[1:], strict=True
        )
    ]
    assert kept == [tied] * 2


def test_bands_of_full_width_have_no_projection():
    full = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}
    model = tiny_transformer_xl(**{**ADAPTIVE, **full}).double()
    decoder, stream = model.decoder, tokens(2, 8)
    weights = torch.cat([band[0].weight for band in decoder.embed_tokens.embeddings])
    assert torch.equal(decoder.embed_tokens(stream).double(), weights.float()[stream].double())
    assert not any("proj" in name and "embed" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        probs = model.get_normalized_probs(model(stream), log_probs=False)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 8).to(probs))


def test_adaptive_io_ties_all_but_the_first_projection():
    decoder = tiny_transformer_xl(**ADAPTIVE).decoder
    softmax, bands = decoder.adaptive_softmax, decoder.embed_tokens.embeddings
    first, head, bias = softmax.head
    assert first.weight.shape == (16, 16)
    assert first.weight is not bands[0][1].weight
    assert head.word_proj.weight is bands[0][0].weight
    assert bias.bias.shape == (8 + 2,)
    for tail, band in zip(softmax.tail, bands[1:], strict=True):
        assert tail[0].weight is band[1].weight
        assert tail[2].weight is band[0].weight
        assert tail[3].bias.shape == (band[0].num_embeddings,)


def test_locked_dropout_drops_the_same_elements_at_every_token_of_a_stream():
    torch.manual_seed(1)
    out = LockedDropout(0.25)(torch.ones(3, 7, 400))
    dropped = out == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(out[~dropped], torch.full_like(out[~dropped], 4 / 3))
    assert abs(dropped.float().mean() - 0.25) < 0.05


def test_word_dropout_drops_a_word_wherever_it_occurs():
    torch.manual_seed(1)
    tokens = torch.randint(0, 500, (4, 2000))
    out = WordDropout(0.25, 500)(torch.ones(4, 2000, 3), tokens)
    dropped = {int(t) for t in tokens[(out == 0).all(dim=-1)]}
    kept = {int(t) for t in tokens[(out != 0).any(dim=-1)]}
    assert dropped.isdisjoint(kept)
    assert abs(len(dropped) / 500 - 0.25) < 0.06
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 4 / 3))


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x, tokens = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    assert LockedDropout(0.5).eval()(x) is x
    assert LockedDropout(0.0)(x) is x
    assert WordDropout(0.5, 9).eval()(x, tokens) is x
    assert WordDropout(0.0, 9)(x, tokens) is x


def test_every_dropout_acts_in_training_and_in_training_only():
    stream = tokens(2, 8)
    plain = tiny_transformer_xl()(stream)[0]
    names = ["dropout", "embed_dropout", "output_dropout", "attention_dropout"]
    for name in [*names, "activation_dropout", "word_dropout"]:
        for locked in (False, True):
            model = tiny_transformer_xl(**{name: 0.5}, locked_dropout=locked)
            assert not torch.allclose(model(stream)[0], plain), name
            torch.testing.assert_close(model.eval()(stream)[0], plain)


def test_position_encodings_are_dropped_with_the_embeddings():
    model = tiny_transformer_xl(embed_dropout=0.5)
    encoding = model.decoder.positions(30)
    assert 0.3 < (encoding == 0).float().mean() < 0.7
    locked = tiny_transformer_xl(embed_dropout=0.5, locked_dropout=True).decoder.positions(30)
    dropped = (locked == 0).all(dim=0)
    zeros = model.eval().decoder.positions(30) == 0
    assert torch.equal((locked == 0)[:, ~dropped], zeros[:, ~dropped])
    assert dropped.any()
    # absolute ones are part of what the embeddings' dropout drops
    absolute = tiny_transformer_xl(embed_dropout=0.5, positions="sinusoidal-absolute")
    assert (absolute.decoder._embed(tokens(2, 8), 0) == 0).any()


# what causes each message, and a part of it
REFUSED = [
    (
        {"positions": "sinusoidal-absolute", "mem_len": 8},
        "--mem-len is 8 with --positions sinusoidal-absolute: a remembered token and one of the "
        "segment at the same place would look alike",
    ),
    ({"positions": "learned-absolute", "clamp_len": 8}, "--clamp-len with --positions learned-"),
    ({"positions": "learned-absolute", "same_length": True}, "--same-length with --positions lea"),
    ({"positions": "shaw", "untie_r": True}, "--untie-r with --positions shaw: only"),
    ({"decoder_embed_dim": 15, "decoder_attention_heads": 3}, "--decoder-embed-dim is 15: sinuso"),
    ({"word_dropout": 1.0}, "--word-dropout is 1.0: it must be in [0, 1)"),
    ({"init_std": 0.0}, "--init-std is 0.0: it must be above 0"),
    ({"same_length": True, "extended_context": 4}, "--same-length without recurrence leaves"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_make_no_model_are_refused_by_name(options, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the message is checked below)
        tiny_transformer_xl(**options)
    assert message in str(refused.value)


def test_the_recurrence_is_as_long_as_the_segment_unless_told():
    assert tiny_transformer_xl().decoder.context.mem_len == 8
    assert tiny_transformer_xl(mem_len=3).decoder.context.mem_len == 3
    assert tiny_transformer_xl(positions="learned-absolute").decoder.context.mem_len == 0
    assert tiny_transformer_xl(extended_context=4).decoder.context.mem_len == 0
