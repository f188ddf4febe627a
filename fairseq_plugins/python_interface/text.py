"""Converts text to tokens of a dictionary and back, by fairseq's names of tokenizers and BPEs."""

import dataclasses
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe, build_tokenizer
from fairseq.registry import REGISTRIES
from torch import Tensor

from fairseq_plugins.python_interface.lines import LineCoder, Moses, Words, unit_lines
from fairseq_plugins.units import Units

# options that name a file of a BPE
FILES = {"bpe_codes", "sentencepiece_model"}
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
        symbols = self.lines.encode_text(text)
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
                "dict.txt, or count them as <unk> with load(…, allow_unknown=True); units that "
                "differ from the model's are chosen with load(…, bpe=…) or "
                'load(…, unit="characters"), "bytes" or "words"'
            )
        return tokens

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens (N,)."""
        return self.lines.decode_text(self.symbols(tokens))

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
    dictionaries: Iterable[Dictionary],
    normalize: bool = False,
) -> list[LineCoder]:
    """Return what converts lines to the symbols of each dictionary, of a source and a target.

    ``tokenizer`` and ``bpe`` are fairseq's names, with ``options`` for both. If both are None,
    ``units`` say what a symbol is. Moses makes punctuation uniform to ``normalize``.
    """
    bpe_step = _build_step("bpe", bpe, options)
    reads_blanks = bpe not in (None, "subword_nmt", "fastbpe")
    lines = []
    for dictionary, language in zip(dictionaries, ("source_lang", "target_lang"), strict=False):
        step = _build_step("tokenizer", tokenizer, options, language, normalize)
        lines.append(unit_lines(units, dictionary, step, bpe_step, reads_blanks))
    return lines


def _build_step(
    kind: str,
    name: str | None,
    options: dict[str, Any],
    language: str = "",
    normalize: bool = False,
) -> Any:
    """Return the tokenizer or BPE of this name; None if there is no name."""
    values = {**step_options(kind, name), **options}
    for option in FILES & step_options(kind, name).keys():
        if not Path(values[option]).is_file():
            raise ValueError(
                f"{kind} is {name!r} with {option} {options.get(option)}, which is not a file: "
                f"give {option}=FILE"
            )
    try:
        if name == "moses":
            hyphens, escape = not values["moses_no_dash_splits"], not values["moses_no_escape"]
            return Moses(values[language], normalize, hyphens, escape)
        build = build_tokenizer if kind == "tokenizer" else build_bpe
        return build(Namespace(**{kind: name}, **options))
    # libraries raise any exception, and one of them exits
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        files = ", ".join(f"{option} {value}" for option, value in options.items())
        raise ValueError(
            f"{kind} is {name!r} and cannot be built ({reason[:200]}): install its library, or "
            f"give other options{' than ' * bool(files)}{files}"
        ) from error
