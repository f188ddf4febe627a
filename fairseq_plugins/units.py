"""What the symbols of data are, and the unit of their loss.

The commands that prepare data write the kind of symbol into units.json, beside dict.txt.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

UNITS = ("characters", "bytes", "words", "subwords")
BITS, PERPLEXITY = "bits per character", "perplexity"


class Units(NamedTuple):
    """The content of units.json.

    ``bpe`` and ``tokenizer`` are fairseq's names, ``model`` is the BPE's file, ``language`` selects
    the tokenizer's rules, and ``moses_no_dash_splits`` keeps words with hyphens whole. ``symbols``
    maps characters to the symbols that stand for them. ``split_punctuation`` makes each punctuation
    mark a word.
    """

    unit: str = "words"
    bpe: str | None = None
    model: Path | None = None
    tokenizer: str | None = None
    language: str | None = None
    moses_no_dash_splits: bool = False
    symbols: Mapping[str, str] = MappingProxyType({})
    split_punctuation: bool = False


def read_units(folder: Path) -> Units:
    """Read the units.json of a folder; without one, symbols are words."""
    path = folder / "units.json"
    if not path.is_file():
        return Units()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        settings = folder / "../preparation.json"
        # where older data have it
        if "split_punctuation" not in content and settings.is_file():
            settings = json.loads(settings.read_text(encoding="utf-8"))
            content["split_punctuation"] = settings.get("split-punctuation")
        units = Units(**{name: content[name] for name in Units._fields if content.get(name)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): prepare the data again") from error
    check_unit(units.unit, f"unit in {path}")
    return units._replace(model=folder / units.model) if units.model else units


def check_unit(unit: str, name: str = "unit") -> None:
    """Refuse a unit outside :data:`UNITS`."""
    if unit not in UNITS:
        raise ValueError(f"{name} is {unit!r}: there are {', '.join(UNITS)}")


def loss_unit(unit: str) -> str:
    """Return the usual unit of the loss for a kind of symbol."""
    return BITS if unit in ("characters", "bytes") else PERPLEXITY
