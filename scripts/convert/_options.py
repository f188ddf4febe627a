"""Read options and symbols of a model of other code."""

import json
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from scripts._shared.commands import short
from scripts.convert._tensorflow import read_symbols

EOS, UNK = "<eos>", "<unk>"


class ForeignConfig:
    """Options of the original code from a JSON file, groups of options flattened.

    Each method raises ValueError for an option that is missing or has an unsupported value.
    """

    def __init__(self, path: Path) -> None:
        self.label = f"--config {short(path)}"
        if not path.is_file():
            raise ValueError(f"{self.label} is not a file: name the model's options as JSON")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.label} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.label} has no options: it must be a JSON object")
        self._values: dict[str, Any] = {}
        for name, value in content.items():
            self._values |= value if isinstance(value, dict) else {name: value}
        self._unused = set(self._values)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an option that is a whole number of at least ``minimum``."""
        value = self._take(name, default)
        fits = type(value) is int and value >= minimum
        return self._check(name, value, fits, f"a whole number of at least {minimum}")

    def rate(self, name: str) -> float:
        """Return a dropout rate; 0 if the option is missing."""
        value = self._take(name, 0.0)
        fits = type(value) in (int, float) and 0 <= value < 1
        return self._check(name, value, fits, "a number in [0, 1)")

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return an option that is true or false."""
        value = self._take(name, default)
        return self._check(name, value, isinstance(value, bool), "true or false")

    def numbers(self, name: str) -> list[int]:
        """Return an option that is a list of increasing whole numbers, which may be empty."""
        value = self._take(name, None)
        fits = isinstance(value, list) and all(type(x) is int and x > 0 for x in value)
        fits = fits and sorted(set(value)) == value
        return self._check(name, value, fits, "a list of increasing numbers")

    def flags(self, name: str, length: int) -> list[bool]:
        """Return an option that is a list of ``length`` truth values."""
        value = self._take(name, None)
        fits = isinstance(value, list) and [type(flag) for flag in value] == [bool] * length
        return self._check(name, value, fits, f"a list of {length} values, each true or false")

    def expect(self, name: str, value: Any, reason: str) -> None:
        """Refuse an option that differs from its only supported value."""
        actual = self._take(name, value)
        if actual != value:
            raise ValueError(f"{name} is {json.dumps(actual)} in {self.label}: {reason}")

    def first_name(self, *names: str) -> str:
        """Return the first of an option's names that the file has, else the first of all."""
        return next((name for name in names if name in self._values), names[0])

    def unused(self) -> list[str]:
        """Return the names of the options that were not used."""
        return sorted(self._unused)

    def _take(self, name: str, default: Any) -> Any:
        self._unused.discard(name)
        return self._values.get(name, default)

    def _check(self, name: str, value: Any, fits: bool, description: str) -> Any:
        if not fits:
            actual = "missing" if value is None else json.dumps(value)
            raise ValueError(f"{self.label}: {name} is {actual}: it must be {description}")
        return value


class ForeignVocabulary:
    """The symbols of a model in the order of its numbers, and their numbers in fairseq.

    fairseq's dictionaries begin with <s>, <pad>, </s> and <unk>. The original's <eos> becomes
    </s>, and <unk> stays <unk>. Symbols that the original lacks get made-up rows: they are never
    predicted, and evaluation refuses a text that has one.

    Args:
        path: a text file with one symbol per line, or the TensorFlow code's cache.pkl.
    """

    def __init__(self, path: Path) -> None:
        label = f"--vocab {short(path)}"
        if not path.is_file():
            raise ValueError(f"{label} is not a file: name the model's symbols, one per line")
        if path.suffix == ".pkl":
            self.symbols = read_symbols(path)
        else:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{label} is not UTF-8: {error}") from error
            self.symbols = text.removesuffix("\n").split("\n")
        self.dictionary = Dictionary()
        self._check_symbols(label)
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        special = (None, None, numbers.get(EOS), numbers.get(UNK))
        # the original's number of each of our symbols, None if it lacks the symbol
        self._order: list[int | None] = list(special)
        for number, symbol in enumerate(self.symbols):
            if symbol not in (EOS, UNK):
                self.dictionary.add_symbol(symbol)
                self._order.append(number)
        self._last_special = max((n for n in special if n is not None), default=0)

    def _check_symbols(self, label: str) -> None:
        """Raise ValueError for a symbol that fairseq would not read as this symbol."""
        seen: set[str] = set()
        reserved = {self.dictionary.bos_word, self.dictionary.pad_word, self.dictionary.eos_word}
        for line, symbol in enumerate(self.symbols, start=1):
            problem = ""
            if symbol.split() != [symbol]:
                problem = "is empty or has spaces"
            elif symbol in seen:
                problem = "occurs twice"
            elif symbol in reserved:
                problem = "is a special symbol of fairseq's"
            if problem:
                raise ValueError(
                    f"{label}, line {line}: {symbol!r} {problem}: give the symbols of the model, "
                    "one per line"
                )
            seen.add(symbol)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def missing(self) -> list[str]:
        """Those of <eos> and <unk> that the original lacks."""
        return [symbol for symbol in (EOS, UNK) if symbol not in self.symbols]

    @property
    def unit(self) -> str:
        """What the symbols seem to be: bytes (by their numbers), characters, or else words."""
        symbols = set(self.symbols) - {EOS, UNK}
        if symbols <= {str(byte) for byte in range(256)}:
            return "bytes"
        return "characters" if all(len(symbol) == 1 for symbol in symbols) else "words"

    @property
    def num_added(self) -> int:
        """Number of symbols that fairseq has in addition."""
        return len(self._order) - len(self.symbols)

    def fits_first_band(self, size: int) -> bool:
        """Return whether <eos> and <unk> are among the first ``size`` symbols."""
        return self._last_special < size

    def arrange(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Arrange rows (W, …) of the first W symbols for our first W + ``num_added`` symbols.

        Symbols that the original lacks get ``fill``.
        """
        order = self._order[: len(rows) + self.num_added]
        known = torch.tensor([number is not None for number in order])
        arranged = rows.new_full((len(order), *rows.shape[1:]), fill)
        arranged[known] = rows[[number for number in order if number is not None]]
        return arranged
