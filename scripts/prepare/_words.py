"""Words separated by blanks to fairseq's binarized format, each line ended by </s>.

The text is read once, to count it and to bring it into the shape that fairseq-preprocess reads.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import (
    MMapIndexedDataset,
    best_fitting_int_dtype,
    data_file_path,
    index_file_path,
)

from scripts._shared.commands import short
from scripts.prepare._archives import read_members
from scripts.prepare._corpus import Request, argument_parser, prepare, run
from scripts.prepare._data_set import SPLITS, DataSet
from scripts.prepare._dictionary import counted_dictionary, load_srcdict
from scripts.prepare._preprocess import preprocess_command, run_preprocess

# What separates words in Python's text but not in its bytes, such as the no-break space.
OTHER_BLANK = re.compile(r"[^\S \t\n\r\v\f]")
# Written for such a blank within a word, where fairseq would cut the word.
VISIBLE_BLANK = "\u2423"
# fairseq binarizes the first part of a text after the others: one process more than cores. Each
# of them holds the dictionary.
MOST_WORKERS = 16
# Tokens that are compared at once.
SCANNED = 2**24


@dataclass(frozen=True)
class WordDataSet(DataSet):
    """A data set of words.

    Args:
        splits: the split that each member belongs to.
        unlisted: how many symbols of the published vocabulary are not words of dict.txt.
        threshold: words seen less often in training become <unk>.
        ascii_blanks: only ASCII blanks separate words, and only newlines separate lines.
    """

    splits: Mapping[str, str]
    unlisted: int
    threshold: int = 0
    ascii_blanks: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the files of all splits."""
        return tuple(self.splits)


@dataclass
class SplitSizes:
    """Sizes of a split: lines, tokens with the </s> of each line, those that are <unk>."""

    lines: int = 0
    tokens: int = 0
    unknown: int = 0


def words_of_lines(stream: BinaryIO, ascii_blanks: bool) -> Iterator[list[str]]:
    """Words of each line of a UTF-8 text."""
    if ascii_blanks:
        for line in stream:
            yield OTHER_BLANK.sub(VISIBLE_BLANK, line.decode()).split()
        return
    for line in io.TextIOWrapper(stream, encoding="utf-8"):
        yield line.split()


def write_texts(
    data_set: WordDataSet, source: Path, texts: Mapping[str, Path]
) -> tuple[Counter, dict[str, SplitSizes]]:
    """Write each split's text and return the words of the training split and all sizes.

    The sizes count the <unk> that are in the text.
    """
    counts: Counter = Counter()
    sizes = {split: SplitSizes() for split in texts}
    with ExitStack() as stack:
        files = {
            split: stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            for split, path in texts.items()
        }

        def take(name: str, stream: BinaryIO) -> None:
            split = data_set.splits[name]
            size, write = sizes[split], files[split].write
            for words in words_of_lines(stream, data_set.ascii_blanks):
                if split == "train":
                    counts.update(words)
                size.lines += 1
                size.tokens += len(words) + 1
                size.unknown += words.count("<unk>")
                write(" ".join(words) + "\n")

        read_members(source, data_set.members, take, short(source), "read, count")
    return counts, sizes


def mend_offsets(prefix: str) -> None:
    """Write the index of a split anew, from its lengths.

    With numpy 2 fairseq adds the lengths of parts that it merged in 32 bits: the offsets of a
    split beyond 2 GiB would be wrong.
    """
    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lengths, dtype = index.sizes.tolist(), index.dtype
    # It is a memory map of the file that is written next.
    del index
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), dtype) as writer:
        writer.write(lengths)


def count_unknown(prefix: str, dictionary: Dictionary, expected: SplitSizes) -> int:
    """Number of <unk> in a binarized split.

    Raises ValueError when the split has not the expected number of lines and tokens.
    """
    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lines, tokens = len(index), int(index.sizes.sum())
    if (lines, tokens) != (expected.lines, expected.tokens):
        raise ValueError(
            f"fairseq-preprocess, {Path(prefix).name}: {lines:,} lines, {tokens:,} tokens of a "
            f"text of {expected.lines:,} lines, {expected.tokens:,} tokens: use the fairseq "
            "version that this project pins"
        )
    data = np.memmap(data_file_path(prefix), dtype=index.dtype, mode="r")
    pieces = (data[first : first + SCANNED] for first in range(0, tokens, SCANNED))
    return sum(int((piece == dictionary.unk()).sum()) for piece in pieces)


def binarize_splits(
    command: list[str],
    folder: Path,
    log: Path,
    sizes: Mapping[str, SplitSizes],
    dictionaries: Mapping[str, Dictionary],
) -> dict[str, int]:
    """Run a fairseq-preprocess command and return how many <unk> are in each split.

    Args:
        command: what to run.
        folder: that it writes to.
        log: file for its output, which is left there only when it fails.
        sizes: lines and tokens of each split, by the names of its files without suffix.
        dictionaries: of each split.

    Raises ValueError when it fails or a split has not the expected number of lines and tokens.
    """
    tokens = sum(size.tokens for size in sizes.values())
    symbols = max(len(dictionary) for dictionary in dictionaries.values())
    itemsize = np.dtype(best_fitting_int_dtype(symbols)).itemsize
    try:
        run_preprocess(command, folder, log, tokens, itemsize)
    except KeyboardInterrupt:
        log.unlink(missing_ok=True)
        raise
    log.unlink()
    unknown = {}
    for split, size in sizes.items():
        prefix = str(folder / split)
        mend_offsets(prefix)
        unknown[split] = count_unknown(prefix, dictionaries[split], size)
    return unknown


def binarize_words(
    data_set: WordDataSet, source: Path, folder: Path, request: Request, workers: int
) -> dict:
    """Write folder/bin from a checked source and return what is to be told of the corpus.

    Args:
        data_set: what the source is.
        source: an archive, or a folder with the members.
        folder: has an empty folder bin.
        request: tells the dictionary.
        workers: processes of fairseq-preprocess.

    Raises ValueError when the vocabulary is not the published one or fairseq-preprocess fails.
    """
    texts = {split: folder / f"{split}.txt" for split in SPLITS}
    counts, sizes = write_texts(data_set, source, texts)
    if request.srcdict:
        dictionary = load_srcdict(request.srcdict)
    else:
        dictionary = counted_dictionary(counts, data_set.threshold)
    words = len(dictionary) - dictionary.nspecial
    if not request.srcdict:
        remedy = "get the data anew, or give the dictionary that is meant with --srcdict"
        data_set.check_vocabulary(words + data_set.unlisted, remedy)
    dictionary_file = folder / "dict.txt"
    dictionary.save(str(dictionary_file))
    command = preprocess_command(
        texts, folder / "bin", workers, "--srcdict", short(dictionary_file)
    )
    # Beside the folder, which does not outlive a failure.
    log = folder.with_name("preprocess.log")
    dictionaries = dict.fromkeys(sizes, dictionary)
    unknown = binarize_splits(command, folder / "bin", log, sizes, dictionaries)
    for split, size in sizes.items():
        lost = unknown[split] - size.unknown
        print(f"{split}: {lost:,} words are not in the dictionary: now <unk>")
        size.unknown = unknown[split]
        texts[split].unlink()
    dictionary_file.unlink()
    return {
        "vocabulary": words + data_set.unlisted,
        "splits": {split: asdict(size) for split, size in sizes.items()},
    }


def run_words(data_set: WordDataSet, description: str, example: str) -> int:
    """Command line of a script that prepares a data set of words; returns its exit status."""
    parser = argument_parser(description, example)
    parser.add_argument(
        "--workers",
        type=int,
        default=min((os.cpu_count() or 2) + 1, MOST_WORKERS),
        metavar="N",
        help="processes of fairseq-preprocess (default: %(default)s)",
    )
    arguments = parser.parse_args()

    def work(request: Request) -> None:
        if arguments.workers < 1:
            raise ValueError(
                f"--workers {arguments.workers} is no number of processes: give 1 or more"
            )
        prepare(
            data_set,
            request,
            lambda source, folder: binarize_words(
                data_set, source, folder, request, arguments.workers
            ),
        )

    return run(arguments, work)
