"""The softmax temperature of evaluation: scores divided by it, probabilities that sum to 1."""

import pytest
import torch
from torch.testing import assert_close

from fairseq_plugins.segment_language_model.evaluation import evaluate_probs
from tests.tiny import dictionary


@pytest.mark.parametrize("temperature", [0.7, 1.08])
@pytest.mark.parametrize("log_probs", [True, False])
def test_probabilities_are_those_of_divided_scores(temperature, log_probs):
    scores = 3 * torch.randn(2, 4, 7, dtype=torch.float64)
    probs = scores.log_softmax(-1) if log_probs else scores.softmax(-1)
    powers = scores.exp() ** (1 / temperature)
    expected = powers / powers.sum(-1, keepdim=True)
    tempered = evaluate_probs(probs, log_probs, None, temperature, dictionary())
    assert_close(tempered.exp() if log_probs else tempered, expected)
