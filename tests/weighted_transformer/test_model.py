"""The Weighted Transformer in fairseq's encoder and decoder: layers, sizes, decoding, refusals."""

import re

import pytest
import torch
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.branched_attention import BranchedAttention
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights
from fairseq_plugins.weighted_transformer.options import OPTIMIZER
from tests.tiny import dictionary
from tests.weighted_transformer.tiny import (
    PAD,
    by_equations,
    sentences,
    tiny_as_written,
    tiny_plain_transformer,
)

NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
ATTENTIONS = pytest.mark.parametrize("attention", ["encoder", "self"])


def add(x, sublayer, layer_norm, pre_norm):
    """A residual sublayer, normalised before it or after."""
    return x + sublayer(layer_norm(x)) if pre_norm else layer_norm(x + sublayer(x))


@NORMS
def test_an_encoder_layer_is_one_residual_sublayer(pre_norm):
    model = tiny_as_written(encoder_normalize_before=pre_norm).double().eval()
    layer = model.encoder.layers[1]
    x = torch.randn(6, 2, 16, dtype=torch.double)
    padding = sentences()["src_tokens"].eq(PAD)
    visible = ~padding[:, None].expand(-1, 6, -1)
    expected = add(
        x,
        lambda x: by_equations(layer.self_attn, x, x, visible),
        layer.self_attn_layer_norm,
        pre_norm,
    )
    torch.testing.assert_close(layer(x, padding), expected)
    # a mask of which token sees which
    diagonal = torch.eye(6)
    visible = visible & ~diagonal.bool()
    expected = add(
        x,
        lambda x: by_equations(layer.self_attn, x, x, visible),
        layer.self_attn_layer_norm,
        pre_norm,
    )
    torch.testing.assert_close(layer(x, padding, diagonal), expected)


@NORMS
@ATTENTIONS
def test_a_decoder_layer_is_two_residual_sublayers_of_which_one_is_branched(attention, pre_norm):
    model = tiny_as_written(decoder_normalize_before=pre_norm, branch_decoder_attention=attention)
    layer = model.double().eval().decoder.layers[1]
    x, encoder_out = torch.randn(5, 2, 16).double(), torch.randn(6, 2, 16).double()
    padding = sentences()["src_tokens"].eq(PAD)
    future = torch.triu(torch.full((5, 5), float("-inf"), dtype=torch.double), 1)

    def to_self(x):
        if attention == "self":
            return by_equations(layer.self_attn, x, x, (future == 0).expand(2, -1, -1))
        return layer.self_attn(x, x, x, attn_mask=future, need_weights=False)[0]

    def to_encoder(x):
        if attention == "encoder":
            visible = ~padding[:, None].expand(-1, 5, -1)
            return by_equations(layer.encoder_attn, x, encoder_out, visible)
        return layer.encoder_attn(x, encoder_out, encoder_out, key_padding_mask=padding)[0]

    out, weights, _ = layer(x, encoder_out, padding, self_attn_mask=future, need_attn=True)
    expected = add(x, to_self, layer.self_attn_layer_norm, pre_norm)
    expected = add(expected, to_encoder, layer.encoder_attn_layer_norm, pre_norm)
    torch.testing.assert_close(out, expected)
    assert weights.shape == (2, 5, 6)
    branched = [name for name, m in layer.named_modules() if isinstance(m, BranchedAttention)]
    assert branched == [f"{attention}_attn"]


@ATTENTIONS
def test_parameters_are_those_of_the_plain_transformer_but_for_branch_weights_and_one_norm(
    attention,
):
    weighted = tiny_as_written(branch_decoder_attention=attention)
    plain = tiny_plain_transformer()
    counts = [sum(p.numel() for p in model.parameters()) for model in (weighted, plain)]
    layers, branches, width = 4, 4, 16
    assert counts[0] - counts[1] == layers * (2 * branches - 2 * width)


@ATTENTIONS
def test_decoding_word_by_word_gives_what_a_whole_sentence_gives(attention):
    model = tiny_as_written(branch_decoder_attention=attention).eval()
    batch = sentences()
    with torch.no_grad():
        whole, _ = model(**batch)
        encoder_out = model.encoder(batch["src_tokens"], batch["src_lengths"])
        state = {}
        for length in range(1, 6):
            words = batch["prev_output_tokens"][:, :length]
            last, _ = model.decoder(words, encoder_out=encoder_out, incremental_state=state)
            real = words[:, -1].ne(PAD)
            torch.testing.assert_close(last[real, 0], whole[real, length - 1])


def test_padding_changes_nothing():
    model = tiny_as_written().eval()
    batch = sentences()
    whole, _ = model(**batch)
    alone, _ = model(
        batch["src_tokens"][1:, 2:], torch.tensor([4]), batch["prev_output_tokens"][1:]
    )
    torch.testing.assert_close(whole[1:], alone)


def test_beam_search_translates_and_returns_alignments():
    model = tiny_as_written().eval()
    batch = sentences()
    generator = SequenceGenerator([model], dictionary(), beam_size=3, max_len_b=6)
    sample = {"net_input": {name: batch[name] for name in ("src_tokens", "src_lengths")}}
    for hypotheses in generator.generate([model], sample):
        assert len(hypotheses) == 3
        scores = [hypothesis["score"].item() for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        best = hypotheses[0]
        assert best["attention"].shape == (6, len(best["tokens"]))


@pytest.mark.parametrize(
    "options",
    [
        {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
        {
            "share_all_embeddings": False,
            "adaptive_softmax_cutoff": "8,14",
        },
        {"checkpoint_activations": True},
        {"decoder_layers": 3, "encoder_layerdrop": 0.5},
    ],
)
def test_what_fairseqs_transformer_does_goes_on(options):
    model = tiny_as_written(**options)
    model.train()
    out, _ = model(**sentences())
    out.square().sum().backward()
    grads = [w.kappa.grad for w in model.modules() if isinstance(w, BranchWeights)]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads)
    assert len(grads) == len(model.encoder.layers) + len(model.decoder.layers)


def test_options_reach_every_branched_layer():
    model = tiny_as_written(
        decoder_layers=3,
        branch_parameterization="softmax",
        branch_weights="random",
        branch_top_k=2,
        branch_lr=0.5,
        branch_warmup_updates=7,
        freeze_branch_weights_after=9,
    )
    for part, layers in (("encoder", 2), ("decoder", 3)):
        stack = getattr(model, part)
        found = [m for m in stack.modules() if isinstance(m, BranchWeights)]
        assert len(found) == layers
        for weights in found:
            assert weights.softmax
            assert weights.outside_training == "random"
            assert weights.top_k == 2
            schedule = weights.schedule
            assert schedule.factor == pytest.approx(0.5 * (16 / layers) ** -0.5)
            assert (schedule.warmup, schedule.freeze_after) == (7, 9)
            assert not schedule.projected


def test_training_with_an_optimizer_that_knows_no_branches_is_refused():
    model = tiny_as_written()
    # as fairseq does when it loads a model
    model.set_num_updates(3)
    message = (
        "this --optimizer would let kappa and alpha leave the simplex, at the learning rate of all "
        f"weights: give --optimizer {OPTIMIZER}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model.train().set_num_updates(0)
    model.eval().set_num_updates(0)
    AdamWithBranchWeights(model.parameters())
    model.train().set_num_updates(0)


@pytest.mark.parametrize("replaced", ["uniform", "random"])
def test_training_with_other_weights_for_validation_is_refused(replaced):
    model = tiny_as_written(branch_weights=replaced)
    AdamWithBranchWeights(model.parameters())
    message = (
        f"--branch-weights is {replaced} in training, which would validate with other weights than "
        "it learns: leave it out, and give it where the model is evaluated, --model-overrides "
        "\"{'branch_weights': ...}\""
    )
    model.eval().set_num_updates(3)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model.train().set_num_updates(0)


@pytest.mark.parametrize("saved", ["simplex", "softmax"])
def test_a_checkpoint_of_the_other_parameterization_is_refused(saved):
    (loaded,) = {"simplex", "softmax"} - {saved}
    state = tiny_as_written(branch_parameterization=saved).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*\.weights\.kappa"):
        tiny_as_written(branch_parameterization=loaded).load_state_dict(state)
    tiny_as_written(seed=2, branch_parameterization=saved).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branch_lr": 0.0}, "--branch-lr is 0.0: it must be above 0"),
        ({"branch_warmup_updates": 0}, "--branch-warmup-updates is 0: it must be at least 1"),
        (
            {"freeze_branch_weights_after": -1},
            "--freeze-branch-weights-after is -1: it must be 0 or more",
        ),
        (
            {"branch_parameterization": "sphere"},
            "--branch-parameterization is 'sphere': there are simplex, softmax",
        ),
        (
            {"branch_weights": "none"},
            "--branch-weights is 'none': there are learned, random, uniform",
        ),
        (
            {"branch_top_k": 0},
            "--branch-top-k is 0: it must be from 1 to the number of branches, 4",
        ),
        (
            {"branch_top_k": 5},
            "--branch-top-k is 5: it must be from 1 to the number of branches, 4",
        ),
        (
            {"branch_top_k": 2, "branch_weights": "uniform"},
            "--branch-weights uniform with --branch-top-k: no weight is larger than another; "
            "leave out one of the two (that of a trained model by --model-overrides "
            "\"{'branch_weights': 'uniform', 'branch_top_k': None}\")",
        ),
        (
            {"encoder_ffn_embed_dim": 26},
            "--encoder-ffn-embed-dim is 26: the 4 branches share it, so it must be a multiple of "
            "--encoder-attention-heads",
        ),
        (
            {"decoder_ffn_embed_dim": 26},
            "--decoder-ffn-embed-dim is 26: the 4 branches share it, so it must be a multiple of "
            "--decoder-attention-heads",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_as_written(**options)


def test_a_width_that_is_not_given_is_the_encoders():
    # fairseq's own default, 2048, is no multiple of 3
    model = tiny_as_written(
        leave_out=["decoder_ffn_embed_dim", "decoder_embed_dim"],
        encoder_embed_dim=24,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
    )
    feed_forward = model.decoder.layers[0].encoder_attn.feed_forward
    assert feed_forward.fc1.weight.shape == (24, 24)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cross_self_attention", True),
        ("no_cross_attention", True),
        ("quant_noise_pq", 0.1),
        ("quant_noise_scalar", 0.1),
        ("encoder_xformers_att_config", "{'name': 'favor'}"),
        ("decoder_xformers_att_config", "{'name': 'favor'}"),
    ],
)
def test_what_only_fairseqs_own_layers_do_is_refused(monkeypatch, option, value):
    if "xformers" in option:
        # fairseq's own layers would miss the package
        built = classmethod(lambda cls, args, task: None)
        monkeypatch.setattr(TransformerModel, "build_model", built)
    message = (
        f"--{option.replace('_', '-')} is {value}: the weighted_transformer has no such thing, "
        "leave it out or take --arch transformer"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_as_written(**{option: value})
