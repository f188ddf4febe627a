"""segment_loss: value and gradient of each part, computed by hand, for both softmaxes; logs."""

import pytest
import torch
from fairseq.logging import metrics

from tests.reference.adaptive_softmax import log_probability
from tests.tiny import ADAPTIVE, VOCABULARY, segment_loss, tiny_model, tokens

PAD, GAMMA, SPAN, RAMP = 1, 0.01, 16, 4
SPAN_VALUES = [[0.1, 0.5], [0.0, 0.25], [1.0, 0.9]]


def model_with_spans(**options):
    model = tiny_model(attention_span=SPAN, adaptive_span=True, span_ramp=RAMP, **options).double()
    for span, values in zip(model.learned_spans(), SPAN_VALUES, strict=True):
        span.value.data = torch.tensor(values, dtype=torch.float64)
    return model


def batch():
    """Return three streams of 9 tokens: all scored, with unscored context, and ending early."""
    source, target, counts = tokens(3, 9), torch.full((3, 9), 4), [9, 6, 1]
    target[1, :3] = PAD
    target[2, 1:] = PAD
    # each letter once: fairseq's adaptive loss leaves out a part of the second cluster
    target[target.ne(PAD)] = torch.arange(4, VOCABULARY)
    return {
        "net_input": {"src_tokens": source},
        "target": target,
        "ntokens": sum(counts),
        "stream_tokens": counts,
    }


def by_hand(model, target, mask):
    """Compute the cross-entropy of a batch, token by token."""
    decoder = model.decoder
    hidden, _ = decoder.extract_features(batch()["net_input"]["src_tokens"])
    total = 0
    for stream, position in target.ne(PAD).nonzero().tolist():
        token = target[stream, position].item()
        dropped = mask[stream, position] * hidden[stream, position]
        if decoder.adaptive_softmax is None:
            log_prob = decoder.output_layer(dropped).log_softmax(-1)[token]
        else:
            log_prob = log_probability(decoder.adaptive_softmax, dropped, token)
        total = total - log_prob
    return total


@pytest.mark.parametrize("softmax", [{}, ADAPTIVE], ids=["", "adaptive"])
@pytest.mark.parametrize("average", ["tokens", "streams", "half"])
@pytest.mark.parametrize("cost", [0.0, GAMMA])
def test_loss_and_gradients_equal_those_by_hand(softmax, average, cost):
    half, streams = average == "half", average == "streams"
    model, sample = model_with_spans(**softmax), batch()
    mask = 2.0 * (torch.rand(3, 9, 16, generator=torch.Generator().manual_seed(1)) < 0.5).double()
    target = sample["target"].clone()
    if half:
        target[0, :4] = PAD
        target[1, 3:6] = PAD
    size = 9 if half else 16
    tokens_alone = by_hand(model, target, mask)
    model.decoder.output_dropout.register_forward_hook(lambda _, args, out: args[0] * mask)
    # the scored tokens, times the largest span, times the mean over heads, summed over layers
    spans = size * SPAN * sum(span.value.mean() for span in model.learned_spans())
    expected = tokens_alone + cost * spans
    criterion = segment_loss(half_loss=half, span_loss=cost, sentence_avg=streams)
    loss, sample_size, log = criterion.train()(model, sample)
    close = {"rtol": 1e-5, "atol": 1e-5}  # scores are normalised in single precision
    torch.testing.assert_close(loss, expected, check_dtype=False, **close)
    assert sample_size == (3 if streams else size)
    assert (log["ntokens"], log["nsentences"]) == (size, 3)
    assert log["loss"].item() == pytest.approx(tokens_alone.item(), rel=1e-6)
    assert log["span_loss"].item() == pytest.approx(cost * spans.item(), rel=1e-5)
    gradients = [
        torch.autograd.grad(each, model.parameters(), materialize_grads=True)
        for each in (loss, expected)
    ]
    torch.testing.assert_close(*gradients, **close)
    assert not any(getattr(value, "requires_grad", False) for value in log.values())
    # validation scores all tokens as evaluation does, without the cost of spans
    scored, _, log = criterion.eval()(model, sample)
    probs = model.get_normalized_probs(model(**sample["net_input"]), True, sample)
    picked = probs.gather(-1, sample["target"].unsqueeze(-1))[sample["target"] != PAD]
    assert log["ntokens"] == len(picked) == 16
    assert scored.item() == pytest.approx(-picked.sum().item(), rel=1e-5)


def logged(logs):
    with metrics.aggregate() as aggregate:
        type(segment_loss()).reduce_metrics(logs)
    return aggregate.get_smoothed_values()


@pytest.mark.parametrize("cost", [0.0, GAMMA])
def test_spans_are_logged_in_tokens_and_in_validation_by_layer(cost):
    model, criterion = model_with_spans(), segment_loss(span_loss=cost)
    logs = [criterion(model, batch())[2] for _ in range(2)]
    values = logged(logs)
    # each head sees z + ramp tokens, and at most the largest span
    assert values["span_mean"] == pytest.approx((5.6 + 12 + 4 + 8 + 16 + 16) / 6, abs=0.06)
    assert values["span_max"] == 16
    assert values["span_loss"] == pytest.approx(cost * SPAN * 1.375, abs=1e-5)
    assert "span_mean_1" not in values
    logs = [criterion.eval()(model, batch())[2] for _ in range(2)]
    values = logged(logs)
    assert [values[f"span_mean_{layer}"] for layer in (1, 2, 3)] == pytest.approx([8.8, 6, 16])
    assert [values[f"span_max_{layer}"] for layer in (1, 2, 3)] == [12, 8, 16]
    # fairseq may sum the statistics of workers first
    summed = {key: sum(log[key] for log in logs) for key in logs[0]}
    assert criterion.logging_outputs_can_be_summed()
    assert logged([summed]) == pytest.approx(values, rel=1e-5)
