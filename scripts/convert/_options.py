"""Read options and symbols of a model of other code, and collect all problems with them."""

import json
from collections.abc import Callable
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

    Args:
        path: the file.
        problems: list to which problems with the options are added, one line each.

    ``readable`` tells whether all options could be read. Unreadable options have arbitrary values,
    so tensors cannot be checked against them.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.readable = True
        self._label = f"--config {short(path)}"
        self._problems = problems
        if not path.is_file():
            raise ValueError(f"{self._label} is not a file: name the model's options as JSON")
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self._label} is not JSON: {error}") from error
        if not isinstance(read, dict):
            raise ValueError(f"{self._label} has no options: it must be a JSON object")
        self._values: dict[str, Any] = {}
        for name, value in read.items():
            for option, given in (value if isinstance(value, dict) else {name: value}).items():
                if isinstance(given, dict):
                    continue  # a group in a group is not an option
                if json.dumps(self._values.get(option, given)) != json.dumps(given):
                    self.note(f"{option} occurs twice, with different values")
                self._values[option] = given
        self._unread = set(self._values)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an option that is a whole number of at least ``minimum``."""
        description = f"a whole number of at least {minimum}"
        return self._read(
            name, default, lambda x: type(x) is int and x >= minimum, description, minimum
        )

    def rate(self, name: str) -> float:
        """Return a dropout rate; 0 if the option is missing."""
        return self._read(
            name, 0.0, lambda x: type(x) in (int, float) and 0 <= x < 1, "a number in [0, 1)", 0.0
        )

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return an option that is true or false."""
        return self._read(name, default, lambda x: isinstance(x, bool), "true or false", False)

    def numbers(self, name: str) -> list[int]:
        """Return an option that is a list of increasing whole numbers, which may be empty."""

        def fits(value: Any) -> bool:
            whole = isinstance(value, list) and all(type(x) is int and x > 0 for x in value)
            return whole and sorted(set(value)) == value

        return self._read(name, None, fits, "a list of increasing numbers", [])

    def flags(self, name: str, length: int) -> list[bool]:
        """Return an option that is a list of ``length`` truth values."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and [type(flag) for flag in value] == [bool] * length

        description = f"a list of {length} values, each true or false"
        return self._read(name, None, fits, description, [False] * length)

    def expect(self, name: str, value: Any, why: str) -> None:
        """Note a problem if an option differs from its only supported value."""
        self._unread.discard(name)
        found = self._values.get(name, value)
        if found != value:
            self._problems.append(f"{name} is {json.dumps(found)} in {self._label}: {why}")

    def note(self, problem: str, readable: bool = True) -> None:
        """Note a problem with the options; ``readable``: whether all sizes are known anyway."""
        self._problems.append(f"{self._label}: {problem}")
        self.readable &= readable

    def name_of(self, *names: str) -> str:
        """Return the first of an option's names that the file has, else the first of all."""
        return next((name for name in names if name in self._values), names[0])

    def unread(self) -> list[str]:
        """Return the names of the options that were not used."""
        return sorted(self._unread)

    def _read(
        self, name: str, default: Any, fits: Callable[[Any], bool], description: str, fallback: Any
    ) -> Any:
        self._unread.discard(name)
        value = self._values.get(name, default)
        if value is not None and fits(value):
            return value
        found = "missing" if value is None else json.dumps(value)
        self.note(f"{name} is {found}: it must be {description}", readable=False)
        return fallback


class ForeignVocabulary:
    """The symbols of a model in the order of its numbers, and their numbers in fairseq.

    fairseq's dictionaries begin with <s>, <pad>, </s> and <unk>. The original's <eos> becomes
    </s>, and <unk> stays <unk>. Symbols that the original lacks get made-up rows: they are never
    predicted, and evaluation refuses a text that has one.

    Args:
        path: a text file with one symbol per line, or the TensorFlow code's cache.pkl.
        problems: list to which problems with the symbols are added, one line each.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
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
        self._find_problems(label, problems)
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        special = (None, None, numbers.get(EOS), numbers.get(UNK))
        # the original's number of each of our symbols, None if it lacks the symbol
        self._order: list[int | None] = list(special)
        for number, symbol in enumerate(self.symbols):
            if symbol not in (EOS, UNK):
                self.dictionary.add_symbol(symbol)
                self._order.append(number)
        self._last_special = max((n for n in special if n is not None), default=0)

    def _find_problems(self, label: str, problems: list[str]) -> None:
        seen: set[str] = set()
        reserved = {self.dictionary.bos_word, self.dictionary.pad_word, self.dictionary.eos_word}
        for line, symbol in enumerate(self.symbols, start=1):
            at = f"{label}, line {line}: {symbol!r}"
            if symbol.split() != [symbol]:
                problems.append(f"{at} is empty or has spaces")
            elif symbol in seen:
                problems.append(f"{at} occurs twice")
            elif symbol in reserved:
                problems.append(f"{at} is a special symbol of fairseq's")
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
