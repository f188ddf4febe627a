"""Translations from Python, in one process."""

import math

import numpy as np
import pytest

from fairseq_plugins import load

SENTENCES = ["a b c d", "p", "h g f e d c b a", "b a"]


@pytest.fixture(scope="module")
def model(saved):
    return load(saved / "pairs.pt", saved / "pairs")


def test_translate_gives_the_same_alone_and_in_a_batch(model):
    options = {"beam": 3, "max_len_b": 6}
    together = model.translate(SENTENCES, **options)
    assert len(set(together)) > 1
    for batch_size in (1, 3):
        assert model.translate(SENTENCES, batch_size=batch_size, **options) == together
    assert [model.translate(sentence, **options) for sentence in SENTENCES] == together


def test_hypotheses_are_ranked_by_their_scores(model):
    options = {"beam": 4, "max_len_b": 12, "length_penalty": 0.5}
    (hypotheses,) = model.hypotheses(["a b"], **options)
    scores = [one.score for one in hypotheses]
    assert len(hypotheses) == 4
    assert scores == sorted(scores, reverse=True)
    for one in hypotheses:
        assert one.text.split() == one.tokens
        assert one.score == pytest.approx(one.log_probs.sum() / len(one.log_probs) ** 0.5, rel=1e-5)


def test_unknown_words_are_refused_or_read_as_unk(saved, model):
    with pytest.raises(ValueError, match=r"^sentence 2 has symbols .*'xyz'.*allow_unknown"):
        model.translate(["a b", "a xyz b"])
    with pytest.raises(ValueError, match=r"^translation 1 has symbols .*'xyz'"):
        model.score("a", "xyz")
    lenient, options = load(saved / "pairs.pt", saved / "pairs", allow_unknown=True), {"beam": 2}
    assert lenient.translate("a xyz b", **options) == model.translate("a <unk> b", **options)


def test_translate_takes_blanks_and_nothing(model):
    options = {"beam": 2, "max_len_b": 6}
    assert model.translate("a \n b", **options) == model.translate("a b", **options)
    translations = model.translate(["", "a b c d", " \n", "p"], **options)
    assert translations[::2] == ["", ""]
    assert translations[1::2] == model.translate(["a b c d", "p"], **options)
    assert model.translate("") == ""
    assert model.translate([]) == []


def test_score_gives_the_scores_of_the_search(model):
    best_ones = [best for best, *_ in model.hypotheses(SENTENCES, beam=3, max_len_b=6)]
    for batch_size in (1, 3):
        scores = model.score(SENTENCES, [one.text for one in best_ones], batch_size=batch_size)
        for score, one in zip(scores, best_ones, strict=True):
            assert score.tokens == [*one.tokens, "</s>"]
            np.testing.assert_allclose(score.log_probs, one.log_probs, atol=1e-5)
    alone = model.score(SENTENCES[0], best_ones[0].text)
    np.testing.assert_allclose(alone.log_probs, scores[0].log_probs, atol=1e-5)
    assert alone.unit == "perplexity"
    assert model.score("a", "").tokens == ["</s>"]


LONG = "a " * 1024


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("translate", {"text": [5]}, "sentence 1 is 5: .* a string"),
        ("translate", {"text": [LONG]}, "sentence 1 has 1024 units.*1023"),
        ("translate", {"text": "</s>"}, "sentence 1 has </s>.* take it out"),
        ("translate", {"text": "a", "beam": 2.5}, "beam is 2.5: .* an integer"),
        ("translate", {"text": "a", "batch_size": 0}, "batch_size is 0: .* at least 1"),
        ("translate", {"text": "a", "max_len_b": math.nan}, "max_len_b is nan: .* an integer"),
        ("translate", {"text": "a", "max_len_a": math.nan}, "max_len_a is nan"),
        ("translate", {"text": "a", "max_len_a": -1}, "max_len_a is -1"),
        ("translate", {"text": "a", "length_penalty": math.nan}, "length_penalty is nan: .* 10"),
        ("translate", {"text": "a", "length_penalty": -math.inf}, "length_penalty is -inf"),
        ("hypotheses", {"sentences": "a b"}, "sentences is 'a b'.* a list"),
        ("score", {"source": ["a"], "target": ["b", "c"]}, "source and target.* two lists"),
        ("score", {"source": ["a", "b </s>"], "target": ["a", "b"]}, "sentence 2 has </s>"),
        ("score", {"source": "a", "target": "</s>"}, "translation 1 has </s>.* take it out"),
        ("score", {"source": ["a"], "target": [LONG]}, "translation 1 has 1024 units.*1023"),
    ],
)
def test_a_translation_model_refuses_impossible_arguments(model, method, arguments, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        getattr(model, method)(**arguments)
