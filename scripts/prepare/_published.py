"""Published language modeling texts: words line by line, or one text byte by byte."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.command_line import check_at_least
from scripts._shared.commands import short
from scripts.prepare._binarize import (
    NO_MADE_UP_SYMBOLS,
    OTHER_WHITESPACE,
    VISIBLE_SPACE,
    load_srcdict,
    preprocess,
    write_units,
)
from scripts.prepare._downloads import Archive, add_source_options
from scripts.prepare._lines import add_workers_option
from scripts.prepare._stages import SPLITS, Stages, file_digest, readable_path, run_preparation

if TYPE_CHECKING:
    import numpy as np
    from fairseq.data import Dictionary

NEWLINE = 10
# Tokens per item of a text without lines: fairseq's own tasks copy a whole item at each access.
ITEM = 4096


@dataclass(frozen=True)
class Words:
    """A data set of words; each line ends with </s>.

    Args:
        archives: published files with its texts.
        splits: the part of each text, by file name.
        vocabulary: number of symbols, as published.
        unlisted: number of those that are not in dict.txt, such as <unk> and the end of line.
        threshold: words seen less often in training become <unk>.
        ascii_blanks: only ASCII whitespace separates words, and only newlines separate lines.
    """

    archives: Sequence[Archive]
    splits: Mapping[str, str]
    vocabulary: int
    unlisted: int = 2
    threshold: int = 0
    ascii_blanks: bool = False

    def write_texts(self, raw: Sequence[Path], folder: Path) -> dict[str, Path]:
        """Write the text of each part into a folder, words with single spaces between them."""
        texts = {part: folder / f"{part}.txt" for part in SPLITS}
        newline = "\n" if self.ascii_blanks else None
        for path in raw:
            lines = path.open(encoding="utf-8", newline=newline)
            text = texts[self.splits[path.name]]
            with lines, text.open("a", encoding="utf-8", newline="\n") as file:
                for line in lines:
                    if self.ascii_blanks:
                        line = OTHER_WHITESPACE.sub(VISIBLE_SPACE, line)
                    file.write(" ".join(line.split()) + "\n")
        return texts

    def build(self, raw: Sequence[Path], options: argparse.Namespace, folder: Path) -> dict:
        """Binarize the texts into a folder; return the vocabulary size and the splits' sizes."""
        texts = self.write_texts(raw, raw[0].parent)
        dictionary_options = [*NO_MADE_UP_SYMBOLS, "--thresholdsrc", str(self.threshold)]
        if options.srcdict:
            load_srcdict(options.srcdict)
            dictionary_options = ["--srcdict", short(options.srcdict)]
        sizes = preprocess(texts, folder, options.workers, dictionary_options)
        with (folder / "dict.txt").open(encoding="utf-8") as symbols:
            vocabulary = sum(1 for _ in symbols) + self.unlisted
        if not options.srcdict:
            check_vocabulary(vocabulary, self.vocabulary)
        write_units(folder, "words")
        return {"vocabulary": vocabulary, "splits": sizes}


@dataclass(frozen=True)
class Characters:
    """A data set that is one text, split by position; each byte is a token.

    There are two conventions for newlines, whose bits per character are not comparable:
    drop    remove them, as in the Transformer-XL code
    eos     replace each by </s>, as in the adaptive-span and all-attention code; a split that ends
            within a line gets a </s> there, too, as in these and with fairseq-preprocess

    Args:
        archives: the published file with its text.
        vocabulary: number of different bytes, as published.
        has_newlines: whether a convention for newlines has to be chosen.
        symbols: replacements of characters in dict.txt; None to write bytes as numbers.
        sizes: number of bytes of train, valid and test, in the order of the text.
    """

    archives: Sequence[Archive]
    vocabulary: int
    has_newlines: bool = False
    symbols: Mapping[str, str] | None = None
    sizes: tuple[int, ...] = (90_000_000, 5_000_000, 5_000_000)

    def build(self, raw: Sequence[Path], options: argparse.Namespace, folder: Path) -> dict:
        """Binarize the text into a folder; return the vocabulary size and the splits' sizes."""
        import numpy as np
        from fairseq.data.indexed_dataset import best_fitting_int_dtype

        text = np.fromfile(raw[0], dtype=np.uint8)
        parts = np.split(text, np.cumsum(self.sizes)[:-1])
        counts = [count_bytes(part) for part in parts]
        found = np.flatnonzero(sum(counts)).tolist()
        check_vocabulary(len(found), self.vocabulary)
        symbols = {
            byte: str(byte) if self.symbols is None else self.symbols.get(chr(byte), chr(byte))
            for byte in found
            if byte != NEWLINE or not options.newlines
        }
        # the original codes count all splits; here a symbol that training lacks comes last
        dictionary = make_dictionary(
            {symbol: int(counts[0][byte]) for byte, symbol in symbols.items()}, options.srcdict
        )
        dictionary.save(str(folder / "dict.txt"))
        # newlines have no symbol of their own
        table = np.full(256, dictionary.eos(), dtype=best_fitting_int_dtype(len(dictionary)))
        for byte, symbol in symbols.items():
            table[byte] = dictionary.index(symbol)
        sizes = {}
        for split, part in zip(SPLITS, parts, strict=True):
            tokens = write_tokens(str(folder / split), part, table, options.newlines)
            sizes[split] = {"bytes": len(part), "tokens": tokens, "unknown": 0}
        write_units(folder, "characters" if self.symbols else "bytes", symbols=self.symbols or {})
        # with --newlines eos, </s> is a symbol of the text
        return {"vocabulary": len(symbols) + (options.newlines == "eos"), "splits": sizes}


def count_bytes(text: "np.ndarray") -> "np.ndarray":
    """Count how often each byte occurs, (256,)."""
    import numpy as np

    # in pieces: np.bincount converts its input to eight bytes a number
    pieces = (text[i : i + 2**20] for i in range(0, len(text), 2**20))
    return sum(np.bincount(piece, minlength=256) for piece in pieces)


def make_dictionary(counts: Mapping[str, int], srcdict: Path | None) -> "Dictionary":
    """Load srcdict, which must have all symbols, or make a dictionary of them sorted by count."""
    from fairseq.data import Dictionary

    if srcdict is None:
        dictionary = Dictionary()
        for symbol, count in counts.items():
            dictionary.add_symbol(symbol, count)
        dictionary.finalize(padding_factor=1)
        return dictionary
    dictionary = load_srcdict(srcdict)
    if missing := [symbol for symbol in counts if symbol not in dictionary]:
        raise ValueError(
            f"--srcdict {short(srcdict)} lacks {len(missing)} of the text's {len(counts)} "
            f"symbols, such as {', '.join(map(repr, missing[:5]))}: give a dictionary of this "
            "data set, or leave the option out for a new one"
        )
    return dictionary


def write_tokens(prefix: str, text, table, newlines: str | None) -> int:
    """Write PREFIX.bin and PREFIX.idx: the tokens of bytes (N,), looked up in table (256,).

    Returns the number of tokens.
    """
    import numpy as np
    from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path

    if newlines == "eos" and text[-1] != NEWLINE:
        text = np.append(text, np.uint8(NEWLINE))
    if newlines == "drop":
        text = text[text != NEWLINE]
    table[text].tofile(data_file_path(prefix))
    # with --newlines eos an item is a line with its </s>, otherwise a piece of ITEM tokens
    ends = np.arange(ITEM, len(text), ITEM)
    if newlines == "eos":
        ends = np.flatnonzero(text[:-1] == NEWLINE) + 1
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), table.dtype.type) as index:
        index.write(np.diff(ends, prepend=0, append=len(text)).tolist())
    return len(text)


def check_vocabulary(found: int, published: int) -> None:
    """Raise ValueError if the number of symbols of a text is not the published one."""
    if found != published:
        raise ValueError(
            f"the text has a vocabulary of {found:,} symbols, the published one has "
            f"{published:,}: results would not compare with published ones; get the data again, or "
            "give --srcdict for another dictionary of words"
        )


def prepare(data_set: Words | Characters, name: str, options: argparse.Namespace) -> None:
    """Make the --output folder, unless it is complete already."""
    check_at_least(1, workers=options.workers)
    settings = {"data_set": name, "newlines": options.newlines}
    stages = Stages(options.output, {**settings, "srcdict": file_digest(options.srcdict)})

    def build(folder: Path) -> dict:
        raw = folder / "raw"
        raw.mkdir()
        texts = [path for archive in data_set.archives for path in archive.unpack(options, raw)]
        if options.text:
            data_set.write_texts(texts, folder)
        sizes = {} if options.text else data_set.build(texts, options, folder)
        shutil.rmtree(raw)
        return sizes

    stages.finish(stages.run("text" if options.text else "bin", build))


def run(data_set: Words | Characters, description: str, arguments: list[str] | None = None) -> int:
    """Run the command of a data set, given its module's docstring; return the exit status."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(newlines=None, workers=1, text=False)
        add_source_options(parser, ", ".join(archive.name for archive in data_set.archives))
        text = "dict.txt to binarize with, for a model trained elsewhere, instead of a new one"
        parser.add_argument("--srcdict", type=readable_path, metavar="FILE", help=text)
        if isinstance(data_set, Words):
            add_workers_option(parser)
            text = "write OUTPUT/text/{train,valid,test}.txt, and binarize nothing"
            parser.add_argument("--text", action="store_true", help=text)
        elif data_set.has_newlines:
            text = "drop newlines, as the Transformer-XL code does, or make each one </s>"
            parser.add_argument("--newlines", choices=("drop", "eos"), required=True, help=text)

    name = description.partition(",")[0]
    return run_preparation(description, add_options, partial(prepare, data_set, name), arguments)
