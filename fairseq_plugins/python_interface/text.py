"""Converts text to tokens of a dictionary and back, by fairseq's names of tokenizers and BPEs."""

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe, build_tokenizer
from fairseq.registry import REGISTRIES
from omegaconf import MISSING
from torch import Tensor

from fairseq_plugins.python_interface.lines import (
    BLANK,
    Bytes,
    Characters,
    LineCoder,
    Moses,
    Words,
)
from fairseq_plugins.units import Units

# symbols that may stand for a blank in texts of characters, if units.json does not name one
_BLANKS = (BLANK, "_")
# how many unknown symbols an error lists
_LISTED = 5


class TextCoder:
    """Converts text to tokens and back; a newline is ``</s>``.

    ``lines`` converts a line to symbols and back. With ``allow_unknown``, symbols that the
    dictionary lacks are read as ``<unk>`` instead of being refused.
    """

    def __init__(
        self, dictionary: Dictionary, lines: LineCoder | None = None, allow_unknown: bool = False
    ) -> None:
        self.dictionary = dictionary
        self.lines: LineCoder = Words() if lines is None else lines
        self.allow_unknown = allow_unknown

    def encode(self, text: str, name: str = "the text", empty: bool = False) -> Tensor:
        """Return the tokens (N,) of a text, which may be ``empty``; errors call it ``name``."""
        if not isinstance(text, str):
            raise ValueError(f"{name} is {text!r}: it must be a string")
        if not isinstance(self.lines, Bytes):
            text = text.replace("\r\n", "\n")  # which preparation takes for a line end, too
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
    language: str = "source_lang",
    normalize: bool = False,
) -> LineCoder:
    """Return an object that converts a line to symbols and back.

    ``tokenizer`` and ``bpe`` are fairseq's names, with ``options`` for both. If both are None,
    ``units`` say what a symbol is. ``language`` is the option with the language for Moses, which
    makes punctuation uniform to ``normalize``.
    """
    if tokenizer is None and bpe is None:
        if units.unit == "bytes":
            return Bytes()
        if units.unit == "characters":
            blank = next((blank for blank in _BLANKS if blank in dictionary), _BLANKS[0])
            return Characters(units.symbols or {" ": blank})
        return Words(punctuation=units.split_punctuation)
    built: list[Any] = []
    for kind, name, build in (("tokenizer", tokenizer, build_tokenizer), ("bpe", bpe, build_bpe)):
        values = {**step_options(kind, name), **options}
        for option, default in step_options(kind, name).items():
            if default == MISSING and option not in options:
                raise ValueError(f"{kind} is {name!r} without {option}: give {option}=FILE")
            file = values[option]
            if option in ("bpe_codes", "sentencepiece_model") and not Path(file).is_file():
                raise ValueError(f"{option} is {file}, which is not a file: name another")
        try:
            if name == "moses":
                hyphens, escape = not values["moses_no_dash_splits"], not values["moses_no_escape"]
                built.append(Moses(values[language], normalize, hyphens, escape))
            else:
                built.append(build(Namespace(**{kind: name}, **options)))
        # libraries raise any exception, and one of them exits
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            files = ", ".join(f"{option} {value}" for option, value in options.items())
            raise ValueError(
                f"{kind} is {name!r} and cannot be built ({reason[:200]}): install its library, or "
                f"give other options{' than ' * bool(files)}{files}"
            ) from error
    reads_blanks = bpe not in (None, "subword_nmt", "fastbpe")
    return Words(*built, punctuation=units.split_punctuation, reads_blanks=reads_blanks)
