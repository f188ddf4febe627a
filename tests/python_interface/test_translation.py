"""Translations from Python, in one process."""

import numpy as np
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
    options = {"beam": 4, "max_len_b": 12, "length_penalty": 0.5}
    (found,) = model.hypotheses(["a b"], **options)
    scores = [one.score for one in found]
    assert len(found) == 4
    assert scores == sorted(scores, reverse=True)
    for one in found:
        assert one.text.split() == one.tokens
        assert one.score == pytest.approx(one.log_probs.sum() / len(one.log_probs) ** 0.5, rel=1e-5)


def test_unknown_words_are_refused_or_read_as_unk(saved, model):
    for use in (
        lambda: model.translate(["a b", "a xyz b"]),
        lambda: model.score(["a", "a xyz"], ["b", "b"]),
    ):
        with pytest.raises(ValueError, match=r"^sentence 2 has symbols .*'xyz'.*allow_unknown"):
            use()
    with pytest.raises(ValueError, match=r"^translation 1 has symbols .*'xyz'"):
        model.score("a", "xyz")
    lenient, options = load(saved / "pairs.pt", saved / "pairs", allow_unknown=True), {"beam": 2}
    assert lenient.translate("a xyz b", **options) == model.translate("a <unk> b", **options)


def test_blanks_and_nothing_are_translated_as_fairseq_does(model):
    options = {"beam": 2, "max_len_b": 6}
    assert model.translate("a \n b", **options) == model.translate("a b", **options)
    found = model.translate(["", "a b c d", " \n", "p"], **options)
    assert found[::2] == ["", ""]
    assert found[1::2] == model.translate(["a b c d", "p"], **options)
    assert model.translate("") == ""
    assert model.translate([]) == []


def test_scores_of_translations_are_those_of_the_search(model):
    found = [best for best, *_ in model.hypotheses(SENTENCES, beam=3, max_len_b=6)]
    for batch_size in (1, 3):
        scores = model.score(SENTENCES, [one.text for one in found], batch_size=batch_size)
        for score, one in zip(scores, found, strict=True):
            assert score.tokens == [*one.tokens, "</s>"]
            np.testing.assert_allclose(score.log_probs, one.log_probs, atol=1e-5)
    alone = model.score(SENTENCES[0], found[0].text)
    np.testing.assert_allclose(alone.log_probs, scores[0].log_probs, atol=1e-5)
    assert alone.unit == "perplexity"
    assert model.score("a", "").tokens == ["</s>"]
