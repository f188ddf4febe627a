"""Words between blanks to fairseq's binarized format, each line ended by </s>.

fairseq-preprocess does it. Beside its files stands units.json, which says what a symbol is:

unit        bytes (by their numbers), characters, words or subwords
bpe         what makes subwords: subword_nmt or sentencepiece, else null
model       its codes or model, relative to the folder of units.json, else null
tokenizer   moses where it made the words, else null; language: the code of its rules
symbols     characters that are written in another way, such as a blank, each with its symbol
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.commands import child_process, format_command, program, short
from scripts._shared.files import write_json

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# What separates words in Python's text but not in its bytes, such as the no-break space.
OTHER_BLANK = re.compile(r"[^\S \t\n\r\v\f]")
# Written for such a blank within a word, where fairseq would cut the word.
VISIBLE_BLANK = "\u2423"
# With fairseq's default factor of 8 a dictionary that it counts would get made-up symbols.
NO_MADE_UP_SYMBOLS = ("--padding-factor", "1")
# Tokens that are compared at once.
SCANNED = 2**24


def write_units(
    folder: Path,
    unit: str,
    bpe: str | None = None,
    model: str | None = None,
    language: str | None = None,
    symbols: Mapping[str, str] = {},
    hyphens: bool = False,
) -> None:
    """Write units.json; with Moses' language and hyphens (True: split) where it made the words."""
    tokenizer = "moses" if language else None
    content = {"unit": unit, "bpe": bpe, "model": model, "tokenizer": tokenizer}
    content |= {"language": language, "moses_no_dash_splits": bool(language) and not hyphens}
    write_json(folder / "units.json", {**content, "symbols": dict(symbols)})


def load_srcdict(path: Path) -> "Dictionary":
    """Dictionary of the file that --srcdict names; raises ValueError for another file."""
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(path))
    # fairseq raises plain exceptions for another encoding or a symbol that is there twice.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--srcdict {short(path)} is no dictionary of fairseq ({reason}): "
            "give the dict.txt of the model, a symbol and its count on each line"
        ) from error


def mend_offsets(prefix: str) -> dict[str, int]:
    """Write the index of a split anew from its lengths; return its lines, tokens and <unk>.

    With numpy 2 fairseq adds the lengths of parts that it merged in 32 bits: the offsets of a
    split beyond 2 GiB would be wrong.
    """
    import numpy as np
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path

    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lengths, dtype = index.sizes.tolist(), index.dtype
    # It is a memory map of the file that is written next.
    del index
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), dtype) as writer:
        writer.write(lengths)
    data = np.memmap(data_file_path(prefix), dtype=dtype, mode="r")
    # of every dictionary
    unknown = Dictionary().unk()
    pieces = (data[first : first + SCANNED] for first in range(0, len(data), SCANNED))
    found = sum(int((piece == unknown).sum()) for piece in pieces)
    return {"lines": len(lengths), "tokens": sum(lengths), "unknown": found}


def preprocess(
    texts: Mapping[str, Path],
    target: Path,
    workers: int,
    options: Iterable[str] = NO_MADE_UP_SYMBOLS,
    languages: tuple[str, str] | None = None,
) -> dict[str, dict[str, int]]:
    """Print and run fairseq-preprocess; return lines, tokens and <unk> of each split.

    Args:
        texts: of train, valid, test, test1 and so on; with languages, what its two texts have
            before ``.LANGUAGE``, and splits are called ``SPLIT.SOURCE-TARGET.LANGUAGE``.
        target: its folder. Its log lies beside it until it succeeds.
        workers: processes that work at once.
        options: further words, which name the dictionary.
        languages: source and target; None for texts in one language.
    """
    command, splits = [program("fairseq-preprocess")], list(texts)
    if languages:
        pair = "-".join(languages)
        command += ["--source-lang", languages[0], "--target-lang", languages[1]]
        splits = [f"{split}.{pair}.{language}" for split in texts for language in languages]
    else:
        command.append("--only-source")
    for split, names in groupby(texts, lambda name: name.rstrip("0123456789")):
        command += [f"--{split}pref", ",".join(short(texts[name]) for name in names)]
    # fairseq binarizes the first part of a text after the others.
    processes = workers + 1 if workers > 1 else 1
    command += ["--destdir", short(target), *options, "--workers", str(processes)]
    print(f"$ {format_command(command)}", flush=True)
    log = target.parent / "preprocess.log"
    with child_process(command, log):
        pass
    log.unlink()
    sizes = {split: mend_offsets(str(target / split)) for split in splits}
    for split, size in sizes.items():
        share = size["unknown"] / max(1, size["tokens"])
        print(f"{split}: {size['tokens']:,} tokens, {share:.2%} of them <unk>", flush=True)
    return sizes
