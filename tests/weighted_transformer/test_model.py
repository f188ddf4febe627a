"""The models: sizes, options, errors, checkpoints, and κ and α in validation logs."""

import re

import pytest
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.models.transformer import TransformerModel

from fairseq_plugins.modules import (
    AttentionHeads,
    BranchedAttention,
    BranchedFeedForward,
    BranchWeights,
)
from fairseq_plugins.weighted_transformer.branch_weights import BranchSchedule
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights
from tests.weighted_transformer.tiny import (
    EACH_READING,
    READINGS,
    sentences,
    tiny_plain_transformer,
    tiny_weighted_transformer,
    weights_in,
)


@EACH_READING
@pytest.mark.parametrize("attention", ["encoder", "self", "both"])
def test_parameters_are_those_of_the_plain_transformer_and_branch_weights(reading, attention):
    model = tiny_weighted_transformer(branch_decoder_attention=attention, branch_residual=reading)
    ours, plain = (
        sum(p.numel() for p in m.parameters()) for m in (model, tiny_plain_transformer())
    )
    layers, branches, width, both = 2, 4, 16, attention == "both"
    expected = layers * (2 + 2 + both) * branches
    if reading == "as-written":
        # each layer has one norm fewer; with both, a second network adds an α and an output bias
        expected += layers * (both * branches + (both - 4) * width)
    assert ours - plain == expected


@pytest.mark.parametrize("attention", ["encoder", "self"])
def test_encoder_and_decoder_have_widths_and_branches_of_their_own(attention):
    options = {"branch_parameterization": "softmax", "branch_weights": "random", "branch_top_k": 2}
    options |= {"branch_lr": 0.5, "branch_warmup_updates": 7, "freeze_branch_weights_after": 9}
    encoder = {"encoder_embed_dim": 24, "encoder_ffn_embed_dim": 36, "encoder_attention_heads": 3}
    decoder = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 3}
    decoder |= {"branch_decoder_attention": attention, "share_all_embeddings": False}
    model = tiny_weighted_transformer(**encoder, **decoder, **options)
    for stack, width, branches in ((model.encoder, 24, 3), (model.decoder, 16, 4)):
        for layer in stack.layers:
            found = weights_in(layer)
            assert len(found) == 2
            factor = pytest.approx(0.5 * (width / len(stack.layers)) ** -0.5)
            schedule = vars(BranchSchedule(factor, 7, freeze_after=9, projected=False))
            for weights in found:
                assert vars(weights.schedule) == schedule
                assert (weights.branches, weights.softmax, weights.top_k) == (branches, True, 2)
                assert weights.outside_training == "random"
    out, _ = model(**sentences())
    out.sum().backward()


def test_a_width_that_is_not_given_is_the_encoders():
    # fairseq's default, 2048, is not a multiple of 3
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    model = tiny_weighted_transformer(encoder_embed_dim=24, **heads)
    assert model.decoder.layers[0].fc1.weight.shape == (24, 24)


@EACH_READING
@pytest.mark.parametrize(
    "options",
    [
        {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
        {"share_all_embeddings": False, "adaptive_softmax_cutoff": "8,14"},
        {"decoder_layers": 3, "encoder_layerdrop": 0.5},
    ],
)
def test_what_fairseqs_transformer_does_goes_on(reading, options):
    model = tiny_weighted_transformer(branch_residual=reading, **options)
    out, _ = model.train()(**sentences())
    out.square().sum().backward()
    grads = [w.kappa.grad for w in weights_in(model) if hasattr(w, "kappa")]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads)
    assert len(grads) == len(model.encoder.layers) + len(model.decoder.layers)


def test_training_needs_an_optimizer_that_knows_branches():
    model = tiny_weighted_transformer()
    # as fairseq does when it loads a model
    model.set_num_updates(3)
    with pytest.raises(ValueError, match="give --optimizer adam_with_branch_weights"):
        model.train().set_num_updates(0)
    model.eval().set_num_updates(0)
    AdamWithBranchWeights(model.parameters())
    model.train().set_num_updates(0)
    # training must not validate with other branch weights than it learns
    model = tiny_weighted_transformer(branch_weights="random")
    AdamWithBranchWeights(model.parameters())
    model.eval().set_num_updates(3)
    with pytest.raises(ValueError, match=r"^--branch-weights is random .* --model-overrides "):
        model.train().set_num_updates(0)


def load(saved, **options):
    tiny_weighted_transformer(**options).load_state_dict(saved.half().state_dict())


AS_WRITTEN = {"branch_residual": "as-written"}
BOTH = {**AS_WRITTEN, "branch_decoder_attention": "both"}
TOP_2 = {"branch_top_k": 2}
NOT_HAD = {"cross_self_attention": True, "no_cross_attention": True}
NOT_HAD |= {"quant_noise_pq": 0.1, "quant_noise_scalar": 0.1}
NOT_HAD |= {f"{part}_xformers_att_config": "{'name': 'favor'}" for part in ("encoder", "decoder")}
# the cause of each message, and its beginning
REFUSED = [
    ({"branch_residual": "none"}, "--branch-residual is 'none': there are sublayers, as-writt"),
    ({"branch_lr": 0.0}, "--branch-lr is 0.0: it must be above 0"),
    ({"branch_warmup_updates": 0}, "--branch-warmup-updates is 0: it must be at least 1"),
    ({"freeze_branch_weights_after": -1}, "--freeze-branch-weights-after is -1: it must be 0 "),
    ({"branch_top_k": 0}, "`top_k` is 0: it must be from 1 to the number of branches, 4"),
    ({"branch_top_k": 5}, "`top_k` is 5: it must be from 1 to the number of branches, 4"),
    ({**TOP_2, "branch_weights": "uniform"}, "`outside_training` uniform with `top_k`"),
    ({**TOP_2, "branch_training": "shake"}, "`shake` with `top_k`"),
    *(
        (
            {f"{part}_ffn_embed_dim": 26, "branch_residual": reading},
            "`ffn_embed_dim` is 26: the 4 branches share it, so it must be a multiple of `bran",
        )
        for part in ("encoder", "decoder")
        for reading in READINGS
    ),
    ({**BOTH, "decoder_ffn_embed_dim": 25}, "`ffn_embed_dim` is 25: both attentions"),
    *(
        ({name: value}, f"--{name.replace('_', '-')} is {value}: weighted_transformer does not")
        for name, value in NOT_HAD.items()
    ),
    # layers
    (lambda: AttentionHeads(12, 5), "`num_heads` is 5: it must divide `embed_dim`, 12"),
    (lambda: BranchedFeedForward(12, 22, BranchWeights(4)), "`ffn_embed_dim` is 22: the 4 br"),
    (
        lambda: BranchedAttention(
            AttentionHeads(16, 4), BranchedFeedForward(16, 32, BranchWeights(8))
        ),
        "`feed_forward` has 8 branches: it must have one for each of the 4 heads",
    ),
    (lambda: BranchWeights(4, start="none"), "`start` is 'none': there are random, near-uniform"),
    (lambda: BranchWeights(4, None, "none"), "`parameterization` is 'none': there are simplex, "),
    (lambda: BranchWeights(4, outside_training="none"), "`outside_training` is 'none': there are"),
    # checkpoints
    (
        lambda: load(tiny_weighted_transformer(**AS_WRITTEN), branch_sum="one"),
        "--branch-residual is sublayers and --branch-sum is one, and the checkpoint was trained "
        "with --branch-residual as-written --branch-sum branches: give --branch-residual as-wri",
    ),
    (lambda: load(tiny_weighted_transformer(branch_sum="one")), "--branch-sum is branches, and "),
    (lambda: load(tiny_plain_transformer(), branch_sum="one"), "--branch-sum is one, and the "),
    (lambda: load(tiny_plain_transformer(), **AS_WRITTEN), "--branch-residual is as-written, an"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(monkeypatch, refused, message):
    if "xformers" in message:
        # fairseq's layers would fail without the package xformers
        monkeypatch.setattr(TransformerModel, "build_model", lambda args, task: None)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tiny_weighted_transformer(**refused) if isinstance(refused, dict) else refused()


@pytest.mark.parametrize("options", [{}, AS_WRITTEN, {"branch_sum": "one"}])
def test_an_exponential_moving_average_of_the_weights_keeps_the_reading(options):
    """fairseq's --store-ema copies the model, and loads the average into the copy."""
    model = tiny_weighted_transformer(**options)
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    ema.step(model)
    # another reading would be refused
    load(ema.get_model(), seed=2, **options)
