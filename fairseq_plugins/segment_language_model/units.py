"""What a symbol of a dictionary is: a character, a byte by its number, a word or a part of one.

Commands that prepare data write it into units.json beside dict.txt. Without that file symbols are
words.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

UNITS = ("characters", "bytes", "words", "subwords")
BITS, PERPLEXITY = "bits per character", "perplexity"


class Units(NamedTuple):
    """What units.json says.

    Attributes:
        unit: one of :data:`UNITS`.
        bpe: fairseq's name of what makes subwords, such as ``sentencepiece``; None for nothing.
        model: the file of its codes or model.
        tokenizer: fairseq's name of what makes words, such as ``moses``; None for blanks.
        language: of the tokenizer's rules.
        symbols: characters with another symbol, such as the blank.
    """

    unit: str = "words"
    bpe: str | None = None
    model: Path | None = None
    tokenizer: str | None = None
    language: str | None = None
    symbols: Mapping[str, str] = MappingProxyType({})


def read_units(folder: Path) -> Units:
    """Return what the units.json of a folder says; words where there is none."""
    path = folder / "units.json"
    if not path.is_file():
        return Units()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        units = Units(**{name: found[name] for name in Units._fields if found.get(name)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): prepare the data again") from error
    check_unit(units.unit, f"unit in {path}")
    return units._replace(model=folder / units.model) if units.model else units


def check_unit(unit: str, name: str = "unit") -> None:
    """Refuse a unit that is not in :data:`UNITS`."""
    if unit not in UNITS:
        raise ValueError(f"{name} is {unit!r}: there are {', '.join(UNITS)}")


def loss_unit(unit: str) -> str:
    """Return the usual unit of a text's loss."""
    return BITS if unit in ("characters", "bytes") else PERPLEXITY
