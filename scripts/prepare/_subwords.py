"""Texts to Moses tokens, and these to units of byte pair encoding, a line for a line.

Tokens are escaped as Moses does it (``&`` is ``&amp;``, ``<`` is ``&lt;``), so that none is taken
for a symbol of fairseq such as ``<unk>``; sacremoses' MosesDetokenizer undoes that. No token holds
a blank of any kind.

A word of byte pair encoding (Sennrich et al. 2016) is what blanks separate. Of its units all but
the last end with ``@@``: with ``@@ `` removed (fairseq's --remove-bpe) they are the word again.
Codes are learned with subword-nmt, since the fastBPE of PyPI only applies them; both tools make the
same units of the same codes. fastBPE is the faster: 2.9 s against 4.5 s for 3.4 million words in
two processes, 4.8 s against 5.4 s in one.
"""

import argparse
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from pathlib import Path

from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from scripts._shared.commands import short
from scripts.prepare._lines import TextSizes, check_workers, map_lines, progress, read_lines
from scripts.prepare._steps import Steps

# What is left of a line without blanks and the control characters that Moses drops.
VISIBLE = re.compile(r"[^\s\0-\x1f]")
FASTBPE = "fastbpe"
SUBWORD_NMT = "subword-nmt"
TOOLS = (FASTBPE, SUBWORD_NMT)
JOINER = "@@"
VERSION = "#version: 0.2"
# Words that subword-nmt remembers at most; a large text would fill the memory with rare ones.
REMEMBERED = 2**20
MOST_WORKERS = 16


def add_subword_options(parser: argparse.ArgumentParser, size: int) -> None:
    """Add the options of byte pair encoding, with the default number of merges, and --workers."""
    add = parser.add_argument
    add("--bpe-size", type=int, default=size, metavar="N", help="merges (default: %(default)s)")
    add(
        "--bpe-tool",
        default=FASTBPE,
        metavar="|".join(TOOLS),
        help="what applies the codes, to the same effect (default: %(default)s)",
    )
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    add(
        "--workers", type=int, default=workers, metavar="N", help="processes (default: %(default)s)"
    )


def check_subword_options(options: argparse.Namespace) -> None:
    """Raise ValueError when an option of add_subword_options is impossible."""
    check_workers(options.workers)
    if options.bpe_size < 1:
        raise ValueError(f"--bpe-size {options.bpe_size} is no number of merges: give 1 or more")
    if options.bpe_tool not in TOOLS:
        raise ValueError(f"--bpe-tool {options.bpe_tool} is unknown: give {' or '.join(TOOLS)}")
    if options.bpe_tool == FASTBPE:
        try:
            import fastBPE  # noqa: F401 (only whether it is there)
        except ImportError as error:
            raise ValueError(
                f"--bpe-tool {FASTBPE}: fastBPE is not installed ({error}): install it, or give "
                f"--bpe-tool {SUBWORD_NMT}, which makes the same units"
            ) from error


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
        target: a new file.
        language: code of Moses' rules, checked.
        workers: number of processes.
        normalize: make punctuation uniform first.
        aggressive_hyphens: split words at hyphens.

    Raises ValueError when another number of lines was written.
    """
    make = partial(moses_tokenizer, language, normalize, aggressive_hyphens)
    return map_lines(lines, expected, target, make, workers, f"tokenize {target.stem}")


def count_words(sources: Iterable[Path]) -> Counter:
    """Number of times that each word is in the texts together; raises as read_lines.

    In this process: to hand the lines to others takes longer than to count their words.
    """
    lines = (line for source in sources for line in read_lines(source))
    counts: Counter = Counter()
    for line in progress(lines, desc="count words", unit=" lines"):
        counts.update(line.split())
    return counts


def learn(sources: Sequence[Path], codes: Path, size: int) -> int:
    """Learn codes from texts jointly, write them in subword-nmt's format, return how many.

    They are fewer than asked for where no further pair is in the texts twice.

    Args:
        sources: texts of words.
        codes: a new file.
        size: number of merges.

    Raises ValueError when there is nothing to learn.
    """
    counts = count_words(sources)
    learned = io.StringIO()
    # subword-nmt fails where there is no pair at all.
    if any(len(word) > 1 for word in counts):
        # It draws its progress bar in a log, too.
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            words = (f"{word} {count}" for word, count in counts.items())
            learn_bpe(words, learned, size, is_dict=True)
    found = max(0, learned.getvalue().count("\n") - 1)
    if not found:
        raise ValueError(
            f"{', '.join(map(short, sources))}: no two characters follow each other twice within "
            "words, so there are no codes to learn: give more text"
        )
    codes.write_text(learned.getvalue(), encoding="utf-8", newline="\n")
    return found


def learn_codes(steps: Steps, sources: list[str], size: int) -> int:
    """Do the step bpe/codes from the texts of other steps and return the number of merges."""

    def work(target: Path) -> int:
        return learn([steps.output / name for name in sources], target, size)

    merges = steps.run("bpe/codes", {"bpe-size": size}, sources, work)
    if merges < size:
        print(f"bpe/codes: {merges:,} of {size:,}: no other pair is there twice")
    return merges


def read_codes(path: Path) -> list[str]:
    """Pairs of units of a file of codes, the two of each with a space between, in their order.

    Raises ValueError when it is no such file.
    """
    first, *pairs = list(read_lines(path)) or [""]
    wrong = [pair for pair in pairs if len(pair.split(" ")) != 2]
    if first != VERSION or not pairs or wrong:
        raise ValueError(
            f"{short(path)} is no file of codes: give one that begins with {VERSION!r} and has a "
            "pair of units on each further line, as subword-nmt writes it"
        )
    return pairs


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what C++ code writes to the standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def fastbpe_units(pairs: list[str]) -> Callable[[list[str]], list[str]]:
    """Function from lines of words to lines of their units, made with fastBPE."""
    from fastBPE import fastBPE

    with tempfile.TemporaryDirectory() as folder, _silent():
        codes = Path(folder, "codes")
        # Its format has the count of each pair, which it does not use to apply it.
        codes.write_text("".join(f"{pair} 0\n" for pair in pairs), encoding="utf-8", newline="\n")
        # It tells of every file of codes that it reads.
        return fastBPE(str(codes)).apply


def subword_nmt_units(pairs: list[str]) -> Callable[[list[str]], list[str]]:
    """Function from lines of words to lines of their units, made with subword-nmt."""
    encoder = BPE(io.StringIO("\n".join([VERSION, *pairs, ""])))

    def apply_lines(lines: list[str]) -> list[str]:
        if len(encoder.cache) > REMEMBERED:
            encoder.cache.clear()
        return [encoder.process_line(line) for line in lines]

    return apply_lines


def _words(path: Path) -> Iterator[str]:
    """Lines of a text with one space between two words.

    Raises ValueError when the units of a word would not show where it ends.
    """
    for number, line in enumerate(read_lines(path), 1):
        words = " ".join(line.split())
        if f"{JOINER} " in f"{words} ":
            raise ValueError(
                f"{short(path)}, line {number}: a word ends with {JOINER}, which marks a unit "
                "within a word: tokenize the text first, or change the word"
            )
        if "\0" in words:
            raise ValueError(
                f"{short(path)}, line {number}: a word has a zero byte, where fastBPE would end "
                "the line: tokenize the text first, or remove it"
            )
        yield words


def apply(
    tool: str, codes: Path, source: Path, expected: int, target: Path, workers: int
) -> TextSizes:
    """Write the units of each line of words as a line and return the sizes of that text.

    Args:
        tool: one of TOOLS.
        codes: file that learn wrote.
        source: text of words.
        expected: number of its lines.
        target: a new file.
        workers: number of processes.

    Raises ValueError when the codes or a word cannot be used, or another number of lines was
    written.
    """
    make = partial(fastbpe_units if tool == FASTBPE else subword_nmt_units, read_codes(codes))
    return map_lines(_words(source), expected, target, make, workers, f"units {target.stem}")
