"""Bytes straight to fairseq's binarized format, each byte a token.

Newlines in one of two conventions, whose bits per character do not compare:
drop    they are left away, as in the Transformer-XL code
eos     each is one </s>, as in the adaptive-span and all-attention code; a split that ends within
        a line gets a </s> there too, as those and fairseq-preprocess do
"""

import argparse
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

from scripts._shared.commands import short
from scripts.prepare._binarize import counted_dictionary, load_srcdict
from scripts.prepare._lines import progress
from scripts.prepare._published import SPLITS, DataSet
from scripts.prepare._sources import read_members

NEWLINE = 10
# Bytes that are worked on at once, so that what is made of them stays in the processor's cache.
PIECE = 2**18
# fairseq's own tasks copy a whole item each time they touch it: text without lines is cut.
ITEM = 4096


def check_newlines(convention: str | None) -> None:
    """Raise ValueError when --newlines is none of the two conventions."""
    if convention not in ("drop", "eos"):
        given = "is missing" if convention is None else f"{convention} is unknown"
        raise ValueError(
            f"--newlines {given}: give 'drop' to leave newlines away, as the Transformer-XL code "
            "does, or 'eos' to make each one </s>, as the adaptive-span and all-attention code "
            "does; bits per character of the two do not compare"
        )


def read_text(data_set: "CharacterDataSet", source: Path) -> dict[str, np.ndarray]:
    """Bytes of each split; raises ValueError when the text is not as long as they are together."""
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


def find_dictionary(
    symbols: Mapping[int, str], counts: np.ndarray, srcdict: Path | None
) -> Dictionary:
    """Dictionary of srcdict, or of the symbols of all splits by falling number in training, (256,).

    The originals count all splits; a symbol that fairseq-preprocess would not know comes last.
    Raises ValueError when srcdict lacks a symbol.
    """
    if srcdict is None:
        return counted_dictionary({symbol: int(counts[byte]) for byte, symbol in symbols.items()})
    dictionary = load_srcdict(srcdict)
    missing = [symbol for symbol in symbols.values() if symbol not in dictionary]
    if missing:
        raise ValueError(
            f"--srcdict {short(srcdict)} lacks {len(missing)} of the text's {len(symbols)} "
            f"symbols, such as {', '.join(map(repr, missing[:5]))}: give a dictionary of this data "
            "set, or leave the option away for a new one"
        )
    return dictionary


def write_split(prefix: str, text: np.ndarray, table: np.ndarray, newlines: str | None) -> int:
    """Write PREFIX.bin and PREFIX.idx with the token of each byte in table, (256,).

    Returns the number of tokens.
    """
    tokens = 0
    with open(data_file_path(prefix), "wb") as file:
        for piece in pieces(text):
            kept = piece[piece != NEWLINE] if newlines == "drop" else piece
            table.take(kept).tofile(file)
            tokens += len(kept)
        if newlines == "eos" and text[-1] != NEWLINE:
            table[NEWLINE : NEWLINE + 1].tofile(file)
            tokens += 1
    # An item is a line with its </s> where newlines have one, else any piece.
    ends = np.flatnonzero(text == NEWLINE) + 1 if newlines == "eos" else np.arange(0, tokens, ITEM)
    lengths = np.diff(ends, prepend=0, append=tokens)
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), table.dtype.type) as index:
        index.write(lengths[lengths > 0].tolist())
    return tokens


@dataclass(frozen=True)
class CharacterDataSet(DataSet):
    """A data set that is one text, split by position.

    Args:
        member: name of the file with the text.
        sizes: number of bytes of each split, in the order of the text.
        symbol: name of a byte in dict.txt.
        eos_recipe: recipe for newlines as </s>; None for a text without newlines.
    """

    member: str
    sizes: Mapping[str, int]
    symbol: Callable[[int], str]
    eos_recipe: str | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """Name of the file with the text."""
        return (self.member,)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add --newlines if the text has them."""
        if self.eos_recipe:
            parser.add_argument(
                "--newlines",
                metavar="{drop,eos}",
                help="required: leave newlines away, or make each one </s>",
            )

    def own_settings(self, options: argparse.Namespace) -> dict[str, str]:
        """The convention of newlines if the text has them; raises as check_newlines."""
        if not self.eos_recipe:
            return {}
        check_newlines(options.newlines)
        return {"newlines": options.newlines}

    def recipe_of(self, description: Mapping) -> str:
        """Recipe for the convention of newlines in a corpus."""
        return self.eos_recipe if description.get("newlines") == "eos" else self.recipe

    def build(self, source: Path, folder: Path, options: argparse.Namespace) -> dict:
        """As every data set; raises ValueError when the symbols are not those expected."""
        newlines = options.newlines if self.eos_recipe else None
        splits = read_text(self, source)
        counts = {
            split: sum(np.bincount(piece, minlength=256) for piece in pieces(text))
            for split, text in splits.items()
        }
        found = np.flatnonzero(sum(counts.values())).tolist()
        self.check_vocabulary(len(found))
        symbols = {byte: self.symbol(byte) for byte in found if byte != NEWLINE or not newlines}
        dictionary = find_dictionary(symbols, counts["train"], options.srcdict)
        dictionary.save(str(folder / "bin" / "dict.txt"))
        # Newlines are </s>.
        table = np.full(256, dictionary.eos(), dtype=best_fitting_int_dtype(len(dictionary)))
        for byte, symbol in symbols.items():
            table[byte] = dictionary.index(symbol)
        sizes = {}
        with progress(total=sum(map(len, splits.values())), desc="binarize", unit="B") as bar:
            for split, text in splits.items():
                tokens = write_split(str(folder / "bin" / split), text, table, newlines)
                sizes[split] = {"bytes": len(text), "tokens": tokens}
                bar.update(len(text))
        # </s> is a symbol of the text where newlines are.
        return {"vocabulary": len(symbols) + (newlines == "eos"), "splits": sizes}
