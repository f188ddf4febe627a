"""The dictionary and the units of a model's data as a tokenizer of Hugging Face's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from fairseq_plugins.python_interface.lines import EOS, Moses, unit_lines
from fairseq_plugins.units import Units, read_units

# the model of subword units in a folder, as its units.json names it
SUBWORDS = "subwords.model"


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
        moses = None
        if units.tokenizer:
            moses = Moses(units.language or "en", hyphens=not units.moses_no_dash_splits)
        bpe = _build_bpe(units.bpe, subwords_file) if units.bpe else None
        self.lines = unit_lines(units, self.ids, moses, bpe, units.bpe == "sentencepiece")
        special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": EOS, "unk_token": "<unk>"}
        # symbols such as </s> in a text are text
        settings = {"split_special_tokens": True, "special_tokens_pattern": "bos"}
        super().__init__(**{**options, **special, **settings})

    @property
    def vocab_size(self) -> int:
        """Return the number of symbols."""
        return len(self.symbols)

    @property
    def all_special_ids(self) -> list[int]:
        """Return what ``skip_special_tokens`` skips: not ``</s>``, a newline, and not ``<unk>``."""
        return [self.bos_token_id, self.pad_token_id]

    def get_vocab(self) -> dict[str, int]:
        """Return the index of each symbol."""
        return dict(self.ids)

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return self.lines.encode_text(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, self.ids["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of symbols."""
        return self.lines.decode_text(tokens)

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
    with path.open(encoding="utf-8") as lines:
        entries = [line.rstrip().removesuffix(" #fairseq:overwrite") for line in lines]
    return ["<s>", "<pad>", EOS, "<unk>", *(entry.rpartition(" ")[0] for entry in entries)]


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


def _build_bpe(name: str, file: str | None) -> Any:
    if name not in _BPES or file is None:
        raise ValueError(
            f"the data has units of {name} with the model {file}: only those of "
            f"{' and '.join(_BPES)} can be converted, with their model"
        )
    return _BPES[name](file)
