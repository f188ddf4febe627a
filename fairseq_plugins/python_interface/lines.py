"""Text as symbols, and symbols as text: for preparation, loaded models and Hugging Face alike.

Plain Python, so that the processes of a preparation need not import torch and fairseq.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any

from fairseq_plugins.units import Units

# stands for a space among characters
BLANK = "\u2581"
# fairseq's symbol of a newline
EOS = "</s>"
_CODE = re.compile("<U[+]([0-9A-F]{4,6})>")
_PUNCTUATION = re.compile(r"[^\w\s]|_")


class LineCoder(ABC):
    """Converts a line to symbols and back, and a text, in which a newline is ``</s>``."""

    # preparation takes a carriage return for a part of the line end
    line_end = "\r?\n"

    @abstractmethod
    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""

    @abstractmethod
    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""

    def encode_text(self, text: str) -> list[str]:
        """Return the symbols of a text."""
        first, *others = map(self.encode, re.split(self.line_end, text))
        return first + [symbol for line in others for symbol in (EOS, *line)]

    def decode_text(self, symbols: list[str]) -> str:
        """Return the text of some symbols."""
        lines: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == EOS:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(map(self.decode, lines))


class Moses:
    """Moses' rules of a language.

    ``normalize`` makes punctuation uniform first, ``hyphens`` splits words at hyphens into ``@-@``,
    and ``escape`` writes ``&`` as ``&amp;`` and so on.
    """

    def __init__(
        self, language: str, normalize: bool = False, hyphens: bool = False, escape: bool = True
    ) -> None:
        from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

        self._normalizer = MosesPunctNormalizer(lang=language) if normalize else None
        self._tokenizer, self._detokenizer = MosesTokenizer(language), MosesDetokenizer(language)
        self._options = {"aggressive_dash_splits": hyphens, "return_str": True, "escape": escape}

    def encode(self, line: str) -> str:
        """Return the tokens of a line, with single spaces between them."""
        line = self._normalizer.normalize(line) if self._normalizer else line
        return self._tokenizer.tokenize(line, **self._options)

    def decode(self, line: str) -> str:
        """Return the line of tokens."""
        return self._detokenizer.detokenize(line.split())


class Words(LineCoder):
    """A line as words between blanks of any kind, or of a tokenizer, each split by a BPE, if given.

    ``punctuation`` makes each punctuation mark a word. A BPE that ``reads_blanks``, such as
    sentencepiece, gets the line as it is.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        bpe: Any = None,
        punctuation: bool = False,
        reads_blanks: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.bpe = bpe
        self.punctuation = punctuation
        self.reads_blanks = reads_blanks

    def words(self, line: str) -> str:
        """Return the words of a line, with single spaces between them."""
        if self.punctuation:
            line = _PUNCTUATION.sub(r" \g<0> ", line)
        line = self.tokenizer.encode(line) if self.tokenizer else line
        return line if self.reads_blanks else " ".join(line.split())

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        words = self.words(line)
        return (self.bpe.encode(words) if self.bpe else words).split()

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        line = " ".join(symbols)
        if hasattr(self.bpe, "sp"):
            line = self.bpe.sp.decode(symbols)  # keeps the blanks at both ends
        elif self.bpe:
            line = self.bpe.decode(line)
        return self.tokenizer.decode(line) if self.tokenizer else line


class Characters(LineCoder):
    """A line as its characters; ``symbols`` maps some to other symbols of the dictionary.

    Other whitespace, and a character that stands for another one, have symbols such as <U+00A0>.
    """

    def __init__(self, symbols: Mapping[str, str] = {" ": BLANK}) -> None:
        taken = {symbol: _code(symbol) for symbol in symbols.values() if len(symbol) == 1}
        self.symbols = {**taken, **symbols}
        self.characters = {symbol: character for character, symbol in self.symbols.items()}

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        symbols = self.symbols
        return [symbols.get(one) or (_code(one) if one.isspace() else one) for one in line]

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""
        line = "".join(self.characters.get(symbol, symbol) for symbol in symbols)
        return _CODE.sub(lambda code: chr(int(code[1], 16)), line)


def _code(character: str) -> str:
    return f"<U+{ord(character):04X}>"


class Bytes(LineCoder):
    """A line as the numbers of its bytes in UTF-8."""

    line_end = "\n"

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        return [str(byte) for byte in line.encode()]

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols; invalid bytes become �."""
        numbers = bytes(int(symbol) for symbol in symbols if symbol.isdecimal())
        return numbers.decode(errors="replace")


def space_symbol(symbols: Container[str]) -> str:
    """Return the symbol of a space among characters: published dictionaries have ``_``."""
    return "_" if "_" in symbols and BLANK not in symbols else BLANK


def unit_lines(
    units: Units,
    symbols: Container[str],
    tokenizer: Any = None,
    bpe: Any = None,
    reads_blanks: bool = False,
) -> LineCoder:
    """Return what converts lines to ``symbols``, those of a dictionary, and back.

    Without a tokenizer and a BPE, ``units`` say what a symbol is.
    """
    split = tokenizer is not None or bpe is not None
    if units.unit == "bytes" and not split:
        return Bytes()
    if units.unit == "characters" and not split:
        return Characters(units.symbols or {" ": space_symbol(symbols)})
    return Words(tokenizer, bpe, units.split_punctuation, reads_blanks)
