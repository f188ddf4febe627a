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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from scripts._shared.command_line import check_at_least
from scripts._shared.commands import short
from scripts.prepare._lines import add_workers_option, map_lines, progress, read_lines
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
VERSIONS = {name: version(name) for name in ("sacremoses", "subword-nmt")}


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
    add_workers_option(parser)


def check_subword_options(options: argparse.Namespace) -> None:
    """Raise ValueError when an option of add_subword_options is impossible."""
    check_at_least(1, workers=options.workers, bpe_size=options.bpe_size)
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

    With normalize punctuation is made uniform first, as Moses' normalize-punctuation does; with
    aggressive_hyphens words are split at hyphens, each of which is then the token ``@-@``.
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


@dataclass(frozen=True)
class RawText:
    """A text to tokenize.

    Args:
        lines: gives its lines, from the first one at each call.
        sizes: number of its ``lines``, and of ``empty`` ones where that matters.
        language: code of Moses' rules, checked.
        normalize, aggressive_hyphens: as moses_tokenizer has them.
    """

    lines: Callable[[], Iterable[str]]
    sizes: Mapping[str, int]
    language: str
    normalize: bool = False
    aggressive_hyphens: bool = False

    def tokenize(self, workers: int, target: Path) -> dict[str, int]:
        """Write the Moses tokens of each line as a line of a new file; raises as map_lines."""
        make = partial(moses_tokenizer, self.language, self.normalize, self.aggressive_hyphens)
        name = f"tokenize {target.stem}"
        return map_lines(self.lines(), self.sizes, target, make, workers, name)


def count_words(sources: Iterable[Path]) -> Counter:
    """Number of times that each word is in the texts together; raises as read_lines.

    In this process: to hand the lines to others takes longer than to count their words.
    """
    lines = (line for source in sources for line in read_lines(source))
    counts: Counter = Counter()
    for line in progress(lines, desc="count words", unit=" lines"):
        counts.update(line.split())
    return counts


def learn(sources: Sequence[Path], size: int, codes: Path) -> int:
    """Learn codes from texts of words jointly, write a new file of them and return how many.

    They are fewer than asked for where no further pair is in the texts twice. Raises ValueError
    when there is none.
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
    tool: str,
    codes: Path,
    source: Path,
    expected: Mapping[str, int],
    workers: int,
    target: Path,
) -> dict[str, int]:
    """Write the units of each line of words as a line; sizes are as map_lines has them.

    Raises ValueError when the codes or a word cannot be used, or as map_lines.
    """
    make = partial(fastbpe_units if tool == FASTBPE else subword_nmt_units, read_codes(codes))
    return map_lines(_words(source), expected, target, make, workers, f"units {target.stem}")


def make_units(
    steps: Steps,
    texts: Mapping[str, RawText],
    training: Sequence[str],
    sources: Sequence[str],
    recorded: Mapping[str, Any],
    options: argparse.Namespace,
) -> tuple[int, dict[str, dict], dict[str, dict]]:
    """Do the steps tokens/NAME for each text, bpe/codes for those that train, then bpe/NAME.

    ``sources`` are the steps that the texts come from, ``recorded`` the options that change their
    tokens. Returns the number of merges, and the sizes of each text as tokens and as units. Raises
    ValueError when a text cannot be used.
    """
    output, tool, workers = steps.output, options.bpe_tool, options.workers
    tokens, units = {}, {}
    for name, text in texts.items():
        work = partial(text.tokenize, workers)
        tokens[name] = steps.run(f"tokens/{name}", recorded, sources, work)
    learned = [f"tokens/{name}" for name in training]
    work = partial(learn, [output / name for name in learned], options.bpe_size)
    merges = steps.run("bpe/codes", {"bpe-size": options.bpe_size}, learned, work)
    if merges < options.bpe_size:
        print(f"bpe/codes: {merges:,} of {options.bpe_size:,}: no other pair is there twice")
    codes = output / "bpe" / "codes"
    for name, text in texts.items():
        work = partial(apply, tool, codes, output / "tokens" / name, text.sizes, workers)
        read = ["bpe/codes", f"tokens/{name}"]
        units[name] = steps.run(f"bpe/{name}", {"bpe-tool": tool}, read, work)
    return merges, tokens, units
