"""Dictionaries of fairseq: of counted symbols, or read from the file of --srcdict."""

from collections.abc import Mapping
from pathlib import Path

from fairseq.data import Dictionary

from scripts._shared.commands import short


def counted_dictionary(counts: Mapping[str, int], threshold: int = 0) -> Dictionary:
    """Dictionary of the symbols seen at least threshold times, the most frequent first."""
    dictionary = Dictionary()
    for symbol, count in counts.items():
        dictionary.add_symbol(symbol, count)
    # With fairseq's default factor of 8 the dictionary would get made-up symbols.
    dictionary.finalize(threshold=threshold, padding_factor=1)
    return dictionary


def load_srcdict(path: Path) -> Dictionary:
    """Dictionary of the file that --srcdict names.

    Raises ValueError when it is no dictionary of fairseq.
    """
    try:
        return Dictionary.load(str(path))
    # fairseq raises plain exceptions for another encoding or a symbol that is there twice.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--srcdict {short(path)} is no dictionary of fairseq ({reason}): "
            "give the dict.txt of the model, a symbol and its count on each line"
        ) from error
