"""Whole segment models: zero past, precision, tied embeddings, changed weights, kernels."""

import copy
import math

import pytest
import torch

from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts, StreamPasts
from tests.segment_language_model.reading import assert_generates_as, assert_reads_as
from tests.tiny import scores_by_segment, tiny_model, tiny_transformer_xl, tokens

MODES = [torch.no_grad, torch.enable_grad]


# --zero-past: streams start with a past of zero vectors, which tokens attend to
SPANS = {"adaptive_span": True, "span_ramp": 2}
ZERO_PAST = [
    (tiny_model, {}),
    (tiny_model, {"mem_len": 4}),
    (tiny_model, {**SPANS, "span_init": 0.3, "span_epsilon": 0.1}),
    (tiny_model, SPANS),
    (tiny_transformer_xl, {"mem_len": 5}),
    (tiny_transformer_xl, {"mem_len": 5, "same_length": True, "decoder_normalize_before": True}),
    (tiny_transformer_xl, {"mem_len": 5, "same_length": True, "clamp_len": 3, "untie_r": True}),
    (tiny_transformer_xl, {"mem_len": 5, "positions": "shaw"}),
]


def after_zeros(model, stream, length, mode):
    """Return scores after zero hidden states, loaded as if from a checkpoint."""
    network = model.decoder.network
    hidden = torch.zeros(len(stream), network.mem_len, 16, dtype=torch.float64)
    state = {"layers": [hidden] * len(network.layers), "end": 0}
    pasts = StreamPasts.from_state_dict(state, shard_id=0, num_shards=1)
    return scores_by_segment(model, stream, length, mode, EnsemblePasts(pasts))


@pytest.mark.parametrize(("build", "options"), ZERO_PAST)
def test_zero_past_equals_a_past_of_zero_vectors(build, options):
    with_zeros, without = (build(**options, zero_past=zero).double() for zero in (True, False))
    for layer in (*with_zeros.decoder.network.layers, *without.decoder.network.layers):
        # with a bias in the norm, zero vectors have nonzero keys and values
        layer.self_attn_layer_norm.bias.data = torch.linspace(-1, 1, 16, dtype=torch.float64)
    stream = tokens(2, 20)
    for mode in MODES:
        for length in (3, 20):
            expected = after_zeros(without, stream, length, mode)
            scores = scores_by_segment(with_zeros, stream, length, mode)
            torch.testing.assert_close(scores, expected)
            if mode is torch.enable_grad:
                gradients = [
                    torch.autograd.grad(
                        result.logsumexp(-1).sum(), [*model.parameters()], materialize_grads=True
                    )
                    for model, result in ((with_zeros, scores), (without, expected))
                ]
                torch.testing.assert_close(*gradients)
        # a segment without a start position also starts with zeros
        torch.testing.assert_close(with_zeros(stream)[0], expected)
        empty = scores_by_segment(without, stream, 3, mode)
        assert (expected[:, 0] - empty[:, 0]).abs().max() > 0.01
    # with mem_len alone, a token sees more in a longer segment
    if "mem_len" not in options or "same_length" in options:
        assert_reads_as(with_zeros, stream, expected)
    assert_generates_as(with_zeros, stream, scores_by_segment(with_zeros, stream, 1), segment=1)


def test_tied_output_uses_the_embeddings():
    model = tiny_model(share_decoder_input_output_embed=True)
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    # unit variance in, unit variance out: neither side of the tie starts out of scale
    variance = model.decoder.embed_scale**2 * model.decoder.embed_tokens.weight.var().item()
    assert math.isclose(variance, 1, rel_tol=0.5)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (tiny_transformer_xl, {}),
        (tiny_transformer_xl, {"positions": "shaw"}),
        (tiny_model, {}),
        (tiny_model, {"adaptive_span": True, "span_init": 0.2}),
    ],
)
@pytest.mark.parametrize("behind", [False, True])
def test_a_model_sees_changed_weights_at_once(build, options, behind):
    """Neither do they stay when fairseq's optimizers write behind autograd's back."""
    model, stream = build(**options).double().eval(), tokens(2, 16)
    fresh = copy.deepcopy(model)
    scores_by_segment(model, stream, 8)
    for each in (model, fresh):
        with torch.no_grad():
            for weight in each.parameters():
                (weight.data if behind and each is model else weight).mul_(0.7)
    results = [scores_by_segment(each, stream, 8) for each in (model, fresh)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
