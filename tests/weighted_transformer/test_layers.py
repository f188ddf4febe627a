"""Layers of both variants: the equations, gating, decoding, precision, hooks and dropout."""

import pytest
import torch
from torch import nn

from fairseq_plugins.modules import (
    BranchWeights,
    WeightedDecoderLayer,
    WeightedEncoderLayer,
    WeightedLinear,
)
from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward
from fairseq_plugins.weighted_transformer.model import RetainableDropout
from tests.gradients import assert_same
from tests.reference.weighted_transformer import layer_norm, layer_output
from tests.weighted_transformer.tiny import (
    EACH_VARIANT,
    PAD,
    sentences,
    tiny_plain_transformer,
    tiny_weighted_transformer,
)

SUMS = pytest.mark.parametrize("total", ["one", "branches"], ids=["sum-1", "sum-M"])
ATTENTIONS = pytest.mark.parametrize("attention", ["encoder", "self", "both"])
NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
FUTURE = torch.triu(torch.full((5, 5), float("-inf"), dtype=torch.double), 1)


def build(variant, total="branches", pre_norm=False, **options):
    """Build a model in double precision whose biases and norms differ from their initial values."""
    norms = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": pre_norm}
    variant = {"branch_residual": variant, "branch_sum": total}
    return perturb(tiny_weighted_transformer(**variant, **norms, **options).double())


def perturb(model):
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def by_model_and_equations(model):
    """Return the decoder's last states (T, B, d), those of the equations, and what they depend on.

    Source and target have padding.
    """
    source, lengths, target = sentences().values()
    encoded = model.encoder(source, lengths, return_all_hiddens=True)
    _, extra = model.decoder(target, encoded)
    inputs = encoded["encoder_states"][0], extra["inner_states"][0]
    outputs, past = [], torch.ones(5, 5).tril().bool()
    for number, (x, y) in enumerate(zip(*(states.unbind(1) for states in inputs), strict=True)):
        real, known = source[number].ne(PAD), past & target[number].ne(PAD)
        for layer in model.encoder.layers:
            x = layer_output(layer, x, real.expand(6, -1))
        if model.encoder.layer_norm is not None:
            x = layer_norm(x, model.encoder.layer_norm)
        for layer in model.decoder.layers:
            y = layer_output(layer, y, known, x, real.expand(5, -1))
        outputs.append(y)
    layers = [*model.encoder.layers.parameters(), *model.decoder.layers.parameters()]
    return extra["inner_states"][-1], torch.stack(outputs, 1), [*inputs, *layers]


@EACH_VARIANT
@SUMS
@NORMS
@ATTENTIONS
def test_layers_in_fairseqs_model_and_gradients_equal_the_equations(
    variant, total, pre_norm, attention
):
    options = {"branch_decoder_attention": attention}
    assert_same(*by_model_and_equations(build(variant, total, pre_norm, **options)))
    # branches that are gated off also leave out their share of biases
    gated = build(variant, total, pre_norm, branch_top_k=2, **options)
    assert_same(*by_model_and_equations(gated))


@NORMS
@ATTENTIONS
@pytest.mark.parametrize("parameterization", ["simplex", "softmax"])
def test_layers_with_equal_weights_are_fairseqs(attention, pre_norm, parameterization):
    """A plain transformer's checkpoint loads, and computes the same: outputs and gradients."""
    common = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": not pre_norm}
    common |= {"activation_fn": "gelu"}
    plain = perturb(tiny_plain_transformer(seed=4, **common).double())
    options = {"branch_decoder_attention": attention, "branch_parameterization": parameterization}
    options |= {"branch_sum": "branches"}
    model = perturb(tiny_weighted_transformer(**common, **options).double())
    model.load_state_dict(plain.state_dict(), strict=True)
    outs = [m(**sentences())[0] for m in (plain, model)]
    # fairseq's attention to the encoder computes its softmax in single precision
    rounding = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(*outs, **rounding)
    for out in outs:
        out.square().mean().backward()
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, **rounding)
    weights = ours.keys() - dict(plain.named_parameters()).keys()
    assert len(weights) == 2 * 2 + 2 * (3 if attention == "both" else 2)
    for name in weights:
        weight = ours[name].softmax(0) if parameterization == "softmax" else ours[name]
        assert weight.tolist() == [0.25] * 4


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"parameterization": "softmax"}])
@pytest.mark.parametrize("branched", [False, True])
def test_inference_equals_training_for_any_number_of_tokens(branched, options):
    weights = [BranchWeights(4, **options) for _ in range(2)]
    if branched:
        layer = perturb(BranchedFeedForward(12, 24, *weights).double())
    else:
        layer = WeightedLinear(12, 8, weights[0]).double()
    for tokens in (0, 1, 60):
        x = torch.randn(tokens, 2, 12, dtype=torch.double, requires_grad=True)
        inputs = [x, *layer.parameters()]
        assert_same(layer.train()(x), layer.eval()(x), inputs)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "as-written"])
@torch.no_grad()
def test_exported_layers_take_batches_of_any_size(kind):
    if kind == "as-written":
        layer = BranchedFeedForward(16, 24, BranchWeights(2), BranchWeights(2))
    else:
        layer = (WeightedEncoderLayer if kind == "encoder" else WeightedDecoderLayer)(16, 4, 24)
    layer.eval()
    x, larger = ([torch.randn(size, 3, 16)] * (1 + (kind == "decoder")) for size in (2, 9))
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(layer, tuple(x), dynamic_shapes=[{0: batch}] * len(x))
    torch.testing.assert_close(exported.module()(*larger), layer(*larger))


def test_standalone_layers_equal_the_models():
    model = build("sublayers", "one")
    x, source = torch.randn(2, 5, 16).double(), torch.randn(2, 6, 16).double()
    padding = sentences()["src_tokens"].eq(PAD)
    visible = ~padding[:, None, None]
    encoder, decoder = WeightedEncoderLayer(16, 4, 24), WeightedDecoderLayer(16, 4, 24)
    encoder.double().load_state_dict(model.encoder.layers[1].state_dict())
    decoder.double().load_state_dict(model.decoder.layers[1].state_dict())
    expected = model.encoder.layers[1](source.transpose(0, 1), padding).transpose(0, 1)
    torch.testing.assert_close(encoder(source, visible), expected)
    inputs = x.transpose(0, 1), source.transpose(0, 1), padding
    expected, _, _ = model.decoder.layers[1](*inputs, self_attn_mask=FUTURE)
    # fairseq's attention to the encoder may compute its softmax in single precision
    torch.testing.assert_close(decoder(x, source, visible), expected.transpose(0, 1))


@EACH_VARIANT
@ATTENTIONS
@torch.no_grad()
def test_beams_token_by_token_equal_a_full_pass(variant, attention):
    options = {"branch_residual": variant, "branch_decoder_attention": attention}
    model, batch = tiny_weighted_transformer(**options).eval(), sentences()
    encoded = model.encoder(batch["src_tokens"], batch["src_lengths"])
    # three beams of each sentence; later the first sentence is finished
    beams, state = torch.tensor([0, 0, 0, 1, 1, 1]), {}
    encoded = model.encoder.reorder_encoder_out(encoded, beams)
    words = torch.full((6, 1), 2)
    for order in ([2, 0, 1, 3, 5, 5], [0, 0, 2, 4, 3, 5], [4, 3, 3], [2, 1, 0]):
        last, _ = model.decoder(words, encoder_out=encoded, incremental_state=state)
        whole, _ = model.decoder(words, encoder_out=encoded)
        torch.testing.assert_close(last[:, 0], whole[:, -1])
        order = torch.tensor(order)
        model.decoder.reorder_incremental_state_scripting(state, order)
        encoded = model.encoder.reorder_encoder_out(encoded, order)
        words = torch.cat([words[order], torch.randint(4, 12, (len(order), 1))], 1)


@EACH_VARIANT
@ATTENTIONS
def test_dropouts_act_before_the_residual_in_training(variant, attention):
    options = {"branch_residual": variant, "branch_decoder_attention": attention}
    options |= {"encoder_normalize_before": True, "decoder_normalize_before": True}
    model = tiny_weighted_transformer(dropout=1.0, **options)
    encoder_out, x = torch.randn(6, 2, 16), torch.randn(5, 2, 16)
    padding = sentences()["src_tokens"].eq(PAD)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    # nothing is left to add
    assert torch.equal(encoder(encoder_out, padding), encoder_out)
    assert torch.equal(decoder(x, encoder_out, padding)[0], x)
    model.eval()
    expected = encoder(encoder_out, padding)
    assert not torch.allclose(expected, encoder_out)
    assert not torch.allclose(decoder(x, encoder_out, padding)[0], x)
    # within attention and feed-forward networks
    for rate in ("attention_dropout", "activation_dropout", "relu_dropout"):
        encoder = tiny_weighted_transformer(**options, **{rate: 0.5}).encoder.layers[0]
        assert not torch.allclose(encoder(encoder_out, padding), expected)
        torch.testing.assert_close(encoder.eval()(encoder_out, padding), expected)


@EACH_VARIANT
@pytest.mark.parametrize("attention", ["encoder", "self"])
def test_layers_return_attention_weights_if_asked_to(variant, attention):
    options = {"branch_residual": variant, "branch_decoder_attention": attention}
    layer = tiny_weighted_transformer(**options).decoder.layers[0]
    inputs = torch.randn(5, 2, 16), torch.randn(6, 2, 16), sentences()["src_tokens"].eq(PAD)
    expected, weights, _ = layer(*inputs)
    assert weights is None
    queries_and_keys = []
    layer.encoder_attn.register_forward_pre_hook(lambda _, seen: queries_and_keys.extend(seen))
    output, weights, _ = layer(*inputs, need_head_weights=True)
    torch.testing.assert_close(output, expected)
    maps = layer.encoder_attn.q_proj, layer.encoder_attn.k_proj
    q, k = (f(x).unflatten(2, (4, 4)) for f, x in zip(maps, queries_and_keys, strict=True))
    scores = torch.einsum("tbmh,sbmh->mbts", q, k) / 2
    torch.testing.assert_close(
        weights, scores.masked_fill(inputs[2][None, :, None], -torch.inf).softmax(3)
    )


@EACH_VARIANT
def test_dropouts_that_generation_retains_act_in_evaluation(variant):
    rates = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    everywhere = None
    for modules in (everywhere, ["TransformerDecoderLayerBase"], ["MultiheadAttention"], []):
        model = tiny_weighted_transformer(branch_residual=variant, **rates)
        expected = model.eval()(**sentences())[0]
        model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=modules)
        active = {
            module.module_name
            for module in model.modules()
            if isinstance(module, RetainableDropout) and module.training
        }
        encoder, decoder = "TransformerEncoderLayerBase", "TransformerDecoderLayerBase"
        every = {encoder, decoder, "MultiheadAttention"}
        assert active == (every if modules is everywhere else set(modules))
        assert torch.allclose(model(**sentences())[0], expected) == (modules == [])


@EACH_VARIANT
@pytest.mark.parametrize("option", ["checkpoint_activations", "offload_activations"])
def test_activation_checkpointing_computes_twice_and_changes_no_gradient(variant, option):
    options = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    outs = []
    for more in ({}, {option: True}):
        model, calls = tiny_weighted_transformer(branch_residual=variant, **options, **more), []
        for stack in (model.encoder, model.decoder):
            stack.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        out = model(**sentences())[0]
        out.square().sum().backward()
        assert len(calls) == (4 if more else 2)
        outs.append([out, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*outs)


class Adapter(nn.Module):
    """A layer of rank 1 beside another, as adapters have it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.weight.size(1), 1, bias=False)
        self.up = nn.Linear(1, base.weight.size(0), bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@EACH_VARIANT
def test_hooks_and_adapters_of_every_projection_take_effect(variant):
    """Those of linear layers, and of our own that have matrices."""
    model = tiny_weighted_transformer(branch_residual=variant, branch_decoder_attention="both")
    model.eval()
    expected = model(**sentences())[0]
    projections = [
        (parent, name, module)
        for parent in (*model.encoder.layers.modules(), *model.decoder.layers.modules())
        for name, module in parent.named_children()
        if hasattr(module, "bias") and not isinstance(module, nn.LayerNorm)
    ]
    assert len(projections) == 2 * (16 if variant == "sublayers" else 15)
    for parent, name, module in projections:
        with module.register_forward_hook(lambda module, args, out: 2 * out):
            assert not torch.allclose(model(**sentences())[0], expected)
        if isinstance(module, (nn.Linear, WeightedLinear)):
            setattr(parent, name, Adapter(module))
            assert not torch.allclose(model(**sentences())[0], expected)
            setattr(parent, name, module)
    for _, name, module in projections:
        # fairseq scales queries in place
        if name in ("fc1", "fc2", "out_proj"):
            module.register_full_backward_hook(lambda module, into, out: tuple(0 * x for x in into))
    model.train()(**sentences())[0].sum().backward()
    assert not model.encoder.layers[0].self_attn_layer_norm.weight.grad.any()


def test_output_projections_start_as_those_of_fairseqs_attention():
    model = tiny_weighted_transformer(encoder_embed_dim=64, decoder_embed_dim=64)
    for module in (layer.self_attn.out_proj for layer in model.encoder.layers):
        assert not module.bias.any()
        # Xavier's uniform distribution
        assert module.weight.std().item() == pytest.approx((2 / (64 + 64)) ** 0.5, rel=0.1)
