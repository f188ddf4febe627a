"""segment_loss: value and gradient of each part, computed by hand, for both softmaxes; logs."""

import pytest
import torch
from fairseq.logging import metrics
from torch import nn

from tests.reference.adaptive_softmax import log_probability
from tests.tiny import ADAPTIVE, VOCABULARY, segment_loss, tiny_model, tokens

PAD, GAMMA, SPAN, RAMP = 1, 0.01, 16, 4
SPAN_VALUES = [[0.1, 0.5], [0.0, 0.25], [1.0, 0.9]]


class Mask(nn.Module):
    """A dropout with a fixed mask."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def model_with_spans(**options):
    model = tiny_model(attention_span=SPAN, adaptive_span=True, span_ramp=RAMP, **options).double()
    for span, values in zip(model.learned_spans(), SPAN_VALUES, strict=True):
        span.value.data = torch.tensor(values, dtype=torch.float64)
    return model


def batch():
    """Return three streams of 9 tokens: all scored, with unscored context, and ending early."""
    source = tokens(3, 9)
    target = source.roll(-1, dims=1)
    target[1, :3] = PAD
    target[2, 1:] = PAD
    counts = [9, 6, 1]
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
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("cost", [0.0, GAMMA])
def test_loss_and_gradients_equal_those_by_hand(softmax, half, cost):
    model, sample = model_with_spans(**softmax), batch()
    mask = 2.0 * (torch.rand(3, 9, 16, generator=torch.Generator().manual_seed(1)) < 0.5).double()
    target, size = sample["target"].clone(), 16
    if half:
        target[0, :4] = PAD
        target[1, 3:6] = PAD
        size = 9
    tokens_alone = by_hand(model, target, mask)
    model.decoder.output_dropout = Mask(mask)
    # the scored tokens, times the largest span, times the mean over heads, summed over layers
    spans = size * SPAN * sum(span.value.mean() for span in model.learned_spans())
    expected = tokens_alone + cost * spans
    criterion = segment_loss(half_loss=half, span_loss=cost)
    loss, sample_size, log = criterion.train()(model, sample)
    close = {"rtol": 1e-5, "atol": 1e-5}  # scores are normalised in single precision
    torch.testing.assert_close(loss, expected, check_dtype=False, **close)
    assert (sample_size, log["ntokens"], log["nsentences"]) == (size, size, 3)
    assert log["loss"].item() == pytest.approx(tokens_alone.item(), rel=1e-6)
    assert log["span_loss"].item() == pytest.approx(cost * spans.item(), rel=1e-5)
    gradients = [
        torch.autograd.grad(each, model.parameters(), materialize_grads=True)
        for each in (loss, expected)
    ]
    torch.testing.assert_close(*gradients, **close)
    assert not any(getattr(value, "requires_grad", False) for value in log.values())
    # validation scores all tokens, without the cost of spans
    scored, sample_size, log = criterion.eval()(model, sample)
    assert (sample_size, log["ntokens"]) == (16, 16)
    assert scored.item() == segment_loss().train()(model, sample)[0].item()


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_the_cost_of_spans_counts_tokens(sentence_avg):
    model, sample = model_with_spans(), batch()
    without, size, _ = segment_loss(sentence_avg=sentence_avg)(model, sample)
    with_cost, _, _ = segment_loss(sentence_avg=sentence_avg, span_loss=GAMMA)(model, sample)
    assert size == (3 if sentence_avg else 16)
    assert (with_cost - without).item() == pytest.approx(16 * GAMMA * SPAN * 1.375, rel=1e-4)


def test_the_adaptive_loss_has_every_symbol_of_a_cluster():
    """fairseq's loss leaves out a part of the second cluster."""
    target = torch.tensor([[2, 3, *range(4, VOCABULARY), PAD, PAD]])
    sample = {"net_input": {"src_tokens": target.roll(1, dims=1)}, "target": target, "ntokens": 18}
    model = tiny_model(**ADAPTIVE)
    loss = segment_loss()(model, sample)[0]
    with torch.no_grad():
        scores = model.eval()(**sample["net_input"])
        probs = model.get_normalized_probs(scores, log_probs=True, sample=sample)
    picked = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)[target != PAD]
    assert loss.item() == pytest.approx(-picked.sum().item())


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
