"""Sentences of the test sets that the WMT workshops publish as SGM files.

The text is taken as it stands between the tags, with runs of blanks as one space, as sacreBLEU
does for its own references: nothing like ``&amp;`` is decoded, so that scores compare.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.prepare._lines import decode_lines

DOCUMENT_OR_SENTENCE = re.compile(r"<doc\b([^>]*)>|<seg\b([^>]*)>(.*?)</seg>", re.I | re.S)
SENTENCE_BEGINS = re.compile(r"<seg\b", re.I)
DOCUMENT_NAME = re.compile(r'\bdocid="([^"]*)"', re.I)
SENTENCE_NAME = re.compile(r'\bid="([^"]*)"', re.I)


@dataclass(frozen=True)
class Sentence:
    """A sentence, and what tells which one it is: the names of its document and of itself."""

    document: str
    name: str
    text: str


def _name(pattern: re.Pattern, attributes: str) -> str:
    found = pattern.search(attributes)
    return found.group(1) if found else ""


def read_sgm(lines: Iterable[bytes], label: str) -> list[Sentence]:
    """Sentences of an SGM file; label says in messages what it is.

    Raises ValueError when it is not UTF-8, has no sentence or one that does not end.
    """
    content = "\n".join(decode_lines(lines, label))
    sentences = []
    document = ""
    for found in DOCUMENT_OR_SENTENCE.finditer(content):
        if found[1] is not None:
            document = _name(DOCUMENT_NAME, found[1])
        else:
            name = _name(SENTENCE_NAME, found[2])
            sentences.append(Sentence(document, name, " ".join(found[3].split())))
    begun = len(SENTENCE_BEGINS.findall(content))
    if not sentences or begun != len(sentences):
        raise ValueError(
            f"{label} has {len(sentences):,} whole sentences <seg ...>...</seg> of {begun:,}: "
            "it is truncated, damaged or no SGM file of WMT, get it anew"
        )
    return sentences


def check_same_sentences(source: list[Sentence], target: list[Sentence], label: str) -> None:
    """Check that two SGM files have the same sentences in the same order.

    Raises ValueError when they have not.
    """
    pairs = zip(source, target, strict=False)
    different = (one for one, two in pairs if (one.document, one.name) != (two.document, two.name))
    first = next(different, None)
    if first or len(source) != len(target):
        where = f", first at document {first.document!r}, sentence {first.name!r}" if first else ""
        raise ValueError(
            f"{label}: source ({len(source):,} sentences) and reference ({len(target):,}) do not "
            f"have the same ones in the same order{where}: get the archive anew"
        )
