"""Branched attention: the equations, the plain composition, folding, masks and precision."""

import copy
import inspect
import re
import textwrap

import pytest
import torch
from fairseq.modules import FairseqDropout, MultiheadAttention
from torch import nn

from fairseq_plugins import modules
from fairseq_plugins.modules import (
    AttentionHeads,
    BranchedAttention,
    BranchedFeedForward,
    BranchWeights,
)
from fairseq_plugins.weighted_transformer.layers import FusedAttention
from tests.gradients import assert_same
from tests.weighted_transformer.tiny import by_equations

WIDTH, INNER, SENTENCES, QUERIES, KEYS = 12, 24, 3, 4, 5


def fused_heads(*arguments, **options):
    """Heads as fairseq's layers have them."""
    heads = FusedAttention(*arguments, **options)
    heads.out_proj = nn.Identity()
    return heads


def build(branches=4, dtype=torch.double, dropout=0.0, **options):
    torch.manual_seed(1)
    heads = fused_heads(WIDTH, branches, dropout=dropout, **options)
    of_networks = FairseqDropout(0.0)
    feed_forward = BranchedFeedForward(
        WIDTH, INNER, BranchWeights(branches), activation_dropout=of_networks
    )
    for bias in (feed_forward.out_proj.bias, heads.q_proj.bias, heads.v_proj.bias):
        nn.init.normal_(bias)
    return BranchedAttention(heads, feed_forward).to(dtype)


def padding():
    mask = torch.zeros(SENTENCES, KEYS, dtype=torch.bool)
    mask[0, :2] = mask[2, 4:] = True
    return mask


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_attention_to_an_encoder_is_that_of_the_equations(branches):
    module = build(branches, encoder_decoder_attention=True)
    query = torch.randn(QUERIES, SENTENCES, WIDTH, dtype=torch.double, requires_grad=True)
    key = torch.randn(KEYS, SENTENCES, WIDTH, dtype=torch.double, requires_grad=True)
    options = {"key_padding_mask": padding(), "static_kv": True}
    out, none = module(query, key, key, need_weights=False, **options)
    visible = ~padding()[:, None].expand(-1, QUERIES, -1)
    expected = by_equations(module, query, key, visible)
    # keys have no use for a bias: it adds the same to all scores of a query
    learned = [p for name, p in module.named_parameters() if name != "heads.k_proj.bias"]
    assert_same(out, expected, [query, key, *learned])
    assert none is None
    # fairseq computes weights that are asked for in single precision
    out, weights = module(query, key, key, need_weights=True, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert (weights[~visible] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(SENTENCES, QUERIES))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("width", [WIDTH, 10])
def test_heads_alone_are_those_in_fairseqs_layers(width, padded, masked):
    of_keys = {"kdim": width, "vdim": width}
    plain = AttentionHeads(WIDTH, 4, dropout=0.5, **of_keys)
    fairseqs = fused_heads(WIDTH, 4, dropout=0.5, **of_keys)
    plain.load_state_dict(fairseqs.state_dict())
    inputs = torch.randn(KEYS, SENTENCES, WIDTH), *torch.randn(2, KEYS, SENTENCES, width)
    masks = {
        "key_padding_mask": padding() if padded else None,
        "attn_mask": torch.randn(KEYS, KEYS) if masked else None,
    }
    outputs = []
    for heads in (plain, fairseqs):
        torch.manual_seed(1)
        outputs.append(heads(*inputs, need_weights=False, **masks)[0])
    assert torch.equal(*outputs)
    found, expected = (heads.eval()(*inputs, **masks) for heads in (plain, fairseqs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"kdim": 48, "vdim": 48}, {"kdim": 24, "vdim": 24}])
def test_heads_alone_start_as_fairseqs_do(options):
    plain, fairseqs = AttentionHeads(48, 4, **options), MultiheadAttention(48, 4, **options)
    for name in ("q_proj", "k_proj", "v_proj"):
        found, expected = (getattr(heads, name).weight.abs().max() for heads in (plain, fairseqs))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_may_say_what_is_not_seen(padded):
    heads = AttentionHeads(WIDTH, 4)
    x = torch.randn(KEYS, SENTENCES, WIDTH)
    hidden = torch.zeros(KEYS, KEYS, dtype=torch.bool)
    hidden[:3, 2] = True
    scores = torch.zeros(KEYS, KEYS).masked_fill(hidden, float("-inf"))
    found, expected = (
        heads(x, x, x, attn_mask=mask, key_padding_mask=padding() if padded else None)
        for mask in (hidden, scores)
    )
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[0], heads(x, x, x)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_padding_may_be_told_by_numbers(dtype):
    module = build(dtype=torch.float, self_attention=True)
    x = torch.randn(KEYS, SENTENCES, WIDTH)
    out, expected = (
        module(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        for mask in (padding().to(dtype), padding())
    )
    assert torch.equal(out, expected)
    assert not torch.allclose(out, module(x, x, x, need_weights=False)[0])


def test_it_is_built_and_called_as_its_docstring_shows():
    example = re.search(r"::\n\n(.+?)\n\n", inspect.getdoc(BranchedAttention), re.DOTALL)[1]
    assert len(example.splitlines()) == 3
    torch.manual_seed(1)
    x = torch.randn(4, 2, 512)
    found = {**vars(modules), "x": x}
    exec(textwrap.dedent(example), found)
    visible = torch.ones(2, 4, 4, dtype=torch.bool)
    torch.testing.assert_close(found["output"], by_equations(found["attention"], x, x, visible))


def test_the_projection_starts_as_fairseqs_does():
    torch.manual_seed(1)
    projection = BranchedFeedForward(64, 64, BranchWeights(4)).out_proj
    assert not projection.bias.any()
    # Xavier's bound; torch's own is 1/8
    bound = (6 / (64 + 64)) ** 0.5
    assert 0.95 * bound < projection.weight.abs().max() <= bound


def test_dropout_that_is_to_be_retained_acts_outside_of_training():
    module = build(dtype=torch.float, dropout=0.5, self_attention=True).eval()
    module.feed_forward.activation_dropout.p = 0.5
    x = torch.randn(KEYS, SENTENCES, WIDTH)
    for part, compute in [
        (module.heads.dropout_module, lambda: module.heads(x, x, x, need_weights=False)[0]),
        (module.feed_forward.activation_dropout, lambda: module.feed_forward(x)),
    ]:
        assert torch.equal(compute(), compute())
        # as fairseq does for --retain-dropout
        part.make_generation_fast_("", retain_dropout=True)
        assert not torch.equal(compute(), compute())


@pytest.mark.parametrize("dropped", [False, True], ids=["run", "dropped"])
@torch.no_grad()
def test_what_an_optimizer_does_behind_autograds_back_is_seen(dropped):
    network = build(dtype=torch.float).feed_forward
    heads = torch.randn(3, WIDTH)
    before = network.eval()(heads)
    network.train()
    # a layer that --encoder-layerdrop passes over learns too, by Adam's momentum
    if not dropped:
        with torch.enable_grad():
            network(heads)
    # as fairseq's Adam does
    for weight in network.parameters():
        weight.data.mul_(1.5)
    found = network.eval()(heads)
    assert not torch.allclose(found, before)
    torch.testing.assert_close(found, network.train()(heads))


def test_copies_fold_for_themselves():
    network = build(dtype=torch.float).feed_forward.eval()
    heads = torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = network(heads)
        other = copy.deepcopy(network)
        other.fc2.weight.zero_()
        torch.testing.assert_close(other(heads), other.fc2.bias.expand(3, -1))
        torch.testing.assert_close(network(heads), expected)


def test_activation_and_its_dropout_are_those_asked_for():
    network = BranchedFeedForward(WIDTH, INNER, BranchWeights(1), torch.tanh, 0.5)
    x = torch.randn(7, WIDTH)
    expected = network.fc2(torch.tanh(network.fc1(network.out_proj(x))))
    torch.testing.assert_close(network.eval()(x), expected)
    assert not torch.allclose(network.train()(x), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AttentionHeads(WIDTH, 5), "`num_heads` is 5: it must divide `embed_dim`, 12"),
        (
            lambda: BranchedFeedForward(WIDTH, 22, BranchWeights(4)),
            "`ffn_embed_dim` is 22: the 4 branches share it, so it must be a multiple of ",
        ),
        (
            lambda: BranchedAttention(
                AttentionHeads(16, 4), BranchedFeedForward(16, 32, BranchWeights(8))
            ),
            "`feed_forward` has 8 branches: it must have one for each of the 4 heads",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(build, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build()
