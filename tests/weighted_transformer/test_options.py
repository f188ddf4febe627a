"""fairseq's options in the Weighted Transformer's layers, and what validation logs of them."""

import copy
import pickle

import pytest
import torch
from fairseq.logging import metrics
from torch.nn import functional as F

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from tests.weighted_transformer.tiny import PAD, sentences, tiny_as_written

WIDTHS = {
    "share_all_embeddings": False,
    "encoder_embed_dim": 24,
    "encoder_ffn_embed_dim": 36,
    "encoder_attention_heads": 3,
    "decoder_layers": 3,
}
LAYERS = [f"{part}{number}" for part in ("encoder", "decoder") for number in (1, 2)]
FIGURES = {
    f"{layer}_{kind}{i}" for layer in LAYERS for kind in ("kappa", "alpha") for i in range(1, 5)
}


def branched(layer):
    """The attention of a layer that has branches."""
    return getattr(layer, "encoder_attn", layer.self_attn)


@pytest.mark.parametrize("activation_dropout", ["activation_dropout", "relu_dropout"])
def test_dropouts_and_activation_are_those_of_the_options(activation_dropout):
    model = tiny_as_written(
        dropout=0.1, attention_dropout=0.2, activation_fn="gelu", **{activation_dropout: 0.3}
    )
    for layer in (*model.encoder.layers, *model.decoder.layers):
        attention = branched(layer)
        assert layer.dropout_module.p == 0.1
        assert attention.heads.dropout_module.p == 0.2
        assert attention.feed_forward.activation_dropout.p == 0.3
        x = torch.linspace(-3, 3, 7)
        assert torch.equal(attention.feed_forward.activation(x), F.gelu(x))


@pytest.mark.parametrize("attention", ["encoder", "self"])
def test_encoder_and_decoder_have_widths_and_branches_of_their_own(attention):
    model = tiny_as_written(branch_decoder_attention=attention, **WIDTHS)
    for stack, width, inner, branches in ((model.encoder, 24, 36, 3), (model.decoder, 16, 24, 4)):
        for layer in stack.layers:
            (found,) = (m for m in layer.modules() if isinstance(m, BranchWeights))
            assert found.branches == branches
            factor = (width / len(stack.layers)) ** -0.5
            assert found.schedule.factor == pytest.approx(factor)
            name = "self" if stack is model.encoder else attention
            module = getattr(layer, f"{name}_attn")
            assert module.heads.num_heads == branches
            of_encoder = name == "encoder" or stack is model.encoder
            for projection in (module.heads.k_proj, module.heads.v_proj):
                assert projection.weight.shape == (width, 24 if of_encoder else 16)
            assert module.feed_forward.fc1.weight.shape == (inner, width)
    out, _ = model(**sentences())
    out.sum().backward()


@pytest.mark.parametrize("attention", ["encoder", "self"])
def test_dropout_is_of_what_is_added_to_the_residual_in_training(attention):
    options = {"encoder_normalize_before": True, "decoder_normalize_before": True}
    model = tiny_as_written(dropout=1.0, branch_decoder_attention=attention, **options)
    encoder_out, x = torch.randn(6, 2, 16), torch.randn(5, 2, 16)
    padding = sentences()["src_tokens"].eq(PAD)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    # nothing is left of it
    assert torch.equal(encoder(encoder_out, padding), encoder_out)
    assert torch.equal(decoder(x, encoder_out, padding)[0], x)
    model.eval()
    assert not torch.allclose(encoder(encoder_out, padding), encoder_out)
    assert not torch.allclose(decoder(x, encoder_out, padding)[0], x)


@pytest.mark.parametrize("attention", ["encoder", "self"])
def test_attention_to_the_encoder_is_told_when_it_is_asked_for(attention):
    layer = tiny_as_written(branch_decoder_attention=attention).decoder.layers[0]
    inputs = torch.randn(5, 2, 16), torch.randn(6, 2, 16), sentences()["src_tokens"].eq(PAD)
    assert layer(*inputs)[1] is None
    mean = layer(*inputs, need_attn=True)[1]
    of_heads = layer(*inputs, need_head_weights=True)[1]
    assert of_heads.shape == (4, 2, 5, 6)
    torch.testing.assert_close(of_heads.mean(0), mean)
    assert not torch.allclose(of_heads[0], of_heads[1])
    # generation wants it, unless fairseq tells layers otherwise
    torch.testing.assert_close(layer.eval()(*inputs)[1], mean)
    layer.make_generation_fast_(need_attn=False)
    assert layer(*inputs)[1] is None


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointed_activations_give_the_same_gradients(offload):
    option = "offload_activations" if offload else "checkpoint_activations"
    dropouts = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    models = [tiny_as_written(**dropouts, **more) for more in ({}, {option: True})]
    outs = []
    for model in models:
        torch.manual_seed(3)
        outs.append(model(**sentences())[0])
        outs[-1].square().sum().backward()
    torch.testing.assert_close(*outs)
    for plain, kept in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(kept.grad, plain.grad)
    for layer in (*models[1].encoder.layers, *models[1].decoder.layers):
        assert layer.forward.args == (layer.precheckpoint_forward, offload)


def validate(model):
    """What a pass over a validation set of one batch logs of branches, by name."""
    with metrics.aggregate(new_root=True) as found:
        model(**sentences())
    values = found.get_smoothed_values()
    return {name: values[name] for name in FIGURES & set(values)}


def weights_of(model):
    return model.encoder.layers[1].self_attn.feed_forward.weights


def test_validation_logs_what_was_learned_by_layer():
    model = tiny_as_written(branch_weights="uniform").eval()
    values = validate(model)
    assert set(values) == FIGURES
    for kind, learned in zip(("kappa", "alpha"), weights_of(model).learned(), strict=True):
        found = [values[f"encoder2_{kind}{i}"] for i in (1, 2, 3, 4)]
        assert found == pytest.approx(learned.tolist(), abs=1e-4)
    assert not validate(model.train())


def test_they_are_logged_once_in_each_validation(monkeypatch):
    model = tiny_as_written().eval()
    logged, log = [], metrics.log_derived
    monkeypatch.setattr(metrics, "log_derived", lambda *given: logged.append(given) or log(*given))
    for validations in (1, 2):
        with metrics.aggregate(new_root=True):
            for _ in range(3):
                model(**sentences())
        assert len(logged) == validations * len(FIGURES)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_log_what_is_their_own(copied):
    model = tiny_as_written().eval()
    with metrics.aggregate(new_root=True):
        model(**sentences())
        other = copied(model)
    before = validate(model)
    weights_of(other).kappa.data = torch.tensor([0.0, 0.0, 1.0, 0.0])
    found = validate(other)
    assert [found[f"encoder2_kappa{i}"] for i in (1, 2, 3, 4)] == [0, 0, 1, 0]
    assert validate(model) == before
