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
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


class ForeignConfig:
    """Options of the original code from a JSON file, groups of options flattened.

    ``unused`` has the names of the options that nothing has asked for.
    """

    def __init__(self, path: Path) -> None:
        self.label = f"--config {short(path)}"
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            message = f"{self.label} does not hold options as a JSON object: {error}"
            raise ValueError(message) from error
        self.values: dict[str, Any] = {}
        for name, value in content.items():
            self.values |= value if isinstance(value, dict) else {name: value}
        self.unused = set(self.values)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return an option; raise ValueError if it is missing or not of this type."""
        self.unused.discard(name)
        value = self.values.get(name, default)
        if type(value) is not kind and (kind, type(value)) != (float, int):
            actual = "missing" if value is None else json.dumps(value)
            raise ValueError(f"{self.label}: {name} is {actual}: it must be {_KINDS[kind]}")
        return value

    def expect(self, name: str, value: Any, reason: str) -> None:
        """Refuse an option that differs from its only supported value."""
        self.unused.discard(name)
        actual = self.values.get(name, value)
        if actual != value:
            raise ValueError(f"{name} is {json.dumps(actual)} in {self.label}: {reason}")


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
        if path.suffix == ".pkl":
            self.symbols = read_symbols(path)
        else:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{label} cannot be read as text: {error}") from error
            self.symbols = text.removesuffix("\n").split("\n")
        self.dictionary = Dictionary()
        reserved = {self.dictionary.bos_word, self.dictionary.pad_word, self.dictionary.eos_word}
        numbers: dict[str, int] = {}
        for number, symbol in enumerate(self.symbols):
            if symbol.split() != [symbol] or symbol in reserved or symbol in numbers:
                raise ValueError(
                    f"{label}, line {number + 1}: {symbol!r} is empty, has spaces, occurs twice or "
                    "is fairseq's: give the symbols of the model, one per line"
                )
            numbers[symbol] = number
            if symbol not in (EOS, UNK):
                self.dictionary.add_symbol(symbol)
        # the original's number of each of our symbols, None if it lacks the symbol
        self._order = [None, None, numbers.pop(EOS, None), numbers.pop(UNK, None)]
        self._order += numbers.values()

    def __len__(self) -> int:
        return len(self.symbols)

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

    def arrange(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Arrange rows (W, …) of the first W symbols for our first W + ``num_added`` symbols.

        Symbols that the original lacks get ``fill``.
        """
        order = self._order[: len(rows) + self.num_added]
        numbers = [number for number in order if number is not None]
        if max(numbers) >= len(rows):
            raise ValueError(
                f"--vocab: {EOS} and {UNK} must be among the first {len(rows)} symbols, the first "
                "of the cutoffs: give the --vocab of this model"
            )
        known = torch.tensor([number is not None for number in order])
        arranged = rows.new_full((len(order), *rows.shape[1:]), fill)
        arranged[known] = rows[numbers]
        return arranged
