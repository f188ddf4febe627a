"""Published data sets of language modelling: words line by line, or one text byte by byte."""

import argparse
import io
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from scripts._shared.command_line import check_at_least, command_parser, exit_status
from scripts._shared.commands import short
from scripts.prepare._binarize import (
    OTHER_BLANK,
    VISIBLE_BLANK,
    counted_dictionary,
    load_srcdict,
    preprocess,
    write_units,
)
from scripts.prepare._downloads import add_source_options, check, download, members, undamaged
from scripts.prepare._lines import add_workers_option
from scripts.prepare._stages import (
    DOWNLOAD,
    SPLITS,
    Stages,
    add_output_option,
    existing,
    file_digest,
)

NEWLINE = 10
# Bytes that are worked on at once, so that what is made of them stays in the processor's cache.
PIECE = 2**18
# fairseq's own tasks copy a whole item each time they touch it: text without lines is cut.
ITEM = 4096


@dataclass(frozen=True)
class DataSet:
    """A published data set: where it is, how it is checked and what is known of it.

    Args:
        name: what it is called.
        mirrors: URLs of folders that hold it.
        files: checksums, ``ALGORITHM:DIGITS``, of what a mirror holds by name: one archive, or the
            members; None where only the member of an archive has one.
        vocabulary: number of symbols, as published.
    """

    name: str
    mirrors: tuple[str, ...]
    files: Mapping[str, str | None]
    vocabulary: int

    def build(self, source: Path, options: argparse.Namespace, folder: Path) -> dict:
        """Fill the folder for fairseq from a source; return vocabulary and splits."""
        raise NotImplementedError

    def check_vocabulary(self, found: int) -> None:
        """Raise ValueError when the number of symbols of a text is not the published one."""
        if found != self.vocabulary:
            raise ValueError(
                f"{self.name}: the text has a vocabulary of {found:,} symbols, the published one "
                f"has {self.vocabulary:,}: figures would not compare with published ones, get the "
                "data anew, or for another dictionary of words give --srcdict"
            )

    def source(self, options: argparse.Namespace, folder: Path) -> Path:
        """Archive, file or folder of --from, or what was downloaded into a folder."""
        if options.source:
            if len(self.files) == 1:
                check(options.source, *self.files.values(), f"--from {short(options.source)}")
            return options.source
        for file, checksum in self.files.items():
            path = download(file, [*options.mirrors, *self.mirrors], checksum, folder)
        return path if len(self.files) == 1 else folder


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
    # <unk> and the end of line
    unlisted: int = 2
    threshold: int = 0
    ascii_blanks: bool = False

    def write_texts(self, source: Path, texts: Mapping[str, Path]) -> Counter:
        """Write each split's text; return how often each word is in the training split."""
        counts: Counter = Counter()
        label = short(source)
        with ExitStack() as stack, undamaged(label):
            files = {
                split: stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                for split, path in texts.items()
            }
            for name, stream in members(source, list(self.splits), label):
                split = self.splits[name]
                if name in self.files:
                    content = stream.read()
                    check(content, self.files[name], f"{label}, {name},")
                    stream = io.BytesIO(content)
                for words in words_of_lines(stream, self.ascii_blanks):
                    if split == "train":
                        counts.update(words)
                    files[split].write(" ".join(words) + "\n")
        return counts

    def build(self, source: Path, options: argparse.Namespace, folder: Path) -> dict:
        """As every data set."""
        place = folder / "text"
        place.mkdir()
        texts = {split: place / f"{split}.txt" for split in SPLITS}
        counts = self.write_texts(source, texts)
        if options.srcdict:
            dictionary = load_srcdict(options.srcdict)
        else:
            dictionary = counted_dictionary(counts, self.threshold)
        vocabulary = len(dictionary) - dictionary.nspecial + self.unlisted
        if not options.srcdict:
            self.check_vocabulary(vocabulary)
        file = place / "dict.txt"
        dictionary.save(str(file))
        sizes = preprocess(texts, folder, options.workers, ("--srcdict", short(file)))
        shutil.rmtree(place)
        write_units(folder, "words")
        return {"vocabulary": vocabulary, "splits": sizes}


def words_of_lines(stream: BinaryIO, ascii_blanks: bool) -> Iterator[list[str]]:
    """Words of each line of a UTF-8 text."""
    if ascii_blanks:
        for line in stream:
            yield OTHER_BLANK.sub(VISIBLE_BLANK, line.decode()).split()
        return
    for line in io.TextIOWrapper(stream, encoding="utf-8"):
        yield line.split()


@dataclass(frozen=True)
class ByteDataSet(DataSet):
    """A data set that is one text, named like the data set, split by position, each byte a token.

    Newlines in one of two conventions, whose bits per character do not compare:
    drop    they are left away, as in the Transformer-XL code
    eos     each is one </s>, as in the adaptive-span and all-attention code; a split that ends
            within a line gets a </s> there too, as those and fairseq-preprocess do

    Args:
        checksum: of the text, ``ALGORITHM:DIGITS``.
        has_newlines: so that one of the two conventions has to be chosen.
        symbols: of characters in dict.txt; None where each byte has its number.
        sizes: number of bytes of train, valid and test, in the order of the text.
    """

    checksum: str
    has_newlines: bool = False
    symbols: Mapping[str, str] | None = None
    sizes: tuple[int, ...] = (90_000_000, 5_000_000, 5_000_000)

    def dictionary(self, symbols: Mapping[int, str], counts, srcdict: Path | None):
        """Dictionary of srcdict, or of the symbols by falling number in training, counts (256,).

        The originals count all splits; a symbol that fairseq-preprocess would not know comes last.
        """
        if srcdict is None:
            return counted_dictionary({name: int(counts[byte]) for byte, name in symbols.items()})
        dictionary = load_srcdict(srcdict)
        missing = [symbol for symbol in symbols.values() if symbol not in dictionary]
        if missing:
            raise ValueError(
                f"--srcdict {short(srcdict)} lacks {len(missing)} of the text's {len(symbols)} "
                f"symbols, such as {', '.join(map(repr, missing[:5]))}: give a dictionary of this "
                "data set, or leave the option away for a new one"
            )
        return dictionary

    def build(self, source: Path, options: argparse.Namespace, folder: Path) -> dict:
        """As every data set."""
        import numpy as np
        from fairseq.data.indexed_dataset import best_fitting_int_dtype

        label, newlines = short(source), options.newlines
        with undamaged(label):
            (content,) = [stream.read() for _, stream in members(source, [self.name], label)]
        check(content, self.checksum, f"{label}, {self.name},")
        text = np.frombuffer(content, dtype=np.uint8)
        ends = np.cumsum(self.sizes)
        splits = dict(zip(SPLITS, np.split(text, ends[:-1]), strict=True))
        counts = {
            split: sum(np.bincount(piece, minlength=256) for piece in pieces(part))
            for split, part in splits.items()
        }
        found = np.flatnonzero(sum(counts.values())).tolist()
        self.check_vocabulary(len(found))
        names = dict(enumerate(map(str, range(256))))
        if self.symbols is not None:
            names = {byte: self.symbols.get(chr(byte), chr(byte)) for byte in names}
        symbols = {byte: names[byte] for byte in found if byte != NEWLINE or not newlines}
        dictionary = self.dictionary(symbols, counts["train"], options.srcdict)
        dictionary.save(str(folder / "dict.txt"))
        # Newlines are </s>.
        table = np.full(256, dictionary.eos(), dtype=best_fitting_int_dtype(len(dictionary)))
        for byte, symbol in symbols.items():
            table[byte] = dictionary.index(symbol)
        sizes = {}
        for split, part in splits.items():
            tokens = write_tokens(str(folder / split), part, table, newlines)
            sizes[split] = {"bytes": len(part), "tokens": tokens, "unknown": 0}
        write_units(folder, "characters" if self.symbols else "bytes", symbols=self.symbols or {})
        # </s> is a symbol of the text where newlines are.
        return {"vocabulary": len(symbols) + (newlines == "eos"), "splits": sizes}


def pieces(text):
    """Pieces of an array that numpy may index or count with: it makes 8-byte copies of them."""
    return (text[first : first + PIECE] for first in range(0, len(text), PIECE))


def write_tokens(prefix: str, text, table, newlines: str | None) -> int:
    """Write PREFIX.bin and PREFIX.idx with the token of each byte (N,) in table (256,).

    Returns the number of tokens.
    """
    import numpy as np
    from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path

    if newlines == "eos" and text[-1] != NEWLINE:
        text = np.append(text, np.uint8(NEWLINE))
    if newlines == "drop":
        text = text[text != NEWLINE]
    with open(data_file_path(prefix), "wb") as file:
        for piece in pieces(text):
            table.take(piece).tofile(file)
    # An item is a line with its </s> where newlines have one, else any piece.
    ends = np.arange(ITEM, len(text), ITEM)
    if newlines == "eos":
        ends = np.flatnonzero(text[:-1] == NEWLINE) + 1
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), table.dtype.type) as index:
        index.write(np.diff(ends, prepend=0, append=len(text)).tolist())
    return len(text)


def prepare(data_set: DataSet, options: argparse.Namespace) -> None:
    """Make the folder of --output, or do nothing if it is there."""
    check_at_least(1, workers=options.workers)
    settings = {"data_set": data_set.name, "newlines": options.newlines}
    stages = Stages(options.output, {**settings, "srcdict": file_digest(options.srcdict)})

    def build(folder: Path) -> dict:
        source = data_set.source(options, options.output / DOWNLOAD)
        try:
            return data_set.build(source, options, folder)
        except ValueError:
            # a mirror may have sent anything
            if not options.source and None in data_set.files.values():
                shutil.rmtree(options.output / DOWNLOAD)
            raise

    stages.finish(stages.run("bin", build))


def run(data_set: DataSet, description: str, arguments: list[str] | None = None) -> int:
    """Command line of a data set, with the docstring of its module; returns its exit status."""
    parser = command_parser(description)
    parser.set_defaults(newlines=None, workers=1)
    add_output_option(parser)
    text = f"{', '.join(data_set.files)}, or a folder of several, in place of downloads"
    add_source_options(parser, "FILE", text)
    text = "dict.txt to binarize with, for a model trained elsewhere, instead of a new one"
    parser.add_argument("--srcdict", type=existing, metavar="FILE", help=text)
    if isinstance(data_set, WordDataSet):
        add_workers_option(parser)
    elif data_set.has_newlines:
        text = (
            "leave newlines away, as the Transformer-XL code does, or make each one </s>, as the "
            "adaptive-span and all-attention code does; their bits per character do not compare"
        )
        parser.add_argument("--newlines", choices=("drop", "eos"), required=True, help=text)
    options = parser.parse_args(arguments)
    return exit_status(partial(prepare, data_set, options), output=options.output)
