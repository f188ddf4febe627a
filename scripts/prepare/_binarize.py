"""Words between blanks to fairseq's binarized format, each line ended by </s>.

fairseq-preprocess does it. Beside its files stands units.json, which says what a symbol is:

unit        bytes (by their numbers), characters, words or subwords
bpe         what makes subwords: subword_nmt or sentencepiece, else null
model       its codes or model, relative to the folder of units.json, else null
tokenizer   moses where it made the words, else null; language: the code of its rules
symbols     characters that are written in another way, such as a blank, each with its symbol
"""

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.commands import child_process, format_command, program, short
from scripts._shared.files import write_json
from scripts.prepare._lines import progress
from scripts.prepare._stages import LOG

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# What separates words in Python's text but not in its bytes, such as the no-break space.
OTHER_BLANK = re.compile(r"[^\S \t\n\r\v\f]")
# Written for such a blank within a word, where fairseq would cut the word.
VISIBLE_BLANK = "\u2423"
# With fairseq's default factor of 8 a dictionary that it counts would get made-up symbols.
NO_MADE_UP_SYMBOLS = ("--padding-factor", "1")
# Tokens that are compared at once.
SCANNED = 2**24


def write_units(
    folder: Path,
    unit: str,
    bpe: str | None = None,
    model: str | None = None,
    language: str | None = None,
    symbols: Mapping[str, str] = {},
) -> None:
    """Write units.json; with the language of Moses' rules where Moses made the words."""
    tokenizer = "moses" if language else None
    content = {"unit": unit, "bpe": bpe, "model": model, "tokenizer": tokenizer}
    write_json(folder / "units.json", {**content, "language": language, "symbols": dict(symbols)})


def counted_dictionary(counts: Mapping[str, int], threshold: int = 0) -> "Dictionary":
    """Dictionary of the symbols seen at least threshold times, the most frequent first."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for symbol, count in counts.items():
        dictionary.add_symbol(symbol, count)
    dictionary.finalize(threshold=threshold, padding_factor=1)
    return dictionary


def count_symbols(path: Path) -> int:
    """Number of symbols of a dict.txt."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def load_srcdict(path: Path) -> "Dictionary":
    """Dictionary of the file that --srcdict names; raises ValueError when it is none of fairseq."""
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(path))
    # fairseq raises plain exceptions for another encoding or a symbol that is there twice.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--srcdict {short(path)} is no dictionary of fairseq ({reason}): "
            "give the dict.txt of the model, a symbol and its count on each line"
        ) from error


def bytes_on_disk(folder: Path) -> int:
    """Size of the binarized files of a folder that fairseq is writing."""
    size = 0
    for path in folder.glob("*.bin"):
        # fairseq removes the parts of a file once they are merged.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def mend_offsets(prefix: str) -> None:
    """Write the index of a split anew, from its lengths.

    With numpy 2 fairseq adds the lengths of parts that it merged in 32 bits: the offsets of a
    split beyond 2 GiB would be wrong.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset, index_file_path

    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lengths, dtype = index.sizes.tolist(), index.dtype
    # It is a memory map of the file that is written next.
    del index
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), dtype) as writer:
        writer.write(lengths)


def text_sizes(path: Path) -> dict[str, int]:
    """Lines of a text, and tokens: its words with one space between two, and a </s> for each line.

    Each word must be one to fairseq, too.
    """
    lines = words = 0
    with path.open("rb") as file:
        for line in file:
            lines += 1
            words += line.count(b" ") + 1 if line != b"\n" else 0
    return {"lines": lines, "tokens": words + lines}


def binarized_sizes(prefix: str, text: Path) -> dict[str, int]:
    """Lines, tokens and <unk> of a binarized split; raises ValueError when its text has others."""
    import numpy as np
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path

    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lines, tokens = len(index), int(index.sizes.sum())
    expected = text_sizes(text)
    if (lines, tokens) != (expected["lines"], expected["tokens"]):
        raise ValueError(
            f"fairseq-preprocess, {Path(prefix).name}: {lines:,} lines, {tokens:,} tokens of a "
            f"text of {expected['lines']:,} lines, {expected['tokens']:,} tokens: use the fairseq "
            "version that this project pins"
        )
    data = np.memmap(data_file_path(prefix), dtype=index.dtype, mode="r")
    # of every dictionary
    unknown = Dictionary().unk()
    pieces = (data[first : first + SCANNED] for first in range(0, tokens, SCANNED))
    return {**expected, "unknown": sum(int((piece == unknown).sum()) for piece in pieces)}


def print_unknown(sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Print which share of the tokens of each split is <unk>."""
    for split, size in sizes.items():
        share = 100 * size["unknown"] / max(1, size["tokens"])
        print(f"{split}: {share:.2f} % of {size['tokens']:,} tokens are <unk>", flush=True)


def preprocess(
    texts: Mapping[str, Path],
    target: Path,
    workers: int,
    options: Iterable[str] = NO_MADE_UP_SYMBOLS,
    languages: tuple[str, str] | None = None,
) -> dict[str, dict[str, int]]:
    """Print and run fairseq-preprocess; return lines, tokens and <unk> of each split.

    Args:
        texts: of train, valid, test, test1 and so on; with languages, what its two texts have
            before ``.LANGUAGE``, and splits are called ``SPLIT.SOURCE-TARGET.LANGUAGE``.
        target: its folder. The log lies beside it and stays only after a failure.
        workers: processes that work at once.
        options: further words, which name the dictionary.
        languages: source and target; None for texts in one language.
    """
    kind = ["--only-source"]
    if languages:
        kind = ["--source-lang", languages[0], "--target-lang", languages[1]]
    command = [program("fairseq-preprocess"), *kind]
    for split, names in groupby(texts, lambda name: name.rstrip("0123456789")):
        command += [f"--{split}pref", ",".join(short(texts[name]) for name in names)]
    # fairseq binarizes the first part of a text after the others.
    processes = workers + 1 if workers > 1 else 1
    command += ["--destdir", short(target), *options, "--workers", str(processes)]
    print(f"$ {format_command(command)}", flush=True)
    log = target.parent / LOG
    try:
        with (
            child_process(command, log) as child,
            progress(desc="binarize", unit="B") as bar,
        ):
            while child.poll() is None:
                bar.update(bytes_on_disk(target) - bar.n)
                time.sleep(0.2)
    except KeyboardInterrupt:
        log.unlink(missing_ok=True)
        raise
    log.unlink(missing_ok=True)
    written = dict(texts)
    if languages:
        pair = "-".join(languages)
        written = {
            f"{split}.{pair}.{one}": prefix.with_name(f"{prefix.name}.{one}")
            for split, prefix in texts.items()
            for one in languages
        }
    sizes = {}
    for split, text in written.items():
        mend_offsets(str(target / split))
        sizes[split] = binarized_sizes(str(target / split), text)
    print_unknown(sizes)
    return sizes
