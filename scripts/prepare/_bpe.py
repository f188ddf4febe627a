"""Byte pair encoding (Sennrich et al. 2016): codes learned from texts, applied to a text.

A word is what blanks separate. Of its units all but the last end with ``@@``: with ``@@ `` removed
(fairseq's --remove-bpe) they are the word again. Codes are learned with subword-nmt, since the
fastBPE of PyPI only applies them; both tools make the same units of the same codes. fastBPE is
the faster: 2.9 s against 4.5 s for 3.4 million words in two processes, 4.8 s against 5.4 s in one.
"""

import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from pathlib import Path

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from tqdm import tqdm

from scripts._shared.commands import short
from scripts.prepare._lines import TextSizes, map_lines, read_lines

FASTBPE = "fastbpe"
SUBWORD_NMT = "subword-nmt"
TOOLS = (FASTBPE, SUBWORD_NMT)
JOINER = "@@"
VERSION = "#version: 0.2"
# Words that subword-nmt remembers at most; a large text would fill the memory with rare ones.
REMEMBERED = 2**20


def check_tool(tool: str) -> None:
    """Check a tool that applies codes.

    Raises ValueError when there is none of that name or it is not installed.
    """
    if tool not in TOOLS:
        raise ValueError(f"--bpe-tool {tool} is unknown: give {' or '.join(TOOLS)}")
    if tool == FASTBPE:
        try:
            import fastBPE  # noqa: F401 (only whether it is there)
        except ImportError as error:
            raise ValueError(
                f"--bpe-tool {tool}: fastBPE is not installed ({error}): install it, or give "
                f"--bpe-tool {SUBWORD_NMT}, which makes the same units"
            ) from error


def check_size(size: int) -> None:
    """Check a number of merges.

    Raises ValueError when it is not positive.
    """
    if size < 1:
        raise ValueError(f"--bpe-size {size} is no number of merges: give 1 or more")


def count_words(sources: Iterable[Path]) -> Counter:
    """Number of times that each word is in the texts together; raises as read_lines.

    In this process: to hand the lines to others takes longer than to count their words.
    """
    lines = (line for source in sources for line in read_lines(source))
    counts: Counter = Counter()
    for line in tqdm(lines, desc="count words", unit=" lines", unit_scale=True, disable=None):
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
    check_size(size)
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
    tool: str, codes: Path, source: Path, expected: int, target: Path, workers: int
) -> TextSizes:
    """Write the units of each line of words as a line and return the sizes of that text.

    Args:
        tool: one of TOOLS.
        codes: file that learn wrote.
        source: text of words.
        expected: number of its lines.
        target: a new file; of a failure nothing is left there.
        workers: number of processes.

    Raises ValueError when the codes or a word cannot be used, the tool is not installed, or another
    number of lines was written.
    """
    check_tool(tool)
    make = partial(fastbpe_units if tool == FASTBPE else subword_nmt_units, read_codes(codes))
    return map_lines(_words(source), expected, target, make, workers, f"units {target.stem}")
