"""Scores are what their definitions say."""

import re

import pytest
from sacrebleu.metrics import BLEU

from scripts.evaluate import _translation_scores as translation_scores


def test_gleu_is_the_lesser_of_precision_and_recall():
    # of 10 sequences of 1 to 4 tokens the other has 6: a, b, c, a b, b c, a b c
    assert translation_scores.gleu(["a b c d"], ["a b c"]) == pytest.approx(60)
    assert translation_scores.gleu(["a b c"], ["a b c d"]) == pytest.approx(60)
    # a token counts as often as the reference has it
    assert translation_scores.gleu(["a a"], ["a b"]) == pytest.approx(100 / 3)
    # added up before the division
    both = translation_scores.gleu(["a b c d", "x"], ["a b c", "y"])
    assert both == pytest.approx(100 * 6 / 11)
    assert translation_scores.gleu(["a b c d e", ""], ["a b c d e", ""]) == 100
    assert translation_scores.gleu([""], ["a"]) == translation_scores.gleu([""], [""]) == 0


def test_scores_of_what_is_right_and_of_nothing():
    lines = ["Der Hund, der 3 Eis-Becher frisst,  ist groß.", "„Ja“, sagte sie - leise."]
    # exact matches disregard blanks alone, and tokens also which quotation marks there are
    for translations, detokenized, tokenized, exact in (
        ([" ".join(line.split()) for line in lines], 100, 100, 100),
        ([lines[0], lines[1].replace("„Ja“", '"Ja"')], None, 100, 50),
        (["", ""], 0, 0, 0),
    ):
        found = translation_scores.score(translations, lines, "de", True)
        assert detokenized is None or found["detokenized"]["score"] == pytest.approx(detokenized)
        assert found["tokenized"]["score"] == pytest.approx(tokenized)
        assert (found["gleu"], found["exact"]) == (tokenized, exact)


def test_bleu_is_that_of_sacrebleu_and_of_moses_tokens():
    translations = ["Die Welt-Karte des Hauses ist alt.", "Er geht nicht mit dem Hund dort hin."]
    references = ["Die Welt-Karte eines Hauses ist alt.", "Er geht nicht mit dem Hund dahin."]
    found = translation_scores.score(translations, references, "de", True)
    assert found["detokenized"]["score"] == BLEU().corpus_score(translations, [references]).score
    assert re.search(r"tok:13a\|smooth:exp\|version:", found["detokenized"]["signature"])
    tokens = [
        "Die Welt ##AT##-##AT## Karte {} Hauses ist alt .".format,
        "Er geht nicht mit dem Hund {} .".format,
    ]
    assert re.search(r"tok:none\|smooth:none", found["tokenized"]["signature"])
    # as multi-bleu.perl computes it
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    split = [tokens[0]("des"), tokens[1]("dort hin")], [tokens[0]("eines"), tokens[1]("dahin")]
    whole = ([line.replace(" ##AT##-##AT## ", "-") for line in side] for side in split)
    for compounds, (found_tokens, wanted) in ((True, split), (False, whole)):
        found = translation_scores.score(translations, references, "de", compounds)
        score = metric.corpus_score(found_tokens, [wanted]).score
        assert found["tokenized"]["score"] == pytest.approx(score)
        assert found["tokenized"]["compounds_split"] is compounds


def test_compounds_are_split_as_perl_does_it():
    split = translation_scores.split_compounds
    assert split("a-b") == "a ##AT##-##AT## b"
    # the second - has no character left before it
    assert split("a-b-c") == "a ##AT##-##AT## b-c"
    assert split("aa-bb-cc") == "aa ##AT##-##AT## bb ##AT##-##AT## cc"
    assert split("a - b -c d-") == "a - b -c d-"


def test_scores_of_parts_are_refused():
    for measure in (translation_scores.gleu, translation_scores.exact_matches):
        with pytest.raises(ValueError, match="is longer than"):
            measure(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="there is no translation to score"):
        translation_scores.exact_matches([], [])
