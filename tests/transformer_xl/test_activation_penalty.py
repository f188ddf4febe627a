"""The penalties of activations: values, gradients, what is logged, refusals."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from torch import nn

from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss
from fairseq_plugins.transformer_xl.activation_penalty import (
    PenalizedCrossEntropy,
    PenalizedCrossEntropyConfig,
    PenalizedExactAdaptiveLoss,
    PenalizedExactAdaptiveLossConfig,
    activation_penalty,
    temporal_penalty,
)
from tests.tiny import ADAPTIVE, tiny_task, tiny_transformer_xl, tokens

PAD, ALPHA, BETA = 1, 0.7, 0.3
KINDS = [
    (PenalizedCrossEntropy, PenalizedCrossEntropyConfig, CrossEntropyCriterion, {}),
    (
        PenalizedExactAdaptiveLoss,
        PenalizedExactAdaptiveLossConfig,
        ExactAdaptiveLoss,
        {**ADAPTIVE, "output_bias": True},
    ),
]


class Mask(nn.Module):
    """A dropout that always drops the same."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def batch():
    """Three streams of 9 tokens: whole, after context that is not scored, and ended early."""
    source = tokens(3, 9)
    target = source.roll(-1, dims=1)
    target[1, :3] = PAD
    target[2, 1:] = PAD
    return {"net_input": {"src_tokens": source}, "target": target, "ntokens": 16}


def by_hand(hidden, mask, target):
    """The penalties token by token, as the equations have them."""
    total = torch.zeros((), dtype=torch.float64)
    for stream, of_stream in enumerate(target.tolist()):
        scored = [place for place, token in enumerate(of_stream) if token != PAD]
        changes = []
        for place in scored:
            total = total + ALPHA * (mask[stream, place] * hidden[stream, place]).pow(2).mean()
            if place - 1 in scored:
                change = hidden[stream, place] - hidden[stream, place - 1]
                changes.append(change.pow(2).mean())
        if changes:
            total = total + BETA * len(scored) * sum(changes) / len(changes)
    return total


@pytest.mark.parametrize(("kind", "config", "plain", "options"), KINDS)
def test_loss_and_gradient_are_those_of_tokens_and_penalties(kind, config, plain, options):
    model, sample = tiny_transformer_xl(**options).double(), batch()
    mask = 2.0 * (torch.rand(3, 9, 16, generator=torch.Generator().manual_seed(1)) < 0.5).double()
    model.decoder.output_dropout = Mask(1.0)
    hidden, _ = model.decoder.extract_features(sample["net_input"]["src_tokens"])
    model.decoder.output_dropout = Mask(mask)
    of_tokens, _, _ = plain(tiny_task(), sentence_avg=False)(model, sample)
    expected = of_tokens + by_hand(hidden, mask, sample["target"])
    cfg = config(activation_penalty=ALPHA, temporal_penalty=BETA, sentence_avg=False)
    loss, size, log = kind.build_criterion(cfg, tiny_task()).train()(model, sample)
    torch.testing.assert_close(loss.sum(), expected.sum())
    assert size == 16
    assert log["loss"].sum().item() == pytest.approx(of_tokens.sum().item())
    assert log["penalty"].item() == pytest.approx((expected - of_tokens).sum().item())
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(loss.sum(), parameters, materialize_grads=True),
        torch.autograd.grad(expected.sum(), parameters, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert not model.decoder.output_dropout._forward_hooks


def test_of_whole_streams_they_are_the_means_of_awd_lstm():
    hidden = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))
    scored = torch.ones(3, 9, dtype=torch.bool)
    means = (hidden**2).mean(), ((hidden[:, 1:] - hidden[:, :-1]) ** 2).mean()
    torch.testing.assert_close(activation_penalty(hidden, scored), 27 * means[0])
    torch.testing.assert_close(temporal_penalty(hidden, scored), 27 * means[1])
    in_half = temporal_penalty(hidden.half(), scored)
    assert in_half.dtype == torch.float32


@pytest.mark.parametrize(("kind", "config", "plain", "options"), KINDS)
def test_without_coefficients_and_in_validation_the_loss_is_as_before(kind, config, plain, options):
    model, sample = tiny_transformer_xl(**options), batch()
    expected, _, _ = plain(tiny_task(), sentence_avg=False)(model, sample)
    unset = kind.build_criterion(config(sentence_avg=False), tiny_task())
    assert torch.equal(unset.train()(model, sample)[0], expected)
    cfg = config(activation_penalty=ALPHA, temporal_penalty=BETA, sentence_avg=False)
    penalized = kind.build_criterion(cfg, tiny_task())
    assert torch.equal(penalized.eval()(model, sample)[0], expected)
    assert penalized.train()(model, sample)[0].sum() > expected.sum()


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("option", ["activation_penalty", "temporal_penalty"])
def test_coefficients_that_are_none_are_refused(option, value):
    cfg = PenalizedCrossEntropyConfig(sentence_avg=False, **{option: value})
    flag = option.replace("_", "-")
    with pytest.raises(ValueError, match=rf"--{flag} is {value}: it must be at least 0, and"):
        PenalizedCrossEntropy.build_criterion(cfg, tiny_task())
