"""Checks of the targets' probabilities, and the tally of an evaluation."""

import pytest

from tests import tiny


def test_a_probability_that_is_not_finite_is_an_error():
    model = tiny.tiny_model()
    stream = tiny.tokens(1, 4)
    scores = model(stream)[0].detach()
    scores[0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="log-probability of a token is not finite"):
        model.get_normalized_probs((scores, None), log_probs=True, sample={"target": stream})
