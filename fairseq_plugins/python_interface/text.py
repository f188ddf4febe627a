"""Text as the symbols of a dictionary, and back: by Moses and BPE, characters, bytes or words.

Tokenizers and BPE are fairseq's own, and need the libraries that they need (sacremoses,
subword-nmt, fastBPE, sentencepiece) only where they are asked for.
"""

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe, build_tokenizer
from fairseq.registry import REGISTRIES
from fairseq.tokenizer import tokenize_line
from torch import Tensor

from fairseq_plugins.segment_language_model.generation import is_characters, own_symbols

# what prepared texts of characters have for a blank
_BLANKS = ("▁", "_")
# unknown symbols that an error lists
_LISTED = 5


class Words:
    """A line as words between blanks, after fairseq's tokenizer and BPE where there are any.

    Args:
        tokenizer: fairseq's, such as that of Moses, or None.
        bpe: fairseq's, such as that of subword-nmt, or None.
    """

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
    """A line as pieces of sentencepiece, whose blanks at both ends are kept."""

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        line = self.bpe.sp.decode(symbols)
        return line if self.tokenizer is None else self.tokenizer.decode(line)


class Characters:
    """A line as its characters, with a symbol of its own for the blank.

    Args:
        blank: that symbol.
    """

    def __init__(self, blank: str) -> None:
        self.blank = blank

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        return list(line.replace(" ", self.blank))

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        return "".join(symbols).replace(self.blank, " ")


class Bytes:
    """A line as the numbers of its bytes in UTF-8."""

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        return [str(byte) for byte in line.encode()]

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols; what is no text becomes �."""
        numbers = bytes(int(symbol) for symbol in symbols if symbol.isdecimal())
        return numbers.decode(errors="replace")


class TextCoder:
    """Text as tokens: its lines one after another, a newline as ``</s>``.

    Args:
        dictionary: the symbols.
        lines: makes symbols of a line, and a line of symbols.
        allow_unknown: take symbols that the dictionary lacks for ``<unk>``, and not refuse them.
    """

    def __init__(
        self, dictionary: Dictionary, lines: Any = None, allow_unknown: bool = False
    ) -> None:
        self.dictionary = dictionary
        self.lines = _lines_of(dictionary) if lines is None else lines
        self.allow_unknown = allow_unknown

    def encode(self, text: str, name: str = "the text") -> Tensor:
        """Return the tokens of a text, (N,).

        Args:
            text: the text; only where it has a newline is there a ``</s>``.
            name: what errors call it.

        Raises:
            ValueError: it has none, or one that is unknown, or ``<pad>``.
        """
        if not isinstance(text, str):
            raise ValueError(f"{name} is {text!r}: it must be a string")
        first, *others = (self.lines.encode(line) for line in text.split("\n"))
        eos = self.dictionary.eos_word
        symbols = first + [symbol for line in others for symbol in (eos, *line)]
        if not symbols:
            raise ValueError(f"{name} is empty: give one with at least one symbol")
        tokens = torch.tensor([self.dictionary.index(symbol) for symbol in symbols])
        if tokens.eq(self.dictionary.pad()).any():
            raise ValueError(f"{name} has <pad>, which is no text to fairseq: take it out")
        unknown = {symbols[i] for i in tokens.eq(self.dictionary.unk()).nonzero().view(-1)}
        unknown = sorted(unknown - {self.dictionary.unk_word})
        if unknown and not self.allow_unknown:
            listed = ", ".join(map(repr, unknown[:_LISTED])) + ", …" * (len(unknown) > _LISTED)
            raise ValueError(
                f"{name} has symbols that the dictionary lacks ({listed}): write it "
                "in symbols of dict.txt, name the bpe that makes them, or give allow_unknown=True "
                "to count them as <unk>"
            )
        return tokens

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


def _lines_of(dictionary: Dictionary) -> Any:
    """Return what suits a dictionary: characters or bytes where its symbols are such, or words."""
    if not is_characters(dictionary):
        return Words()
    if all(len(symbol) == 1 for symbol in own_symbols(dictionary)):
        return Characters(next((blank for blank in _BLANKS if blank in dictionary), _BLANKS[0]))
    return Bytes()


def step_options(kind: str, name: str | None) -> set[str]:
    """Return the names of the options of a step, such as ``bpe_codes``.

    Args:
        kind: "tokenizer" or "bpe".
        name: fairseq's name of the step; None for none.

    Raises:
        ValueError: there is no such step.
    """
    registry = REGISTRIES[kind]
    if name is None:
        return set()
    if name not in registry["registry"]:
        there = ", ".join(sorted(registry["registry"]))
        raise ValueError(f"{kind} is {name!r}: there are {there}")
    dataclass = registry["dataclass_registry"].get(name)
    fields = () if dataclass is None else dataclasses.fields(dataclass)
    return {field.name for field in fields if not field.name.startswith("_")}


def build_lines(tokenizer: str | None, bpe: str | None, options: dict[str, Any]) -> Words | None:
    """Return fairseq's tokenizer and BPE as one step; None for neither.

    Args:
        tokenizer: fairseq's name, such as ``moses``.
        bpe: fairseq's name, such as ``subword_nmt``, ``fastbpe`` or ``sentencepiece``.
        options: of both, by their names.

    Raises:
        ValueError: an option is missing, names no file, or its library is not installed.
    """
    if tokenizer is None and bpe is None:
        return None
    built = []
    for kind, name, build in (("tokenizer", tokenizer, build_tokenizer), ("bpe", bpe, build_bpe)):
        for option in step_options(kind, name) & {"bpe_codes", "sentencepiece_model"}:
            if option not in options:
                raise ValueError(f"{kind} is {name!r} without {option}: give {option}=FILE")
            if not Path(options[option]).is_file():
                raise ValueError(f"{option} is {options[option]}, which is no file: name another")
        try:
            built.append(build(Namespace(**{kind: name}, **options)))
        except ImportError as error:
            raise ValueError(f"{kind} is {name!r}: {error}") from error
    return (Pieces if hasattr(built[1], "sp") else Words)(*built)
