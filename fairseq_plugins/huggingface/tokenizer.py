"""The dictionary and the units of a model's data as a tokenizer of Hugging Face's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from fairseq_plugins.python_interface.lines import BLANK, Bytes, Characters, Moses, Words
from fairseq_plugins.units import Units, read_units

# the model of subword units in a folder, as its units.json names it
SUBWORDS = "subwords.model"
EOS = "</s>"


class DictionaryTokenizer(PreTrainedTokenizer):
    """Text as the symbols of dict.txt, split as units.json says; a newline is ``</s>``.

    A text begins with ``<s>``. Unlike ``fairseq_plugins.load``, it reads symbols that the
    dictionary lacks as ``<unk>``.
    """

    vocab_files_names: ClassVar[dict[str, str]] = {
        "vocab_file": "dict.txt",
        "units_file": "units.json",
        "subwords_file": SUBWORDS,
    }
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str,
        units_file: str | None = None,
        subwords_file: str | None = None,
        **options: Any,
    ) -> None:
        self.files = [Path(file) for file in (vocab_file, units_file, subwords_file) if file]
        self.symbols = read_symbols(Path(vocab_file))
        self.ids = {symbol: number for number, symbol in enumerate(self.symbols)}
        units = read_units(Path(units_file).parent) if units_file else Units()
        self.lines = build_lines(units, subwords_file, BLANK in self.ids)
        special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": EOS, "unk_token": "<unk>"}
        # symbols such as </s> in a text are text
        settings = {"split_special_tokens": True, "special_tokens_pattern": "bos"}
        super().__init__(**{**options, **special, **settings})

    @property
    def vocab_size(self) -> int:
        """Return the number of symbols."""
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        """Return the index of each symbol."""
        return dict(self.ids)

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        if not isinstance(self.lines, Bytes):
            text = text.replace("\r\n", "\n")
        first, *others = map(self.lines.encode, text.split("\n"))
        return first + [symbol for line in others for symbol in (EOS, *line)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, self.ids["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of symbols."""
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == EOS:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(map(self.lines.decode, lines))

    def _decode(
        self, token_ids: int | list[int], skip_special_tokens: bool = False, **unused: Any
    ) -> str:
        """Return the text; a newline is part of it, and so ``</s>`` is not skipped."""
        numbers = [token_ids] if isinstance(token_ids, int) else token_ids
        skipped = {self.bos_token_id, self.pad_token_id} if skip_special_tokens else set()
        tokens = [self.symbols[number] for number in numbers if number not in skipped]
        return self.convert_tokens_to_string(tokens)

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Copy the files to a folder; return their paths."""
        targets = [Path(save_directory) / file.name for file in self.files]
        for file, target in zip(self.files, targets, strict=True):
            if file.resolve() != target.resolve():
                shutil.copyfile(file, target)
        return tuple(map(str, targets))


def read_symbols(path: Path) -> list[str]:
    """Return the symbols of a dict.txt of fairseq's, in the order of their indices."""
    symbols = ["<s>", "<pad>", EOS, "<unk>"]
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            symbol, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
            if not count.isdecimal():
                raise ValueError(f"{path} has a line {line!r}: each must be a symbol and its count")
            symbols.append(symbol)
    return symbols


def build_lines(units: Units, subwords: str | None, has_blank: bool) -> Any:
    """Return an object that converts a line to symbols and back, as ``fairseq_plugins.load`` does.

    ``subwords`` is the file of codes or pieces; ``has_blank`` says that ▁ stands for the space in a
    dictionary of characters, and not _.
    """
    if units.unit == "bytes":
        return Bytes()
    if units.unit == "characters":
        return Characters(units.symbols or {" ": BLANK if has_blank else "_"})
    tokenizer, bpe = None, None
    if units.tokenizer:
        tokenizer = Moses(units.language or "en", hyphens=not units.moses_no_dash_splits)
    if units.bpe:
        if units.bpe not in _BPES or subwords is None:
            raise ValueError(
                f"the data has units of {units.bpe} with the model {subwords}: only those of "
                f"{' and '.join(_BPES)} can be converted, with their model"
            )
        bpe = _BPES[units.bpe](subwords)
    return Words(tokenizer, bpe, units.split_punctuation, units.bpe == "sentencepiece")


class _Codes:
    """Units of words by codes of subword-nmt."""

    def __init__(self, file: str) -> None:
        from subword_nmt.apply_bpe import BPE

        with open(file, encoding="utf-8") as codes:
            self.encode = BPE(codes).process_line

    def decode(self, line: str) -> str:
        return f"{line} ".replace("@@ ", "").rstrip()


class _Pieces:
    """Pieces of raw text by a model of sentencepiece."""

    def __init__(self, file: str) -> None:
        from sentencepiece import SentencePieceProcessor

        self.sp = SentencePieceProcessor(model_file=file)

    def encode(self, line: str) -> str:
        return " ".join(self.sp.encode(line, out_type=str))


_BPES = {"subword_nmt": _Codes, "sentencepiece": _Pieces}
