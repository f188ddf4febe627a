"""Translations from Python, in one process."""

import re

import pytest

from fairseq_plugins import load

SENTENCES = ["a b c d", "p", "h g f e d c b a", "b a"]


@pytest.fixture(scope="module")
def model(saved):
    return load(saved / "pairs.pt", saved / "pairs")


def test_a_sentence_is_translated_alike_alone_and_among_others(model):
    options = {"beam": 3, "max_len_b": 6}
    found = model.translate(SENTENCES, **options)
    assert len(set(found)) > 1
    for batch_size in (1, 3):
        assert model.translate(SENTENCES, batch_size=batch_size, **options) == found
    assert [model.translate(sentence, **options) for sentence in SENTENCES] == found


def test_hypotheses_are_ranked(model):
    (found,) = model.hypotheses(["a b"], beam=4, max_len_b=6, length_penalty=0.5)
    scores = [one.score for one in found]
    assert len(found) == 4
    assert scores == sorted(scores, reverse=True)
    for one in found:
        assert one.text.split() == one.tokens
        assert one.score == pytest.approx(one.log_probs.sum() / len(one.log_probs) ** 0.5, rel=1e-5)


def test_unknown_words_and_blanks_are_translated_as_fairseq_does(model):
    options = {"beam": 2, "max_len_b": 6}
    assert model.translate("a xyz\n b", **options) == model.translate("a <unk> b", **options)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (["a", " "], {}, "sentence 2 is empty: give one with at least one symbol"),
        ([5], {}, "sentence 1 is 5: it must be a string"),
        (["a " * 1024], {}, "sentence 1 has 1024 units, and the model positions for 1023: cut it"),
        (["a"], {"beam": 0}, "beam is 0: it must be at least 1"),
        (["a"], {"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        (["a"], {"max_len_b": 0}, "max_len_b is 0: it must be at least 1"),
    ],
)
def test_what_cannot_be_translated_is_refused(model, given, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        model.translate(given, **options)


def test_hypotheses_are_of_a_list(model):
    with pytest.raises(ValueError, match=r"^sentences is 'a b': give a list of them"):
        model.hypotheses("a b")


def test_it_scores_and_continues_nothing(model):
    message = "a translation model, which translates .* has no .score: there are .translate$"
    with pytest.raises(AttributeError, match=message):
        model.score("a")
