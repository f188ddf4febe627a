"""Evaluation and generation: softmax temperature, non-finite probabilities, ends by length."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.search import BeamSearch, Sampling
from torch.testing import assert_close

from fairseq_plugins.segment_language_model.evaluation import evaluate_probs
from fairseq_plugins.segment_language_model.generation import end_by_length
from tests import tiny

END = 0


def search_that_ends_by_length(kind, **options):
    return end_by_length(SimpleNamespace(search=kind(tiny.dictionary(), **options), eos=END)).search


def log_probabilities(only_the_end):
    """Return log-probabilities of one prompt and beam, as fairseq's search gets them."""
    symbols = len(tiny.dictionary())
    lprobs = torch.randn(1, 1, symbols).log_softmax(-1)
    lprobs[..., END] = -torch.inf
    if only_the_end:
        lprobs[..., END + 1 :] = -torch.inf
    return lprobs


@pytest.mark.parametrize("options", [{}, {"sampling_topp": 0.9}, {"sampling_topk": 3}])
def test_the_end_is_drawn_at_no_cost_where_nothing_else_is_left(options):
    search = search_that_ends_by_length(Sampling, **options)
    scores, symbols, _ = search.step(1, log_probabilities(True), torch.full((1, 1, 1), -2.5))
    assert (symbols.item(), scores.item()) == (END, -2.5)
    # all other attributes are those of the search itself
    assert search.sampling_topk == options.get("sampling_topk", -1)


def test_before_that_nothing_changes():
    lprobs = log_probabilities(False)
    expected = BeamSearch(tiny.dictionary()).step(0, lprobs.clone(), None)
    found = search_that_ends_by_length(BeamSearch).step(0, lprobs, None)
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.08])
@pytest.mark.parametrize("log_probs", [True, False])
def test_probabilities_are_those_of_divided_scores(temperature, log_probs):
    scores = 3 * torch.randn(2, 4, 7, dtype=torch.float64)
    probs = scores.log_softmax(-1) if log_probs else scores.softmax(-1)
    powers = scores.exp() ** (1 / temperature)
    expected = powers / powers.sum(-1, keepdim=True)
    tempered = evaluate_probs(probs, log_probs, None, temperature, tiny.dictionary())
    assert_close(tempered.exp() if log_probs else tempered, expected)


@pytest.mark.parametrize("options", [{}, tiny.ADAPTIVE], ids=["", "adaptive"])
def test_targets_get_the_tempered_probabilities_of_the_whole_vocabulary(options):
    model, stream = tiny.tiny_transformer_xl(**options).eval(), tiny.tokens(2, 6)
    output = model(stream)
    expected = (model.get_normalized_probs(output, log_probs=True) / 1.3).log_softmax(-1)
    model.softmax_temperature = 1.3
    found = model.get_normalized_probs(output, log_probs=True, sample={"target": stream})
    assert_close(*(probs.gather(-1, stream.unsqueeze(-1)) for probs in (found, expected)))


def test_a_probability_that_is_not_finite_is_an_error():
    model = tiny.tiny_model()
    stream = tiny.tokens(1, 4)
    scores = model(stream)[0].detach()
    scores[0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="log-probability of a token is not finite"):
        model.get_normalized_probs((scores, None), log_probs=True, sample={"target": stream})
