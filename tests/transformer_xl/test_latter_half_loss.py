"""The half loss counts the latter half of each segment, in training only."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss
from fairseq_plugins.transformer_xl.latter_half_loss import (
    HalfCrossEntropy,
    HalfExactAdaptiveLoss,
    latter_half,
)
from tests.tiny import ADAPTIVE, tiny_model, tiny_task, tokens

PAD = 1
KINDS = [
    (HalfCrossEntropy, CrossEntropyCriterion, {}),
    (HalfExactAdaptiveLoss, ExactAdaptiveLoss, ADAPTIVE),
]


def test_the_first_half_of_each_streams_own_tokens_goes():
    target = torch.tensor(
        [
            [5, 6, 7, 8, 9, 4],
            [5, 6, 7, 8, 9, PAD],
            [PAD, PAD, 7, 8, 9, 4],
            [5, PAD, PAD, PAD, PAD, PAD],
            [PAD, PAD, PAD, PAD, PAD, PAD],
        ]
    )
    assert latter_half(target, PAD).tolist() == [
        [PAD, PAD, PAD, 8, 9, 4],
        [PAD, PAD, 7, 8, 9, PAD],
        [PAD, PAD, PAD, PAD, 9, 4],
        [5, PAD, PAD, PAD, PAD, PAD],
        [PAD, PAD, PAD, PAD, PAD, PAD],
    ]


def batch():
    source = tokens(2, 9)
    target = source.roll(-1, dims=1)
    target[1, 6:] = PAD
    return {"net_input": {"src_tokens": source}, "target": target, "ntokens": 15}


@pytest.mark.parametrize("counted", [{}, {"stream_tokens": [9, 6]}], ids=["by it", "before"])
@pytest.mark.parametrize(("half", "full", "options"), KINDS)
def test_training_sums_the_latter_halves_and_their_gradient(half, full, options, counted):
    model, sample = tiny_model(**options).double(), {**batch(), **counted}
    by_hand = {**sample, "target": sample["target"].clone(), "ntokens": 8}
    by_hand["target"][0, :4] = PAD
    by_hand["target"][1, :3] = PAD
    results = []
    for criterion, given in ((half, sample), (full, by_hand)):
        loss, size, log = criterion(tiny_task(), sentence_avg=False).train()(model, given)
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results.append((loss, gradients))
        assert (size, log["ntokens"]) == (8, 8)
    (loss, gradients), (expected, expected_gradients) = results
    assert torch.equal(loss, expected)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert sample["ntokens"] == 15


@pytest.mark.parametrize(("half", "full", "options"), KINDS)
def test_validation_scores_every_token(half, full, options):
    model, sample = tiny_model(**options).eval(), batch()
    with torch.no_grad():
        results = [
            criterion(tiny_task(), sentence_avg=False).eval()(model, sample)
            for criterion in (half, full)
        ]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][1] == 15
