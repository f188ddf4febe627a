"""Bytes straight to fairseq's binarized format, each byte a token.

Newlines in one of two conventions, whose bits per character do not compare:
drop    they are left away, as in the Transformer-XL code
eos     each is one </s>, as in the adaptive-span and all-attention code; a split that ends within
        a line gets a </s> there too, as those and fairseq-preprocess do
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import (
    MMapIndexedDataset,
    best_fitting_int_dtype,
    data_file_path,
    index_file_path,
)
from tqdm import tqdm

from scripts._shared.commands import short
from scripts.prepare._archives import read_members
from scripts.prepare._corpus import Request
from scripts.prepare._data_set import SPLITS, DataSet
from scripts.prepare._dictionary import counted_dictionary, load_srcdict

NEWLINE = 10
# Bytes that are worked on at once, so that what is made of them stays in the processor's cache.
PIECE = 2**18
# fairseq's own tasks copy a whole item each time they touch it: text without lines is cut.
ITEM = 4096
CONVENTIONS = ("drop", "eos")


@dataclass(frozen=True)
class CharacterDataSet(DataSet):
    """A data set that is one text, split by position.

    Args:
        member: name of the file with the text.
        sizes: number of bytes of each split, in the order of the text.
        symbol: name of a byte in dict.txt.
    """

    member: str
    sizes: Mapping[str, int]
    symbol: Callable[[int], str]

    @property
    def members(self) -> tuple[str, ...]:
        """Name of the file with the text."""
        return (self.member,)


def check_newlines(convention: str | None) -> str:
    """Convention that --newlines names.

    Raises ValueError when it is none of the two.
    """
    if convention not in CONVENTIONS:
        given = "is missing" if convention is None else f"{convention} is unknown"
        raise ValueError(
            f"--newlines {given}: give 'drop' to leave newlines away, as the Transformer-XL code "
            "does, or 'eos' to make each one </s>, as the adaptive-span and all-attention code "
            "does; bits per character of the two do not compare"
        )
    return convention


def read_text(data_set: CharacterDataSet, source: Path) -> dict[str, np.ndarray]:
    """Bytes of each split.

    Raises ValueError when the text has another length than the splits together.
    """
    read = []
    read_members(
        source, data_set.members, lambda _, stream: read.append(stream.read()), short(source)
    )
    text = np.frombuffer(read[0], dtype=np.uint8)
    total = sum(data_set.sizes.values())
    if len(text) != total:
        raise ValueError(
            f"{short(source)}: the text has {len(text):,} bytes, {data_set.name} has {total:,}: "
            "get it anew"
        )
    ends = np.cumsum([data_set.sizes[split] for split in SPLITS])
    return dict(zip(SPLITS, np.split(text, ends[:-1]), strict=True))


def pieces(text: np.ndarray) -> list[np.ndarray]:
    """Views of a text that are worked on one after the other."""
    return [text[first : first + PIECE] for first in range(0, len(text), PIECE)]


def count_bytes(text: np.ndarray) -> np.ndarray:
    """How often each byte is in a text, (256,)."""
    counts = np.zeros(256, dtype=np.int64)
    for piece in pieces(text):
        counts += np.bincount(piece, minlength=256)
    return counts


def train_dictionary(counts: Mapping[str, np.ndarray], symbols: Mapping[int, str]) -> Dictionary:
    """Dictionary of the symbols of all splits, by falling number in the training split.

    The originals count all splits; a symbol that fairseq-preprocess would not know comes last.
    """
    return counted_dictionary({symbols[byte]: int(counts["train"][byte]) for byte in symbols})


def check_symbols(dictionary: Dictionary, symbols: Mapping[int, str], srcdict: Path) -> None:
    """Check that a dictionary has all symbols of a text.

    Raises ValueError when it has not.
    """
    missing = [symbol for symbol in symbols.values() if symbol not in dictionary]
    if missing:
        raise ValueError(
            f"--srcdict {short(srcdict)} lacks {len(missing)} of the text's {len(symbols)} "
            f"symbols, such as {', '.join(map(repr, missing[:5]))}: give a dictionary of this data "
            "set, or leave the option away for a new one"
        )


def lookup_table(dictionary: Dictionary, symbols: Mapping[int, str]) -> np.ndarray:
    """Token of each byte, (256,), in fairseq's number type for the dictionary; newlines: </s>."""
    table = np.full(256, dictionary.eos(), dtype=best_fitting_int_dtype(len(dictionary)))
    for byte, symbol in symbols.items():
        table[byte] = dictionary.index(symbol)
    return table


def item_lengths(text: np.ndarray, tokens: int, newlines: str | None) -> list[int]:
    """Length of each item: a line with its </s> where newlines have one, else any piece."""
    if newlines == "eos":
        ends = np.flatnonzero(text == NEWLINE) + 1
        if text[-1] != NEWLINE:
            ends = np.append(ends, tokens)
        return np.diff(ends, prepend=0).tolist()
    full, rest = divmod(tokens, ITEM)
    return [ITEM] * full + [rest] * (rest > 0)


def write_split(
    prefix: str, text: np.ndarray, table: np.ndarray, newlines: str | None, eos: int, bar: tqdm
) -> int:
    """Write PREFIX.bin and PREFIX.idx and return the number of tokens."""
    tokens = 0
    with open(data_file_path(prefix), "wb") as file:
        for piece in pieces(text):
            kept = piece[piece != NEWLINE] if newlines == "drop" else piece
            table.take(kept).tofile(file)
            tokens += len(kept)
            bar.update(len(piece))
        if newlines == "eos" and text[-1] != NEWLINE:
            np.array([eos], dtype=table.dtype).tofile(file)
            tokens += 1
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), table.dtype.type) as index:
        index.write(item_lengths(text, tokens, newlines))
    return tokens


def binarize_characters(
    data_set: CharacterDataSet,
    source: Path,
    folder: Path,
    request: Request,
    newlines: str | None = None,
) -> dict:
    """Write folder/bin from a checked source and return what is to be told of the corpus.

    Args:
        data_set: what the source is.
        source: an archive or the text itself.
        folder: has an empty folder bin.
        request: tells the dictionary.
        newlines: a convention, None for a text without newlines.

    Raises ValueError when the text or the dictionary does not have the symbols expected.
    """
    splits = read_text(data_set, source)
    counts = {split: count_bytes(text) for split, text in splits.items()}
    found = [int(byte) for byte in np.flatnonzero(sum(counts.values()))]
    data_set.check_vocabulary(len(found))
    symbols = {byte: data_set.symbol(byte) for byte in found if byte != NEWLINE or not newlines}
    if request.srcdict:
        dictionary = load_srcdict(request.srcdict)
        check_symbols(dictionary, symbols, request.srcdict)
    else:
        dictionary = train_dictionary(counts, symbols)
    dictionary.save(str(folder / "bin" / "dict.txt"))
    table = lookup_table(dictionary, symbols)
    sizes = {}
    total = sum(map(len, splits.values()))
    with tqdm(total=total, desc="binarize", unit="B", unit_scale=True, disable=None) as bar:
        for split, text in splits.items():
            prefix = str(folder / "bin" / split)
            tokens = write_split(prefix, text, table, newlines, dictionary.eos(), bar)
            sizes[split] = {"bytes": len(text), "tokens": tokens}
    # </s> is a symbol of the text where newlines are.
    return {"vocabulary": len(symbols) + (newlines == "eos"), "splits": sizes}
