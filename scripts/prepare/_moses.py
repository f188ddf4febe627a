"""Moses tokens of a text, a line for a line, in several processes.

Tokens are escaped as Moses does it (``&`` is ``&amp;``, ``<`` is ``&lt;``), so that none is taken
for a symbol of fairseq such as ``<unk>``; sacremoses' MosesDetokenizer undoes that. No token holds
a blank of any kind.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

from scripts.prepare._lines import TextSizes, map_lines

# What is left of a line without blanks and the control characters that Moses drops.
VISIBLE = re.compile(r"[^\s\0-\x1f]")


def check_language(language: str, option: str = "language") -> None:
    """Check the language that an option gives by its code, such as en.

    Raises ValueError when Moses has no rules for it: sacremoses would take those for English.
    """
    known = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in known:
        raise ValueError(
            f"--{option} {language} is none that sacremoses has rules for: give one of "
            f"{', '.join(known)}"
        )


def moses_tokenizer(
    language: str, normalize: bool = False, aggressive_hyphens: bool = False
) -> Callable[[list[str]], list[str]]:
    """Function from lines to lines of Moses tokens with one space between two.

    Args:
        language: code of Moses' rules.
        normalize: make punctuation uniform first, as Moses' normalize-punctuation does.
        aggressive_hyphens: split words at hyphens, each of which is then the token ``@-@``.
    """
    tokenizer = MosesTokenizer(lang=language)
    normalizer = MosesPunctNormalizer(lang=language) if normalize else None

    def tokenize_lines(lines: list[str]) -> list[str]:
        if normalizer:
            lines = [normalizer.normalize(line) for line in lines]
        return [
            tokenizer.tokenize(
                line, aggressive_dash_splits=aggressive_hyphens, return_str=True, escape=True
            )
            for line in lines
        ]

    return tokenize_lines


def tokenize(
    lines: Iterable[str],
    expected: int,
    target: Path,
    language: str,
    workers: int,
    normalize: bool = False,
    aggressive_hyphens: bool = False,
) -> TextSizes:
    """Write the Moses tokens of each line as a line and return the sizes of that text.

    Args:
        lines: the text, such as read_lines of a file.
        expected: how many lines there are.
        target: a new file; of a failure nothing is left there.
        language: code of Moses' rules.
        workers: number of processes.
        normalize: make punctuation uniform first.
        aggressive_hyphens: split words at hyphens.

    Raises ValueError when there is no such language or another number of lines was written.
    """
    check_language(language)
    make = partial(moses_tokenizer, language, normalize, aggressive_hyphens)
    return map_lines(lines, expected, target, make, workers, f"tokenize {target.stem}")
