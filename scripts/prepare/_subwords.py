"""Split texts into words, by Moses or at whitespace, and words into units of byte pair encoding.

Moses tokens are escaped (``&`` is ``&amp;``, ``<`` is ``&lt;``), so that fairseq takes no token for
a special symbol; sacremoses' MosesDetokenizer undoes that.

All units of a word but the last end with ``@@`` (Sennrich et al. 2016); removing ``@@ `` (fairseq's
--remove-bpe) restores the words.
"""

import argparse
import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile

from fairseq_plugins.python_interface.lines import Moses
from scripts._shared.commands import short
from scripts.prepare._lines import (
    SPECIAL,
    LineMapper,
    add_workers_option,
    progress,
    read_lines,
    write_lines,
)

VERSION = "#version: 0.2"
# Most words whose units are remembered; a large text would fill the memory with rare words.
REMEMBERED = 2**20


def add_subword_options(parser: argparse.ArgumentParser) -> None:
    """Add --bpe-size, the number of merges, and --workers."""
    text = "merges of byte pair encoding (default: %(default)s)"
    parser.add_argument("--bpe-size", type=int, default=32_000, metavar="N", help=text)
    parser.set_defaults(bpe_codes=None)
    add_workers_option(parser)


def check_language(language: str, option: str = "language") -> None:
    """Raise ValueError for a language without Moses rules: sacremoses would use English's."""
    from sacremoses.corpus import NonbreakingPrefixes

    known = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in known:
        raise ValueError(
            f"--{option} is {language}, for which sacremoses has no rules: give one of "
            f"{', '.join(known)}"
        )


def moses_tokenizer(
    language: str, normalize: bool = False, aggressive_hyphens: bool = False
) -> LineMapper:
    """Return a function from lines to lines of Moses tokens, separated by single spaces.

    With normalize, it makes punctuation uniform first, as Moses' normalize-punctuation does; with
    aggressive_hyphens, it splits words at hyphens, which become the token ``@-@``.
    """
    encode = Moses(language, normalize, aggressive_hyphens).encode
    return lambda lines: [encode(line) for line in lines]


def check_words(words: str, location: str, subwords: bool = False) -> None:
    """Refuse words, separated by single spaces, one of which is a special symbol of fairseq.

    With subwords, none may contain one, which could become a unit. Errors name the location.
    """
    special = [symbol for symbol in SPECIAL if symbol in words.split(" ")]
    if subwords:
        special = [symbol for symbol in (*SPECIAL, "<unk>") if symbol in words]
    if special:
        raise ValueError(
            f"{location}: {special[0]} is a special symbol of fairseq, which would not be read as "
            f"text: write it in another way, such as [{special[0].strip('<>')}], or give --moses "
            "LANGUAGE, which escapes it"
        )


def learn(sources: Sequence[Path], size: int, codes: Path) -> None:
    """Learn BPE codes from several tokenized texts jointly and write them to a new file.

    There are fewer than ``size`` if no further pair occurs twice.
    """
    from subword_nmt.learn_bpe import learn_bpe

    lines = chain.from_iterable(map(read_lines, sources))
    learned = io.StringIO()
    # learn_bpe prints a progress bar even to a log, and raises ValueError if there are no pairs
    with (
        nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()),
        suppress(ValueError),
    ):
        learn_bpe(progress(lines, desc="count words", unit=" lines"), learned, size)
    if learned.getvalue().count("\n") < 2:
        raise ValueError(
            f"{', '.join(map(short, sources))}: no pair of characters occurs twice within "
            "words, so there are no codes to learn: give more text"
        )
    codes.write_text(learned.getvalue(), encoding="utf-8", newline="\n")


def check_codes(path: Path) -> int:
    """Return the number of merges in a file of BPE codes; raise ValueError for any other file."""
    first, *pairs = list(read_lines(path)) or [""]
    wrong = [pair for pair in pairs if len(pair.split(" ")) != 2]
    if first != VERSION or not pairs or wrong:
        raise ValueError(
            f"{short(path)} is not a file of codes: give one that begins with {VERSION!r} and has "
            "a pair of units on each further line, as subword-nmt writes it"
        )
    return len(pairs)


def word_encoder(codes: Path) -> Callable[[list[str]], list[str]]:
    """Return a function from words to their units: of fastBPE if it is installed, or subword-nmt.

    Both give the same units. Without fastBPE, rare words of a large text take hours.
    """
    with suppress(ImportError):
        from fastBPE import fastBPE

        # fastBPE reads a count after each pair, and no first line
        with NamedTemporaryFile("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{pair} 0\n" for pair in list(read_lines(codes))[1:])
            file.flush()
            return fastBPE(file.name, "").apply
    from subword_nmt.apply_bpe import BPE

    with codes.open(encoding="utf-8-sig") as file:
        encoder = BPE(file)

    def encode(words: list[str]) -> list[str]:
        encoder.cache.clear()  # apply_lines remembers words
        return [encoder.process_line(word) for word in words]

    return encode


def subword_units(codes: Path) -> LineMapper:
    """Return a function from lines of words, with single spaces, to lines of their units."""
    encode = word_encoder(codes)
    units = {"": ""}

    def apply_lines(lines: list[str]) -> list[str]:
        if len(units) > REMEMBERED:
            units.clear()
            units[""] = ""
        new = list({word for line in lines for word in line.split(" ")}.difference(units))
        units.update(zip(new, encode(new), strict=True))
        return [" ".join([units[word] for word in line.split(" ")]) for line in lines]

    return apply_lines


def _refuse_joiners(path: Path) -> Iterator[str]:
    """Yield the lines of a tokenized text; raise ValueError for a word that ends with @@."""
    for number, line in enumerate(read_lines(path), 1):
        if "@@ " in f"{line} ":
            raise ValueError(
                f"{path.name}, line {number}: a word ends with @@, which marks a unit within a "
                "word: change the word"
            )
        yield line


def make_units(
    tokens: Path,
    names: Sequence[str],
    training: Sequence[str],
    options: argparse.Namespace,
    target: Path,
) -> int:
    """Learn codes from the training texts, unless --bpe-codes is given; write all texts as units.

    ``names`` are the texts' file names in both folders. Returns the number of merges.
    """
    codes = target / "codes"
    if options.bpe_codes:
        shutil.copyfile(options.bpe_codes, codes)
    else:
        learn([tokens / name for name in training], options.bpe_size, codes)
    for name in names:
        lines = _refuse_joiners(tokens / name)
        write_lines(lines, target / name, options.workers, subword_units, codes)
    return check_codes(codes)
