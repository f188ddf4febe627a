"""Split raw text into pieces of sentencepiece, which keep every character and blank but U+2581.

U+2581 becomes a space. Whitespace other than the space, which fairseq would take for a separator,
and characters that the training part lacks become bytes such as ``<0xE2>``, so that no text has an
unknown symbol.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts._shared.files import write_text
from scripts.prepare._lines import SPECIAL, LineMapper, read_lines, write_lines
from scripts.prepare._stages import SPLITS

MODEL = "sentencepiece.model"
# Pieces are learned from about this many characters at most, of lines at regular intervals.
LEARNING_CHARACTERS = 12_000_000
_OTHER_BLANKS = re.compile(r"[^\S ]")
# preserve every character and all whitespace; fairseq adds its own <s> and </s>
LOSSLESS: dict[str, Any] = {
    "model_type": "bpe",
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "bos_id": -1,
    "eos_id": -1,
    # with more threads the pieces would differ
    "num_threads": 1,
    "minloglevel": 2,
}


def learn_pieces(lines: Iterable[str], number: int, option: str, **options: Any) -> bytes:
    """Return a model of sentencepiece with a number of pieces, which an option of ours gave."""
    import sentencepiece

    learned, characters = io.BytesIO(), 0

    def counted() -> Iterable[str]:
        nonlocal characters
        for line in lines:
            characters += len(line)
            yield line

    try:
        sentencepiece.SentencePieceTrainer.train(
            # not from files, whose names would be in the model
            sentence_iterator=iter(counted()),
            model_writer=learned,
            vocab_size=number,
            **{**LOSSLESS, **options},
        )
    except RuntimeError as error:
        raise ValueError(
            f"--{option} is {number}: sentencepiece cannot learn so many units from "
            f"{characters:,} characters ({error}): give another number"
        ) from error
    return learned.getvalue()


def piece_units(model: Path) -> LineMapper:
    """Return a function from lines to lines of their pieces, separated by single spaces."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    return lambda lines: [" ".join(pieces) for pieces in processor.encode(lines, out_type=str)]


def make_pieces(texts: Path, number: int, workers: int, target: Path) -> None:
    """Learn pieces from ``texts``/train.txt; write the texts as pieces, the model, and dict.txt."""
    import sentencepiece

    training = texts / "train.txt"
    size = sum(len(line) for line in read_lines(training))
    step = max(1, -(-size // LEARNING_CHARACTERS))
    lines = (line for place, line in enumerate(read_lines(training)) if place % step == 0)
    # sentencepiece leaves out longer lines, 4,192 bytes by default
    options = {"byte_fallback": True, "max_sentence_length": 2**30}
    shown = (_OTHER_BLANKS.sub(" ", line) for line in lines)
    model = target / MODEL
    model.write_bytes(learn_pieces(shown, number, "pieces", **options))
    for split in SPLITS:
        write_lines(
            read_lines(texts / f"{split}.txt"), target / f"{split}.txt", workers, piece_units, model
        )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    if special := [symbol for symbol in SPECIAL if symbol in pieces]:
        raise ValueError(
            f"{special[0]} is a special symbol of fairseq, and so frequent in the text that it "
            f"became a piece: write it in another way, such as [{special[0].strip('<>')}]"
        )
    counts: Counter[str] = Counter()
    for line in read_lines(target / "train.txt"):
        counts.update(line.split(" "))
    # all pieces, even those that are only parts of others in training: held-out text may have them
    pieces = [piece for piece in pieces if piece != "<unk>"]
    pieces.sort(key=lambda piece: -counts[piece])
    write_text(target / "dict.txt", "".join(f"{piece} {counts[piece]}\n" for piece in pieces))
