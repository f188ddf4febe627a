"""A published text that is read byte by byte, and split by position."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.command_line import exit_status
from scripts._shared.commands import short
from scripts.prepare._binarize import check_vocabulary, load_srcdict, write_units
from scripts.prepare._downloads import Archive, data_set_parser
from scripts.prepare._stages import SPLITS, Stages, file_digest

if TYPE_CHECKING:
    import numpy as np
    from fairseq.data import Dictionary

NEWLINE = 10
# Tokens per item of a text without lines: fairseq's own tasks copy a whole item at each access.
ITEM = 4096


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


def binarize(data_set: Characters, options: argparse.Namespace, folder: Path) -> dict:
    """Binarize the text into a folder; return the vocabulary size and the splits' sizes."""
    import numpy as np
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    raw = folder / "raw"
    raw.mkdir()
    (archive,) = data_set.archives
    text = np.fromfile(archive.unpack(options, raw)[0], dtype=np.uint8)
    shutil.rmtree(raw)
    parts = np.split(text, np.cumsum(data_set.sizes)[:-1])
    counts = [count_bytes(part) for part in parts]
    used = np.flatnonzero(sum(counts)).tolist()
    check_vocabulary(len(used), data_set.vocabulary)
    symbols = {}
    for byte in used:
        if byte != NEWLINE or not options.newlines:
            names = data_set.symbols
            symbols[byte] = str(byte) if names is None else names.get(chr(byte), chr(byte))
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
    unit = "characters" if data_set.symbols else "bytes"
    write_units(folder, unit, symbols=data_set.symbols or {})
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


def prepare(data_set: Characters, name: str, options: argparse.Namespace) -> None:
    """Make the --output folder, unless it is complete already."""
    settings = {"data_set": name, "newlines": options.newlines}
    stages = Stages(options.output, {**settings, "srcdict": file_digest(options.srcdict)})
    stages.finish(stages.run("bin", binarize, data_set, options))


def run(data_set: Characters, description: str, arguments: list[str] | None = None) -> int:
    """Run the command of a data set, given its module's docstring; return the exit status."""
    parser = data_set_parser(description, data_set.archives)
    parser.set_defaults(newlines=None)
    if data_set.has_newlines:
        text = "drop newlines, as the Transformer-XL code does, or make each one </s>"
        parser.add_argument("--newlines", choices=("drop", "eos"), required=True, help=text)
    options, name = parser.parse_args(arguments), description.partition(",")[0]
    return exit_status(lambda: prepare(data_set, name, options), output=options.output)
