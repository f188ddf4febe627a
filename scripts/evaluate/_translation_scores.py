"""Score translations against one reference each: as texts, and as Moses tokens.

All scores are from 0 to 100; higher is better:
detokenized   sacreBLEU of the texts, comparable between papers; its signature lists the settings
tokenized     BLEU as in papers of 2017: of Moses tokens, without smoothing, as multi-bleu.perl
              computes it; for German with compounds split at their hyphens
exact         share of the translations with exactly the words of their reference

Punctuation is normalized before tokenization, as in `scripts.prepare translation`.
"""

import re
from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU

from scripts.prepare._symbols import moses_tokenizer

_HYPHEN_IN_WORD = re.compile(r"(\S)-(\S)")
# languages whose compounds are split at hyphens
_COMPOUNDS = ("de",)


def tokens_to_score(lines: list[str], language: str) -> list[str]:
    """Return lines as Moses tokens; German compounds are split as in get_ende_bleu.sh."""
    tokens = moses_tokenizer(language, normalize=True)(lines)
    if language not in _COMPOUNDS:
        return tokens
    return [_HYPHEN_IN_WORD.sub(r"\1 ##AT##-##AT## \2", line) for line in tokens]


def _bleu(
    translations: Sequence[str], references: Sequence[str], **options: Any
) -> dict[str, float | str]:
    metric = BLEU(**options)
    score = metric.corpus_score(translations, [references]).score
    return {"score": score, "signature": str(metric.get_signature())}


def score(translations: list[str], references: list[str], language: str) -> dict[str, Any]:
    """Return all scores of detokenized translations in a language, as in scores.json."""
    tokens, wanted = (tokens_to_score(lines, language) for lines in (translations, references))
    # force: keeps sacreBLEU from warning that the text is tokenized, which is intended
    tokenized = _bleu(tokens, wanted, tokenize="none", smooth_method="none", force=True)
    same = [a.split() == b.split() for a, b in zip(translations, references, strict=True)]
    return {
        "detokenized": _bleu(translations, references),
        "tokenized": {**tokenized, "compounds_split": language in _COMPOUNDS},
        "exact": 100 * sum(same) / len(same),
    }
