"""A line of text as symbols, and symbols as a line: for preparation and for loaded models alike.

Plain Python, so that the processes of a preparation need not import torch and fairseq.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

# stands for a space among characters
BLANK = "\u2581"
_CODE = re.compile("<U[+]([0-9A-F]{4,6})>")
_PUNCTUATION = re.compile(r"[^\w\s]|_")


class LineCoder(Protocol):
    """Converts a line to symbols and back."""

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols."""


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


class Words:
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


class Characters:
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


class Bytes:
    """A line as the numbers of its bytes in UTF-8."""

    def encode(self, line: str) -> list[str]:
        """Return the symbols of a line."""
        return [str(byte) for byte in line.encode()]

    def decode(self, symbols: list[str]) -> str:
        """Return the line of some symbols; invalid bytes become �."""
        numbers = bytes(int(symbol) for symbol in symbols if symbol.isdecimal())
        return numbers.decode(errors="replace")
