"""Where residual connections and norms are among branches: layers by their equations."""

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
READINGS = pytest.mark.parametrize(
    ("residual", "network"), NETWORKS, ids=["-".join(pair) for pair in NETWORKS]
)
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


@READINGS
@SUMS
def test_branches_that_do_not_contribute_leave_out_their_share_of_biases(residual, network, total):
    model = build(residual, network, total, branch_top_k=2)
    assert_same(*encoder_layer(model))


@READINGS
@SUMS
def test_heads_and_networks_of_branches_that_do_not_contribute_count_for_nothing(
    residual, network, total
):
    model = build(residual, network, total, branch_top_k=1, branch_decoder_attention="both")
    out, _ = model(**sentences())
    out.square().mean().backward()
    parts = {"v_proj": set(), "fc1": set()}
    for name, module in model.named_modules():
        part = name.rpartition(".")[2]
        if part in parts:
            of_branches = module.weight.grad.unflatten(0, (4, -1)).flatten(1)
            parts[part].add((of_branches != 0).any(1).sum().item())
    # the mean of z_i is that of all branches
    assert parts["v_proj"] == {4 if (residual, total) == ("branches", "branches") else 1}
    # a shared network has no slices
    assert parts["fc1"] == {1} or network == "shared"


@pytest.mark.parametrize("residual", ["as-written", "sublayers"])
@SUMS
def test_norms_may_stand_before_the_sublayers(residual, total):
    model = build(residual, total=total, pre_norm=True, branch_decoder_attention="both")
    for layer in (encoder_layer, decoder_layer):
        assert_same(*layer(model))


@NORMS
@ATTENTIONS
def test_with_equal_weights_times_m_two_sublayers_are_fairseqs_layer(attention, pre_norm):
    """A plain transformer's checkpoint loads, and computes the same: outputs and gradients."""
    norms = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": pre_norm}
    plain = stir(tiny_plain_transformer(seed=4, **norms).double())
    model = build(pre_norm=pre_norm, branch_decoder_attention=attention)
    model.load_state_dict(plain.state_dict(), strict=True)
    outs = [m(**sentences())[0] for m in (plain, model)]
    # fairseq's attention to the encoder has its softmax in single precision
    rounding = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(*outs, **rounding)
    for out in outs:
        out.square().mean().backward()
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, **rounding)
    weights = ours.keys() - dict(plain.named_parameters()).keys()
    assert len(weights) == 2 * 2 + 2 * (3 if attention == "both" else 2)
    assert all(ours[name].tolist() == [0.25] * 4 for name in weights)


@READINGS
@ATTENTIONS
def test_parameters_are_those_of_the_plain_transformer_and_branch_weights(
    residual, network, attention
):
    options = {"branch_residual": residual, "branch_feed_forward": network}
    model = tiny_weighted_transformer(branch_decoder_attention=attention, **options)
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, tiny_plain_transformer())]
    layers, branches, width = 2, 4, 16
    both = attention == "both"
    if residual == "sublayers":
        expected = layers * (2 + 2 + both) * branches
    else:
        expected = layers * (2 + 2 + 2 * both) * branches
        # the bias of the second network, and an inner norm
        expected += layers * both * width
        expected += layers * (2 * both * width if residual != "as-written" else -4 * width)
    assert counts[0] - counts[1] == expected


@READINGS
@torch.no_grad()
def test_folded_for_inference_until_a_weight_changes(residual, network):
    options = {"branch_decoder_attention": "both", "branch_feed_forward": network}
    model = tiny_weighted_transformer(branch_residual=residual, **options)
    for _ in range(2):
        expected = model.train()(**sentences())[0]
        torch.testing.assert_close(model.eval()(**sentences())[0], expected)
        before = expected
        for weights in (m for m in model.modules() if isinstance(m, BranchWeights)):
            for weight in weights.parameters():
                # as an optimizer of fairseq does
                weight.data.copy_(weight.flip(0))
        assert not torch.allclose(model.train()(**sentences())[0], before)


@READINGS
@torch.no_grad()
def test_bfloat16_is_near_single_precision(residual, network):
    model = tiny_weighted_transformer(
        branch_residual=residual, branch_feed_forward=network, branch_start="near-uniform"
    )
    half = copy.deepcopy(model).bfloat16()
    weights = [m for m in half.modules() if isinstance(m, BranchWeights)]
    assert {w.dtype for of in weights for w in of.parameters()} == {torch.float32}
    for training in (True, False):
        expected = model.train(training)(**sentences())[0]
        found = half.train(training)(**sentences())[0]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.15)
        with torch.autocast("cpu", torch.bfloat16):
            found = model.train(training)(**sentences())[0]
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.15)


@pytest.mark.parametrize("residual", ["networks", "branches"])
def test_dropout_has_one_mask_for_the_branches_of_a_token(residual):
    model = build(residual, dropout=0.5)
    network = model.encoder.layers[0].self_attn.feed_forward
    x = torch.randn(7, 4, 16, dtype=torch.double)
    dropped = network._drop(x)
    kept = dropped != 0
    assert (kept == kept[:, :1]).all()
    torch.testing.assert_close(dropped[kept], 2 * x[kept])
    assert 0.3 < kept.double().mean() < 0.7
    network.eval()
    assert network._drop(x) is x
    # as fairseq does for --retain-dropout
    network.dropout.make_generation_fast_("", retain_dropout=True)
    assert (network._drop(x) == 0).any()


@READINGS
@pytest.mark.parametrize("attention", ["self", "both"])
@torch.no_grad()
def test_decoding_word_by_word_gives_what_a_whole_sentence_gives(residual, network, attention):
    model = tiny_weighted_transformer(
        branch_residual=residual,
        branch_feed_forward=network,
        branch_decoder_attention=attention,
    ).eval()
    batch = sentences()
    whole, _ = model(**batch)
    encoder_out = model.encoder(batch["src_tokens"], batch["src_lengths"])
    state = {}
    for length in range(1, 6):
        words = batch["prev_output_tokens"][:, :length]
        last, _ = model.decoder(words, encoder_out=encoder_out, incremental_state=state)
        real = words[:, -1].ne(PAD)
        torch.testing.assert_close(last[real, 0], whole[real, length - 1])


@READINGS
def test_random_weights_are_drawn_in_each_pass_of_training_and_are_equal_outside(residual, network):
    options = {"branch_residual": residual, "branch_feed_forward": network}
    model = tiny_weighted_transformer(branch_training="shake", **options)
    weights = [m for m in model.modules() if isinstance(m, BranchWeights)]
    assert not any(parameter.requires_grad for of in weights for parameter in of.parameters())
    # no optimizer has to know them
    model.train().set_num_updates(0)
    batch = sentences()
    torch.manual_seed(7)
    first, second = (model(**batch)[0] for _ in range(2))
    assert not torch.allclose(first, second)
    torch.manual_seed(7)
    assert torch.equal(model(**batch)[0], first)
    # as where equal weights replace what was learned
    equal = tiny_weighted_transformer(branch_weights="uniform", **options)
    learned = {name: x for name, x in equal.state_dict().items() if ".weights." in name}
    equal.load_state_dict({**model.state_dict(), **learned})
    torch.testing.assert_close(model.eval()(**batch)[0], equal.eval()(**batch)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"branch_residual": "none"},
            "--branch-residual is 'none': there are as-written, sublayers, networks, branches",
        ),
        ({"branch_sum": "two"}, "--branch-sum is 'two': there are one, branches"),
        (
            {"branch_residual": "sublayers", "branch_feed_forward": "shared"},
            "--branch-feed-forward is shared with --branch-residual sublayers: all branches would "
            "compute the same, and alpha could not tell them apart; leave out one of the two",
        ),
        (
            {"branch_training": "shake", "branch_top_k": 2},
            "--branch-training shake with --branch-top-k: no weight is larger than another outside "
            "of training; leave out one of the two",
        ),
        (
            {"branch_residual": "networks", "decoder_normalize_before": True},
            "--decoder-normalize-before is True, and --branch-residual networks has norms behind "
            "residual connections: leave out one of the two",
        ),
        (
            {"branch_residual": "branches", "encoder_normalize_before": True},
            "--encoder-normalize-before is True, and --branch-residual branches has norms behind "
            "residual connections: leave out one of the two",
        ),
        (
            {"branch_residual": "sublayers", "encoder_ffn_embed_dim": 26},
            "--encoder-ffn-embed-dim is 26: the 4 branches share it, so it must be a multiple of "
            "--encoder-attention-heads",
        ),
        (
            {
                "branch_residual": "as-written",
                "branch_decoder_attention": "both",
                "decoder_ffn_embed_dim": 25,
            },
            "--decoder-ffn-embed-dim is 25: both attentions are branched and share it, so it must "
            "be even",
        ),
    ],
)
def test_readings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_weighted_transformer(**options)
