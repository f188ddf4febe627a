"""Scores of translations against one reference each: of texts, and of their Moses tokens.

Each from 0 to 100, more are better:
detokenized   sacreBLEU of the texts, to compare between papers; its signature says how
tokenized     BLEU as papers of 2017 give it: of Moses tokens, without smoothing, as multi-bleu.perl
              computes it; for German with compounds split at their hyphens
gleu          GLEU (Wu et al. 2016, arXiv:1609.08144, section 5.2) of the same tokens
exact         share of the translations that have the words of their reference and no others

Before both texts become tokens, punctuation is made uniform, as scripts.prepare.translation does.
"""

import re
from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU
from sacrebleu.metrics.helpers import extract_all_word_ngrams

from scripts.prepare._subwords import moses_tokenizer

# Longest sequence of tokens that counts.
ORDER = 4
_HYPHEN_IN_WORD = re.compile(r"(\S)-(\S)")


def split_compounds(tokens: str) -> str:
    """Line of tokens with words split at hyphens, as tensor2tensor's get_ende_bleu.sh does it."""
    return _HYPHEN_IN_WORD.sub(r"\1 ##AT##-##AT## \2", tokens)


def tokens_to_score(lines: list[str], language: str, compounds: bool) -> list[str]:
    """Lines of Moses tokens of a text, with compounds split on request."""
    found = moses_tokenizer(language, normalize=True)(lines)
    return [split_compounds(line) for line in found] if compounds else found


def gleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """GLEU of lines of tokens, from 0 to 100.

    Of a sentence it is the lesser of precision and recall over all sequences of 1 to 4 tokens; of
    more, like nltk's corpus_gleu, matches and the denominators of that lesser are added up first.

    Raises ValueError when there is another number of translations than of references.
    """
    matches = sequences = 0
    for translation, reference in zip(translations, references, strict=True):
        (found, _), (wanted, _) = (
            extract_all_word_ngrams(line, 1, ORDER) for line in (translation, reference)
        )
        matches += (found & wanted).total()
        sequences += max(found.total(), wanted.total())
    return 100 * matches / sequences if sequences else 0.0


def exact_matches(translations: Sequence[str], references: Sequence[str]) -> float:
    """Percentage of the translations that are their reference but for blanks.

    Raises ValueError when there is another number of translations than of references, or none.
    """
    pairs = list(zip(translations, references, strict=True))
    if not pairs:
        raise ValueError("there is no translation to score: give a text with sentences")
    return 100 * sum(one.split() == other.split() for one, other in pairs) / len(pairs)


def _bleu(
    translations: Sequence[str], references: Sequence[str], **options: Any
) -> dict[str, float | str]:
    metric = BLEU(**options)
    score = metric.corpus_score(translations, [references]).score
    return {"score": score, "signature": str(metric.get_signature())}


def score(
    translations: list[str], references: list[str], language: str, compounds: bool
) -> dict[str, Any]:
    """All scores of detokenized translations in a language, as scores.json has them.

    Raises ValueError when there is another number of translations than of references, or none.
    """
    exact = exact_matches(translations, references)
    found, wanted = (
        tokens_to_score(lines, language, compounds) for lines in (translations, references)
    )
    # without force sacreBLEU warns of tokens, which are meant here
    tokenized = _bleu(found, wanted, tokenize="none", smooth_method="none", force=True)
    return {
        "detokenized": _bleu(translations, references),
        "tokenized": {**tokenized, "compounds_split": compounds},
        "gleu": gleu(found, wanted),
        "exact": exact,
    }
