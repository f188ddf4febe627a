"""Readings of where residual connections and norms are among branches: layers by their equations."""

import copy
import itertools
import re

import pytest
import torch

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.branched_attention import BranchedAttention
from fairseq_plugins.weighted_transformer.weighted_sublayers import (
    WeightedAttention,
    WeightedLinear,
)
from tests.gradients import assert_same
from tests.reference.weighted_transformer import (
    normed,
    weighted_attention,
    weighted_feed_forward,
)
from tests.weighted_transformer.tiny import (
    PAD,
    by_equations,
    sentences,
    tiny_plain_transformer,
    tiny_weighted_transformer,
)

# --branch-residual, --branch-feed-forward
NETWORKS = [
    ("sublayers", "slices"),
    *itertools.product(("as-written", "networks", "branches"), ("slices", "shared")),
]
READINGS = pytest.mark.parametrize(("residual", "network"), NETWORKS, ids="-".join)
SUMS = pytest.mark.parametrize("total", ["one", "branches"], ids=["sum-1", "sum-M"])
ATTENTIONS = pytest.mark.parametrize("attention", ["encoder", "self", "both"])
NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
FUTURE = torch.triu(torch.full((5, 5), float("-inf"), dtype=torch.double), 1)


def build(residual="sublayers", network="slices", total="branches", pre_norm=False, **options):
    """A model in double precision whose biases and norms are not those of the start."""
    model = tiny_weighted_transformer(
        branch_residual=residual,
        branch_feed_forward=network,
        branch_sum=total,
        encoder_normalize_before=pre_norm,
        decoder_normalize_before=pre_norm,
        **options,
    ).double()
    return stir(model)


def stir(model):
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def attend(module, query, key, visible, **plain):
    """Attention of all sentences by the equations, (T, B, d); fairseq's own as it is."""
    if isinstance(module, WeightedAttention):
        each = [
            weighted_attention(module, query[:, b], key[:, b], visible[b])
            for b in range(query.size(1))
        ]
        return torch.stack(each, dim=1)
    if isinstance(module, BranchedAttention):
        return by_equations(module, query, key, visible)
    return module(query, key, key, **plain)[0]


def by_sublayers(layer, x, attentions):
    """A layer's output by the equations.

    Args:
        layer: of any reading.
        x: (T, B, d).
        attentions: of each attention the module, its norm, its keys (None for x) and what the
            module is called with.
    """

    def add(x, sublayer, norm, whole=False):
        if layer.normalize_before:
            return x + sublayer(normed(x, norm))
        return normed(sublayer(x) if whole else x + sublayer(x), norm)

    for module, norm, keys, visible, plain in attentions:
        whole = isinstance(module, BranchedAttention) and module.feed_forward.adds_residual

        # bound now: the loop goes on
        def attention(x, module=module, keys=keys, visible=visible, plain=plain):
            return attend(module, x, x if keys is None else keys, visible, **plain)

        x = add(x, attention, norm, whole)
    if isinstance(getattr(layer, "fc2", None), WeightedLinear):
        x = add(x, lambda x: weighted_feed_forward(layer, x), layer.final_layer_norm)
    return x


def encoder_layer(model):
    """An encoder layer's output and that of the equations, for the same inputs, and those."""
    layer = model.encoder.layers[1]
    x = torch.randn(6, 2, 16, dtype=torch.double, requires_grad=True)
    padding = sentences()["src_tokens"].eq(PAD)
    visible = ~padding[:, None].expand(-1, 6, -1)
    attention = layer.self_attn, layer.self_attn_layer_norm, None, visible, {}
    return layer(x, padding), by_sublayers(layer, x, [attention]), [x, *layer.parameters()]


def decoder_layer(model):
    """The same of a decoder layer."""
    layer = model.decoder.layers[1]
    x = torch.randn(5, 2, 16, dtype=torch.double, requires_grad=True)
    encoder_out = torch.randn(6, 2, 16, dtype=torch.double, requires_grad=True)
    padding = sentences()["src_tokens"].eq(PAD)
    past, source = (FUTURE == 0).expand(2, -1, -1), ~padding[:, None].expand(-1, 5, -1)
    to_self = {"attn_mask": FUTURE, "need_weights": False}
    to_encoder = {"key_padding_mask": padding, "static_kv": True, "need_weights": False}
    attentions = [
        (layer.self_attn, layer.self_attn_layer_norm, None, past, to_self),
        (layer.encoder_attn, layer.encoder_attn_layer_norm, encoder_out, source, to_encoder),
    ]
    found, _, _ = layer(x, encoder_out, padding, self_attn_mask=FUTURE)
    inputs = [x, encoder_out, *layer.parameters()]
    return found, by_sublayers(layer, x, attentions), inputs


@READINGS
@SUMS
def test_encoder_layers_and_gradients_are_those_of_the_equations(residual, network, total):
    assert_same(*encoder_layer(build(residual, network, total)))


@READINGS
@SUMS
@ATTENTIONS
def test_decoder_layers_and_gradients_are_those_of_the_equations(
    residual, network, total, attention
):
    model = build(residual, network, total, branch_decoder_attention=attention)
    assert_same(*decoder_layer(model))


@pytest.mark.parametrize("residual", ["as-written", "sublayers"])
@SUMS
def test_norms_may_stand_before_the_sublayers(residual, total):
    model = build(residual, total=total, pre_norm=True, branch_decoder_attention="both")
    for layer in (encoder_layer, decoder_layer):
        assert_same(*layer(model))
