"""The models: sizes, options, errors, checkpoints, and averages of weights."""

import copy
import re

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA

from fairseq_plugins.weighted_transformer.branch_weights import draw_from_simplex
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights
from tests.weighted_transformer.tiny import (
    EACH_VARIANT,
    VARIANTS,
    sentences,
    tiny_plain_transformer,
    tiny_weighted_transformer,
    weights_in,
)

AS_WRITTEN = {"branch_residual": "as-written"}


@pytest.mark.parametrize("attention", ["encoder", "self", "both"])
def test_the_variant_as_written_has_fairseqs_matrices_and_fewer_norms(attention):
    model = tiny_weighted_transformer(branch_decoder_attention=attention, **AS_WRITTEN)
    ours, plain = (
        sum(p.numel() for p in m.parameters()) for m in (model, tiny_plain_transformer())
    )
    layers, branches, width, both = 2, 4, 16, attention == "both"
    # with both, a second network in each decoder layer adds κ, α and an output bias
    added = (2 + both) * 2 * branches + both * width
    assert ours - plain == layers * (added - 2 * 2 * width)


def test_branches_as_written_are_gated_by_alpha_alone():
    model = tiny_weighted_transformer(branch_top_k=2, **AS_WRITTEN)
    contributing = {(w.name, int(w().count_nonzero())) for w in weights_in(model)}
    assert contributing == {("kappa", 4), ("alpha", 2)}


@pytest.mark.parametrize("attention", ["encoder", "self"])
def test_encoder_and_decoder_have_separate_widths_and_branches(attention):
    options = {"branch_parameterization": "softmax", "branch_top_k": 2, "branch_sum": "branches"}
    options |= {"branch_lr": 0.5, "branch_warmup_updates": 7, "freeze_branch_weights_after": 9}
    encoder = {"encoder_embed_dim": 24, "encoder_ffn_embed_dim": 36, "encoder_attention_heads": 3}
    decoder = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 3}
    decoder |= {"branch_decoder_attention": attention, "share_all_embeddings": False}
    model = tiny_weighted_transformer(**encoder, **decoder, **options)
    for part, width, branches in (("encoder", 24, 3), ("decoder", 16, 4)):
        stack = getattr(model, part)
        factor = 0.5 * (width / len(stack.layers)) ** -0.5
        rates = [pytest.approx(factor * 2 * 7**-1.5), pytest.approx(factor * 9**-0.5), None]
        # a copy is trained alike
        for each in (stack, getattr(copy.deepcopy(model), part)):
            schedules = AdamWithBranchWeights(each.parameters()).schedules
            assert len(schedules) == len(stack.layers)
            for schedule in schedules:
                assert [schedule.learning_rate(update) for update in (2, 9, 10)] == rates
        assert len(weights_in(stack)) == 2 * len(stack.layers)
        for weights in weights_in(stack):
            assert (weights.branches, weights.softmax, weights.top_k) == (branches, True, 2)
            assert weights.total == branches
    model(**sentences())[0].sum().backward()


@EACH_VARIANT
@pytest.mark.parametrize(
    "options",
    [
        {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
        {"share_all_embeddings": False, "adaptive_softmax_cutoff": "8,14"},
        {"decoder_layers": 3, "encoder_layerdrop": 0.5},
    ],
)
def test_models_take_the_options_of_fairseqs_transformer(variant, options):
    model = tiny_weighted_transformer(branch_residual=variant, **options)
    out, _ = model.train()(**sentences())
    out.square().sum().backward()
    grads = [w.kappa.grad for w in weights_in(model) if hasattr(w, "kappa")]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads)
    assert len(grads) == len(model.encoder.layers) + len(model.decoder.layers)


def test_training_refuses_other_weights_in_evaluation_than_it_learns():
    model = tiny_weighted_transformer(branch_weights="random")
    with pytest.raises(ValueError, match=r"^--branch-weights is random .* --model-overrides "):
        AdamWithBranchWeights(model.parameters())


def test_weights_that_are_not_learned_need_no_optimizer_of_their_own():
    for weights in weights_in(tiny_weighted_transformer(branch_training="shake", optimizer="adam")):
        assert not any(parameter.requires_grad for parameter in weights.parameters())
        assert not torch.equal(weights(), weights())


def test_weights_start_and_are_replaced_in_evaluation_as_asked():
    spread = {}
    for start in ("near-uniform", "random"):
        model = tiny_weighted_transformer(branch_start=start)
        spread[start] = [float((w().max() / w().min()).detach()) for w in weights_in(model)]
    assert spread["near-uniform"] == pytest.approx([2] * 8)
    assert max(spread["random"]) > 3
    for weights in weights_in(tiny_weighted_transformer(branch_weights="uniform").eval()):
        assert weights().tolist() == [0.25] * 4


def load(saved, **options):
    tiny_weighted_transformer(**options).load_state_dict(saved.half().state_dict())


BOTH = {**AS_WRITTEN, "branch_decoder_attention": "both"}
NOT_HAD = {"cross_self_attention": True, "no_cross_attention": True, "quant_noise_pq": 0.1}
NOT_HAD |= {"base_layers": 1}
# the cause of each message, and its beginning
REFUSED = [
    ({"branch_residual": "none"}, "`variant` is 'none': there are sublayers, as-written"),
    (
        {"optimizer": "adam"},
        "--optimizer is adam: it would train kappa and alpha like all other weights",
    ),
    *(
        ({"encoder_ffn_embed_dim": 26, "branch_residual": variant}, "--encoder-ffn-embed-dim is 26")
        for variant in VARIANTS
    ),
    ({**BOTH, "decoder_ffn_embed_dim": 25}, "--decoder-ffn-embed-dim is 25: both"),
    *(
        ({name: value}, f"--{name.replace('_', '-')} is {value}: weighted_transformer does not")
        for name, value in NOT_HAD.items()
    ),
    # checkpoints
    (
        lambda: load(tiny_weighted_transformer(**AS_WRITTEN), branch_sum="branches"),
        "the checkpoint computes what --branch-residual as-written --branch-sum one does: give the",
    ),
    *(
        (
            lambda options=options: load(tiny_plain_transformer(), **options),
            "the checkpoint computes what --branch-residual sublayers --branch-sum branches does",
        )
        for options in ({}, AS_WRITTEN)
    ),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_models_refuse_impossible_options_and_checkpoints(refused, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tiny_weighted_transformer(**refused) if isinstance(refused, dict) else refused()


def test_a_plain_transformer_is_continued():
    plain = tiny_plain_transformer().eval()
    model = tiny_weighted_transformer(seed=2, branch_sum="branches").eval()
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(**sentences())[0], plain(**sentences())[0])


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, AS_WRITTEN, {"branch_sum": "branches"}])
def test_a_moving_average_averages_branch_weights(options, dtype, fp32):
    """fairseq's --store-ema copies the model, and loads the average into the copy."""
    model = tiny_weighted_transformer(**options).to(dtype)
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.75, ema_fp32=fp32))
    weights = [weight for part in weights_in(model) for weight in part.parameters()]
    means = [weight.detach().clone() for weight in weights]
    for _ in range(3):
        for weight, mean in zip(weights, means, strict=True):
            weight.data = draw_from_simplex(4)
            mean.lerp_(weight.data, 0.25)
        ema.step(model)
    averaged = ema.get_model()
    for part, mean in zip(weights_in(averaged), means, strict=True):
        (weight,) = part.parameters()
        torch.testing.assert_close(weight.data, mean)
    # an average of another variant would be refused
    other = tiny_weighted_transformer(seed=2, **options).to(dtype).eval()
    ema.reverse(other)
    torch.testing.assert_close(other(**sentences())[0], averaged.eval()(**sentences())[0])
