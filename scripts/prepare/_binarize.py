"""Words separated by blanks to fairseq's binarized format, each line ended by </s>.

fairseq-preprocess does it, with a dictionary that is counted here. A published data set is read
once, to count it and to bring it into the shape that fairseq-preprocess reads.
"""

import argparse
import io
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import (
    MMapIndexedDataset,
    data_file_path,
    index_file_path,
)

from scripts._shared.command_line import check_at_least
from scripts._shared.commands import child_process, format_command, program, short
from scripts.prepare._lines import add_workers_option, progress
from scripts.prepare._published import SPLITS, DataSet
from scripts.prepare._sources import read_members

# What separates words in Python's text but not in its bytes, such as the no-break space.
OTHER_BLANK = re.compile(r"[^\S \t\n\r\v\f]")
# Written for such a blank within a word, where fairseq would cut the word.
VISIBLE_BLANK = "\u2423"
# With fairseq's default factor of 8 a dictionary that it counts would get made-up symbols.
NO_MADE_UP_SYMBOLS = ("--padding-factor", "1")
# Tokens that are compared at once.
SCANNED = 2**24
# Lines and tokens of a split, the </s> of each line included.
Sizes = Mapping[str, int]


def counted_dictionary(counts: Mapping[str, int], threshold: int = 0) -> Dictionary:
    """Dictionary of the symbols seen at least threshold times, the most frequent first."""
    dictionary = Dictionary()
    for symbol, count in counts.items():
        dictionary.add_symbol(symbol, count)
    dictionary.finalize(threshold=threshold, padding_factor=1)
    return dictionary


def count_symbols(path: Path) -> int:
    """Number of symbols of a dict.txt."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def load_srcdict(path: Path) -> Dictionary:
    """Dictionary of the file that --srcdict names; raises ValueError when it is none of fairseq."""
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
    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lengths, dtype = index.sizes.tolist(), index.dtype
    # It is a memory map of the file that is written next.
    del index
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), dtype) as writer:
        writer.write(lengths)


def count_unknown(prefix: str, expected: Sizes) -> int:
    """Number of <unk> in a binarized split; raises ValueError when it has not the sizes."""
    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lines, tokens = len(index), int(index.sizes.sum())
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
    return sum(int((piece == unknown).sum()) for piece in pieces)


def preprocess(
    texts: Mapping[str, Path | Sequence[Path]],
    target: Path,
    log: Path,
    sizes: Mapping[str, Sizes],
    workers: int,
    *options: str,
    languages: tuple[str, str] | None = None,
) -> dict[str, int]:
    """Print and run fairseq-preprocess, and return how many <unk> each split has.

    Args:
        texts: the text of each split, or with languages what its two texts have before
            ``.LANGUAGE``; several become SPLIT, SPLIT1 and so on.
        target: the folder that it writes to.
        log: file for its output, which is left there only when it fails; beside target, which does
            not outlive a failure.
        sizes: of each split, by the names of its files without suffix.
        workers: number of processes that work at once.
        options: further words, which name the dictionary.
        languages: source and target; None for texts in one language.

    Raises ValueError when it fails or a split has not the expected number of lines and tokens.
    """
    kind = ["--only-source"]
    if languages:
        kind = ["--source-lang", languages[0], "--target-lang", languages[1]]
    command = [program("fairseq-preprocess"), *kind]
    for split, text in texts.items():
        several = [text] if isinstance(text, Path) else text
        command += [f"--{split}pref", ",".join(map(short, several))]
    # fairseq binarizes the first part of a text after the others.
    processes = workers + 1 if workers > 1 else 1
    command += ["--destdir", short(target), *options, "--workers", str(processes)]
    print(f"$ {format_command(command)}", flush=True)
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
    # another run of the same command, which was killed, may have removed it at its end
    log.unlink(missing_ok=True)
    unknown = {}
    for split, size in sizes.items():
        mend_offsets(str(target / split))
        unknown[split] = count_unknown(str(target / split), size)
    return unknown


def words_of_lines(stream: BinaryIO, ascii_blanks: bool) -> Iterator[list[str]]:
    """Words of each line of a UTF-8 text."""
    if ascii_blanks:
        for line in stream:
            yield OTHER_BLANK.sub(VISIBLE_BLANK, line.decode()).split()
        return
    for line in io.TextIOWrapper(stream, encoding="utf-8"):
        yield line.split()


def write_texts(
    data_set: "WordDataSet", source: Path, texts: Mapping[str, Path]
) -> tuple[Counter, dict[str, dict[str, int]]]:
    """Write each split's text; return the words of the training split and the sizes of all.

    Sizes are lines, tokens and those that are <unk> in the text. Raises as read_members.
    """
    counts: Counter = Counter()
    sizes = {split: dict.fromkeys(("lines", "tokens", "unknown"), 0) for split in texts}
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
                size["lines"] += 1
                size["tokens"] += len(words) + 1
                size["unknown"] += words.count("<unk>")
                write(" ".join(words) + "\n")

        read_members(source, data_set.members, take, short(source), "read, count")
    return counts, sizes


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

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add --workers."""
        add_workers_option(parser)

    def own_settings(self, options: argparse.Namespace) -> dict[str, str]:
        """None; raises ValueError when --workers is impossible."""
        check_at_least(1, workers=options.workers)
        return {}

    def build(self, source: Path, folder: Path, options: argparse.Namespace) -> dict:
        """As every data set; raises ValueError when the vocabulary is not the published one."""
        texts = {split: folder / f"{split}.txt" for split in SPLITS}
        counts, sizes = write_texts(self, source, texts)
        dictionary = (
            load_srcdict(options.srcdict)
            if options.srcdict
            else counted_dictionary(counts, self.threshold)
        )
        vocabulary = len(dictionary) - dictionary.nspecial + self.unlisted
        if not options.srcdict:
            remedy = "get the data anew, or give the dictionary that is meant with --srcdict"
            self.check_vocabulary(vocabulary, remedy)
        file = folder / "dict.txt"
        dictionary.save(str(file))
        log, which = folder.with_name("preprocess.log"), ("--srcdict", short(file))
        unknown = preprocess(texts, folder / "bin", log, sizes, options.workers, *which)
        for split, size in sizes.items():
            lost = unknown[split] - size["unknown"]
            print(f"{split}: {lost:,} words are not in the dictionary: now <unk>")
            size["unknown"] = unknown[split]
            texts[split].unlink()
        file.unlink()
        return {"vocabulary": vocabulary, "splits": sizes}
