"""Checks of the targets' probabilities, and the tally of an evaluation."""

import pytest
import torch

from fairseq_plugins.segment_language_model.evaluation import IMPOSSIBLE_BIAS
from tests import tiny


# fairseq asks a single model for log-probabilities, the models of an ensemble for probabilities
@pytest.mark.parametrize("log_probs", [True, False])
def test_an_impossible_target_or_a_probability_that_is_not_finite_is_an_error(log_probs):
    model, sample = tiny.tiny_model(), {"target": torch.full((1, 4), 7)}
    scores = model(tiny.tokens(1, 4))[0].detach()
    scores[..., 7] = IMPOSSIBLE_BIAS
    with pytest.raises(ValueError, match="the text has d, which the model was converted without"):
        model.get_normalized_probs((scores, None), log_probs, sample)
    scores[0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="log-probability of a token is not finite"):
        model.get_normalized_probs((scores, None), log_probs, sample)
