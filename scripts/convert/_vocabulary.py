"""Vocabularies of other code as fairseq dictionaries, and tensors in their order.

fairseq's dictionaries begin with <s>, <pad>, </s> and <unk>. <eos> of the original becomes </s>,
<unk> stays itself. Rows that the original does not have are made up: no such symbol is ever
predicted, and evaluation refuses a text that has one.
"""

from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch import Tensor

from scripts._shared.commands import short

EOS, UNK = "<eos>", "<unk>"


class ForeignVocabulary:
    """The symbols of a model in the order of its numbers, and how fairseq numbers them.

    Args:
        path: a text file, a symbol a line.
        problems: takes what is wrong with them, a line each.

    Raises ValueError when there is no such text.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        label = f"--vocab {short(path)}"
        if not path.is_file():
            raise ValueError(f"{label} is no file: name the model's symbols, one a line")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{label} is not UTF-8: {error}") from error
        self.symbols = text.removesuffix("\n").split("\n")
        self.dictionary = Dictionary()
        self._find_problems(label, problems)
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        special = (None, None, numbers.get(EOS), numbers.get(UNK))
        # of each of our symbols the original's number, None for those that it does not have
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
            if symbol.split() != [symbol]:
                problems.append(f"{label}, line {line}: {symbol!r} is empty or has spaces")
            elif symbol in seen:
                problems.append(f"{label}, line {line}: {symbol!r} occurs twice")
            elif symbol in reserved:
                problems.append(
                    f"{label}, line {line}: {symbol!r} is a special symbol of fairseq's"
                )
            seen.add(symbol)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def lacks(self) -> list[str]:
        """Which of <eos> and <unk> the original does not have."""
        return [symbol for symbol in (EOS, UNK) if symbol not in self.symbols]

    @property
    def added(self) -> int:
        """How many symbols fairseq has more."""
        return len(self._order) - len(self.symbols)

    def fits_first_band(self, size: int) -> bool:
        """Whether fairseq's special symbols are all among the first ``size`` of the original."""
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
