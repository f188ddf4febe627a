"""Generation that only its length ends, with a symbol that never occurs."""

from types import SimpleNamespace

import torch
from fairseq.search import BeamSearch, Sampling

from fairseq_plugins.segment_language_model.generation import end_by_length
from tests import tiny

END = 0
NEVER = -float("inf")


def limited(kind, **options):
    return end_by_length(SimpleNamespace(search=kind(tiny.dictionary(), **options), eos=END)).search


def log_probabilities(only_the_end):
    """Of one prompt with one beam, as fairseq's generator hands them to its search."""
    symbols = len(tiny.dictionary())
    lprobs = torch.randn(1, 1, symbols).log_softmax(-1)
    lprobs[..., END] = NEVER
    if only_the_end:
        lprobs[..., END + 1 :] = -torch.inf
    return lprobs


def test_the_end_is_drawn_at_no_cost_where_nothing_else_is_left():
    for options in ({}, {"sampling_topp": 0.9}, {"sampling_topk": 3}):
        search = limited(Sampling, **options)
        so_far = torch.full((1, 1, 1), -2.5)
        scores, symbols, _ = search.step(1, log_probabilities(True), so_far)
        assert symbols.item() == END
        assert scores.item() == -2.5


def test_before_that_nothing_changes():
    torch.manual_seed(1)
    lprobs = log_probabilities(False)
    expected = BeamSearch(tiny.dictionary()).step(0, lprobs.clone(), None)
    for found, wanted in zip(limited(BeamSearch).step(0, lprobs, None), expected, strict=True):
        assert torch.equal(found, wanted)


def test_all_else_is_the_searchs_own():
    assert limited(Sampling, sampling_topk=3).sampling_topk == 3
    assert limited(BeamSearch).supports_constraints is False
