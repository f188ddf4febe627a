"""Options and symbols of a model of other code; all problems are collected and reported at once."""

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
    """Options of the original code, from a JSON file; groups of them count as one.

    Args:
        path: the file.
        problems: the list that problems with the options are added to, a line each.

    ``readable`` says whether all options could be read. One that could not has some other value, so
    that tensors cannot be compared with it.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.readable = True
        self._label = f"--config {short(path)}"
        self._problems = problems
        if not path.is_file():
            raise ValueError(f"{self._label} is no file: name the model's options as JSON")
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self._label} is not JSON: {error}") from error
        if not isinstance(read, dict):
            raise ValueError(f"{self._label} has no options: it must be an object of JSON")
        self._values: dict[str, Any] = {}
        for name, value in read.items():
            for option, given in (value if isinstance(value, dict) else {name: value}).items():
                if isinstance(given, dict):
                    continue  # a group in a group is no option
                if json.dumps(self._values.get(option, given)) != json.dumps(given):
                    self.note(f"{option} occurs twice, with different values")
                self._values[option] = given
        self._unread = set(self._values)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Whole number of at least ``least``."""
        description = f"a whole number of at least {least}"
        return self._read(
            name, default, lambda x: type(x) is int and x >= least, description, least
        )

    def rate(self, name: str) -> float:
        """Rate of a dropout, 0 where there is none."""
        return self._read(
            name, 0.0, lambda x: type(x) in (int, float) and 0 <= x < 1, "a number in [0, 1)", 0.0
        )

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        return self._read(name, default, lambda x: isinstance(x, bool), "true or false", False)

    def numbers(self, name: str) -> list[int]:
        """List of rising whole numbers, which may be empty."""

        def fits(value: Any) -> bool:
            whole = isinstance(value, list) and all(type(x) is int and x > 0 for x in value)
            return whole and sorted(set(value)) == value

        return self._read(name, None, fits, "a list of rising numbers", [])

    def flags(self, name: str, length: int) -> list[bool]:
        """List of so many truth values."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and [type(flag) for flag in value] == [bool] * length

        description = f"a list of {length} times true or false"
        return self._read(name, None, fits, description, [False] * length)

    def expect(self, name: str, value: Any, why: str) -> None:
        """Note a problem where an option has another value than the only one that is known."""
        self._unread.discard(name)
        found = self._values.get(name, value)
        if found != value:
            self._problems.append(f"{name} is {json.dumps(found)} in {self._label}: {why}")

    def note(self, problem: str, readable: bool = True) -> None:
        """Note a problem with the options, and whether sizes are known nevertheless."""
        self._problems.append(f"{self._label}: {problem}")
        self.readable &= readable

    def name_of(self, *names: str) -> str:
        """The one of several names of an option that the file has, else the first."""
        return next((name for name in names if name in self._values), names[0])

    def unread(self) -> list[str]:
        """Names of the options that nobody has asked for."""
        return sorted(self._unread)

    def _read(
        self, name: str, default: Any, fits: Callable[[Any], bool], description: str, other: Any
    ) -> Any:
        self._unread.discard(name)
        value = self._values.get(name, default)
        if value is not None and fits(value):
            return value
        found = "missing" if value is None else json.dumps(value)
        self.note(f"{name} is {found}: it must be {description}", readable=False)
        return other


class ForeignVocabulary:
    """The symbols of a model in the order of its numbers, and how fairseq numbers them.

    fairseq's dictionaries begin with <s>, <pad>, </s> and <unk>. <eos> of the original becomes
    </s>, <unk> stays itself. Rows that the original does not have are made up: no such symbol is
    ever predicted, and evaluation refuses a text that has one.

    Args:
        path: a text file, a symbol a line, or the TensorFlow code's cache.pkl.
        problems: the list that problems with them are added to, a line each.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        label = f"--vocab {short(path)}"
        if not path.is_file():
            raise ValueError(f"{label} is no file: name the model's symbols, one a line")
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
        # the original's number for each of our symbols, None where it has no such symbol
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
    def lacks(self) -> list[str]:
        """Which of <eos> and <unk> the original does not have."""
        return [symbol for symbol in (EOS, UNK) if symbol not in self.symbols]

    @property
    def unit(self) -> str:
        """What the symbols look like: the numbers of bytes, characters, or else words."""
        symbols = set(self.symbols) - {EOS, UNK}
        if symbols <= {str(byte) for byte in range(256)}:
            return "bytes"
        return "characters" if all(len(symbol) == 1 for symbol in symbols) else "words"

    @property
    def added(self) -> int:
        """How many symbols fairseq has more."""
        return len(self._order) - len(self.symbols)

    def fits_first_band(self, size: int) -> bool:
        """Whether <eos> and <unk> are among the first ``size`` symbols."""
        return self._last_special < size

    def arrange(self, rows: Tensor, missing: float = 0.0) -> Tensor:
        """Rows (W, …) of the first W symbols as those of our first W + ``added`` ones.

        Symbols that the original does not have get ``missing``.
        """
        order = self._order[: len(rows) + self.added]
        known = torch.tensor([number is not None for number in order])
        arranged = rows.new_full((len(order), *rows.shape[1:]), missing)
        arranged[known] = rows[[number for number in order if number is not None]]
        return arranged
