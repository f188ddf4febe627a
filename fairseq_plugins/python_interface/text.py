"""Converts text to symbols of a dictionary and back: Moses and BPE, characters, bytes or words."""

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe, build_tokenizer
from fairseq.registry import REGISTRIES
from fairseq.tokenizer import tokenize_line
from omegaconf import MISSING
from torch import Tensor

from fairseq_plugins.segment_language_model.evaluation import Units

# symbols that may stand for a blank in texts of characters, if units.json does not name one
_BLANKS = ("▁", "_")
# how many unknown symbols an error lists
_LISTED = 5


class Words:
    """A line as whitespace-separated words, after fairseq's tokenizer and BPE, if given."""

    def __init__(self, tokenizer: Any = None, bpe: Any = None) -> None:
        self.tokenizer = tokenizer
        self.bpe = bpe

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        for step in (self.tokenizer, self.bpe):
            line = line if step is None else step.encode(line)
        return tokenize_line(line)

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        line = " ".join(symbols)
        for step in (self.bpe, self.tokenizer):
            line = line if step is None else step.decode(line)
        return line


class Pieces(Words):
    """A line as pieces of sentencepiece, which keeps blanks at both ends."""

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        line = self.bpe.sp.decode(symbols)
        return line if self.tokenizer is None else self.tokenizer.decode(line)


class Characters:
    """A line as its characters; ``symbols`` maps some to other symbols of the dictionary."""

    def __init__(self, symbols: Mapping[str, str]) -> None:
        self.symbols = symbols
        self.characters = {symbol: character for character, symbol in symbols.items()}

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        return [self.symbols.get(character, character) for character in line]

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        return "".join(self.characters.get(symbol, symbol) for symbol in symbols)


class Bytes:
    """A line as the numbers of its bytes in UTF-8."""

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        return [str(byte) for byte in line.encode()]

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols; invalid bytes become �."""
        numbers = bytes(int(symbol) for symbol in symbols if symbol.isdecimal())
        return numbers.decode(errors="replace")


class TextCoder:
    """Converts text to tokens and back; a newline is ``</s>``.

    ``lines`` converts a line to symbols and back. With ``allow_unknown``, symbols that the
    dictionary lacks are read as ``<unk>`` instead of being refused.
    """

    def __init__(
        self, dictionary: Dictionary, lines: Any = None, allow_unknown: bool = False
    ) -> None:
        self.dictionary = dictionary
        self.lines = Words() if lines is None else lines
        self.allow_unknown = allow_unknown

    def encode(self, text: str, name: str = "the text", empty: bool = False) -> Tensor:
        """Return the tokens (N,) of a text, which may be ``empty``; errors call it ``name``."""
        if not isinstance(text, str):
            raise ValueError(f"{name} is {text!r}: it must be a string")
        first, *others = (self.lines.encode(line) for line in text.split("\n"))
        eos = self.dictionary.eos_word
        symbols = first + [symbol for line in others for symbol in (eos, *line)]
        if not symbols and not empty:
            raise ValueError(f"{name} is empty: give one with at least one symbol")
        tokens = torch.tensor([self.dictionary.index(symbol) for symbol in symbols]).long()
        if tokens.eq(self.dictionary.pad()).any():
            raise ValueError(f"{name} has <pad>, which fairseq takes for padding: take it out")
        unknown_symbols = {symbols[i] for i in tokens.eq(self.dictionary.unk()).nonzero().view(-1)}
        unknown = sorted(unknown_symbols - {self.dictionary.unk_word})
        if unknown and not self.allow_unknown:
            listed = ", ".join(map(repr, unknown[:_LISTED])) + ", …" * (len(unknown) > _LISTED)
            raise ValueError(
                f"{name} has symbols that the dictionary lacks ({listed}): write it in symbols of "
                "dict.txt, or count them as <unk> with load(…, allow_unknown=True)"
                f"{self._suggest_units()}"
            )
        return tokens

    def _suggest_units(self) -> str:
        if not isinstance(self.lines, Words) or self.lines.bpe is not None:
            return ""
        return (
            "; for a model with BPE give load(…, bpe=…), for one of characters or bytes "
            'load(…, unit="characters") or "bytes"'
        )

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens (N,)."""
        lines: list[list[str]] = [[]]
        for token in tokens.tolist():
            if token == self.dictionary.eos():
                lines.append([])
            else:
                lines[-1].append(self.dictionary[token])
        return "\n".join(map(self.lines.decode, lines))

    def symbols(self, tokens: Tensor) -> list[str]:
        """Return the symbols of tokens (N,)."""
        return [self.dictionary[token] for token in tokens.tolist()]


def step_options(kind: str, name: str | None) -> dict[str, Any]:
    """Return the options, with defaults, of fairseq's "tokenizer" or "bpe" of this name."""
    registry = REGISTRIES[kind]
    if name is None:
        return {}
    if name not in registry["registry"]:
        names = ", ".join(sorted(registry["registry"]))
        raise ValueError(f"{kind} is {name!r}: there are {names}")
    dataclass = registry["dataclass_registry"].get(name)
    fields = () if dataclass is None else dataclasses.fields(dataclass)
    return {field.name: field.default for field in fields if not field.name.startswith("_")}


def build_lines(
    tokenizer: str | None,
    bpe: str | None,
    options: dict[str, Any],
    units: Units,
    dictionary: Dictionary,
) -> Any:
    """Return an object that converts a line to symbols and back.

    ``tokenizer`` and ``bpe`` are fairseq's names, with ``options`` for both. If both are None,
    ``units`` say what a symbol is.
    """
    if tokenizer is None and bpe is None:
        if units.unit == "bytes":
            return Bytes()
        if units.unit == "characters":
            blank = next((blank for blank in _BLANKS if blank in dictionary), _BLANKS[0])
            return Characters(units.symbols or {" ": blank})
        return Words()
    built = []
    for kind, name, build in (("tokenizer", tokenizer, build_tokenizer), ("bpe", bpe, build_bpe)):
        for option, default in step_options(kind, name).items():
            if default == MISSING and option not in options:
                raise ValueError(f"{kind} is {name!r} without {option}: give {option}=FILE")
            file = options.get(option, default)
            if option in ("bpe_codes", "sentencepiece_model") and not Path(file).is_file():
                raise ValueError(f"{option} is {file}, which is not a file: name another")
        try:
            built.append(build(Namespace(**{kind: name}, **options)))
        # libraries raise any exception, and one of them exits
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            files = ", ".join(f"{option} {value}" for option, value in options.items())
            raise ValueError(
                f"{kind} is {name!r} and cannot be built ({reason[:200]}): install its library, or "
                f"give other options{' than ' * bool(files)}{files}"
            ) from error
    return (Pieces if hasattr(built[1], "sp") else Words)(*built)
