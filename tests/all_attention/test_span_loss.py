"""The losses with the penalty of learned spans: values, gradients, statistics, errors."""

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.logging import metrics

from fairseq_plugins.all_attention.span_loss import (
    SpanCrossEntropy,
    SpanCrossEntropyConfig,
    SpanExactAdaptiveLoss,
    SpanExactAdaptiveLossConfig,
)
from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss
from tests.tiny import dictionary, tiny_model, tokens

SPAN, RAMP = 16, 4
VALUES = [[0.1, 0.5], [0.0, 0.25], [1.0, 0.9]]
ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "8,14",
    "adaptive_softmax_cutoff": "8,14",
    "tie_adaptive_weights": True,
}
TASK = type("Task", (), {"target_dictionary": dictionary()})()
BOTH = [
    (SpanCrossEntropy, SpanCrossEntropyConfig, {}),
    (SpanExactAdaptiveLoss, SpanExactAdaptiveLossConfig, ADAPTIVE),
]


def build(kind, config, options, coefficient=0.01):
    model = tiny_model(attention_span=SPAN, adaptive_span=True, span_ramp=RAMP, **options)
    for span, values in zip(model.decoder.spans, VALUES, strict=True):
        span.value.data = torch.tensor(values)
    criterion = kind.build_criterion(config(span_loss=coefficient, sentence_avg=False), TASK)
    return model, criterion


def batch(streams=3, length=8):
    text = tokens(streams, length + 1)
    return {
        "net_input": {"src_tokens": text[:, :-1]},
        "target": text[:, 1:].contiguous(),
        "ntokens": streams * length,
    }


@pytest.mark.parametrize(("kind", "config", "options"), BOTH)
def test_loss_and_gradient_are_those_of_tokens_and_penalty(kind, config, options):
    model, criterion = build(kind, config, options)
    if kind is SpanCrossEntropy:
        plain = CRITERION_REGISTRY["cross_entropy"](TASK, False)
    else:
        plain = ExactAdaptiveLoss(TASK, False)
    of_tokens, size, _ = plain(model, batch())
    with_penalty, with_size, log = criterion(model, batch())
    # the coefficient, times the largest span, times the mean over heads, summed over layers
    penalty = 0.01 * SPAN * sum(sum(values) / 2 for values in VALUES)
    assert size == with_size == 24
    torch.testing.assert_close(with_penalty.sum(), of_tokens.sum() + 24 * penalty)
    assert log["loss"].sum().item() == pytest.approx(of_tokens.sum().item())

    spans = [span.value for span in model.decoder.spans]
    parameters = list(model.parameters())
    of_plain = torch.autograd.grad(of_tokens.sum(), parameters, materialize_grads=True)
    of_both = torch.autograd.grad(with_penalty.sum(), parameters, materialize_grads=True)
    for parameter, one, other in zip(parameters, of_plain, of_both, strict=True):
        if any(parameter is span for span in spans):
            one = one + 24 * 0.01 * SPAN / 2
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_the_penalty_is_that_of_each_token_whatever_gradients_are_divided_by(sentence_avg):
    losses = []
    for coefficient in (0.0, 0.01):
        model, _ = build(*BOTH[0])
        config = SpanCrossEntropyConfig(span_loss=coefficient, sentence_avg=sentence_avg)
        losses.append(SpanCrossEntropy.build_criterion(config, TASK)(model, batch()))
    (without, size, _), (with_penalty, _, log) = losses
    assert size == (3 if sentence_avg else 24)
    penalty = 0.01 * SPAN * 1.375
    assert (with_penalty - without).item() == pytest.approx(24 * penalty, rel=1e-4)
    assert log["span_loss"].item() == pytest.approx(24 * penalty)


@pytest.mark.parametrize(("kind", "config", "options"), BOTH)
def test_validation_scores_the_tokens_alone(kind, config, options):
    model, criterion = build(kind, config, options)
    trained, _, _ = criterion(model, batch())
    scored, _, log = criterion.eval()(model, batch())
    assert scored.sum().item() == pytest.approx(log["loss"].sum().item())
    assert trained.sum() > scored.sum() + 1


def logged(criterion, logs):
    with metrics.aggregate() as aggregate:
        type(criterion).reduce_metrics(logs)
    return aggregate.get_smoothed_values()


def test_spans_are_logged_in_tokens_and_in_validation_by_layer():
    model, criterion = build(*BOTH[0])
    logs = [criterion(model, batch(streams))[2] for streams in (1, 3)]
    values = logged(criterion, logs)
    # each head sees z + ramp tokens, and at most the largest span
    assert values["span_mean"] == pytest.approx((5.6 + 12 + 4 + 8 + 16 + 16) / 6, abs=0.06)
    assert values["span_max"] == 16
    assert values["span_loss"] == pytest.approx(0.01 * SPAN * 1.375, abs=1e-5)
    assert "span_mean_1" not in values
    values = logged(criterion, [criterion.eval()(model, batch())[2]])
    assert [values[f"span_mean_{layer}"] for layer in (1, 2, 3)] == pytest.approx([8.8, 6, 16])
    assert [values[f"span_max_{layer}"] for layer in (1, 2, 3)] == [12, 8, 16]


def test_statistics_of_workers_may_be_summed_first():
    model, criterion = build(*BOTH[0])
    logs = [criterion.eval()(model, batch(streams))[2] for streams in (1, 3)]
    summed = {key: sum(log[key] for log in logs) for key in logs[0]}
    assert criterion.logging_outputs_can_be_summed()
    assert logged(criterion, [summed]) == pytest.approx(logged(criterion, logs), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "options", "message"),
    [
        (*BOTH[0], "--criterion span_cross_entropy needs --adaptive-span; .* cross_entropy"),
        (*BOTH[1], "--criterion span_exact_adaptive_loss needs --adaptive-span; .* exact_adaptive"),
    ],
)
def test_a_model_without_learned_spans_is_refused(kind, config, options, message):
    criterion = kind.build_criterion(config(sentence_avg=False), TASK)
    with pytest.raises(ValueError, match=message):
        criterion(tiny_model(**options), batch())


@pytest.mark.parametrize(
    ("softmax", "criterion", "message"),
    [
        (ADAPTIVE, BOTH[0], "span_cross_entropy is for models without .* span_exact_adaptive_loss"),
        ({}, BOTH[1], "span_exact_adaptive_loss is for models with --adaptive-softmax-cutoff: use"),
    ],
)
def test_a_loss_for_the_other_softmax_is_refused(softmax, criterion, message):
    kind, config, _ = criterion
    model, wrong = build(kind, config, softmax)
    with pytest.raises(ValueError, match=message):
        wrong(model, batch())


def test_a_negative_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"--span-loss is -1.0: it must be at least 0"):
        SpanCrossEntropy.build_criterion(
            SpanCrossEntropyConfig(span_loss=-1.0, sentence_avg=False), TASK
        )
