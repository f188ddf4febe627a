"""Binarize whitespace-separated text with fairseq-preprocess; each line ends with </s>.

The file units.json beside the binarized files describes the symbols:

unit        bytes (by their numbers), characters, words or subwords
bpe         the tool that makes subwords: subword_nmt or sentencepiece, else null
model       path of its codes or model, relative to the folder of units.json, else null
tokenizer   moses if it made the words, else null; language: code of the language of its rules;
            moses_no_dash_splits: true if it keeps words with hyphens whole
symbols     symbols of characters that are not written as themselves, such as the space
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.commands import format_command, program, run_child, short
from scripts._shared.files import write_json

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# Whitespace for str.split() but not for bytes.split(), such as the no-break space.
OTHER_WHITESPACE = re.compile(r"[^\S \t\n\r\v\f]")
# Replaces such whitespace within a word, since fairseq would split the word there.
VISIBLE_SPACE = "\u2423"
# With its default padding factor of 8, fairseq would add made-up symbols to a new dictionary.
NO_MADE_UP_SYMBOLS = ("--padding-factor", "1")
# Tokens compared at once.
TOKENS_AT_ONCE = 2**24


def write_units(
    folder: Path,
    unit: str,
    bpe: str | None = None,
    model: str | None = None,
    language: str | None = None,
    symbols: Mapping[str, str] = {},
    hyphens: bool = False,
) -> None:
    """Write units.json; give Moses' language and hyphens (True: split) if it made the words."""
    tokenizer = "moses" if language else None
    content = {"unit": unit, "bpe": bpe, "model": model, "tokenizer": tokenizer}
    content |= {"language": language, "moses_no_dash_splits": bool(language) and not hyphens}
    write_json(folder / "units.json", {**content, "symbols": dict(symbols)})


def load_srcdict(path: Path) -> "Dictionary":
    """Return the dictionary in the --srcdict file; raise ValueError for any other file."""
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(path))
    # fairseq raises plain Exceptions for another encoding or a duplicate symbol
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--srcdict {short(path)} is not a dictionary of fairseq ({reason}): "
            "give the dict.txt of the model, with a symbol and its count on each line"
        ) from error


def check_vocabulary(size: int, published: int) -> None:
    """Raise ValueError if the number of symbols of a text is not the published one."""
    if size != published:
        raise ValueError(
            f"the text has a vocabulary of {size:,} symbols, the published one has "
            f"{published:,}: results would not compare with published ones; get the data again, or "
            "give --srcdict for another dictionary of words"
        )


def rewrite_index(prefix: str) -> dict[str, int]:
    """Rewrite the index of a split from its lengths; return its number of lines, tokens and <unk>.

    With numpy 2, fairseq adds up the lengths of merged parts in 32 bits, so offsets beyond 2 GiB
    would be wrong.
    """
    import numpy as np
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path

    index = MMapIndexedDataset.Index(index_file_path(prefix))
    lengths, dtype = index.sizes.tolist(), index.dtype
    # release the memory map: the file is rewritten next
    del index
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), dtype) as writer:
        writer.write(lengths)
    data = np.memmap(data_file_path(prefix), dtype=dtype, mode="r")
    # <unk> has the same index in every dictionary
    unknown = Dictionary().unk()
    pieces = (data[first : first + TOKENS_AT_ONCE] for first in range(0, len(data), TOKENS_AT_ONCE))
    count = sum(int((piece == unknown).sum()) for piece in pieces)
    return {"lines": len(lengths), "tokens": sum(lengths), "unknown": count}


def preprocess(
    texts: Mapping[str, Path],
    target: Path,
    workers: int,
    options: Iterable[str] = NO_MADE_UP_SYMBOLS,
    languages: tuple[str, str] | None = None,
) -> dict[str, dict[str, int]]:
    """Print and run fairseq-preprocess; return the number of lines, tokens and <unk> by split.

    Args:
        texts: files of train, valid, test, test1 and so on; with languages, the files' names
            without ``.LANGUAGE``, and the splits are called ``SPLIT.SOURCE-TARGET.LANGUAGE``.
        target: folder to write. The log lies beside it until the command succeeds.
        workers: number of parallel processes.
        options: further options, which define the dictionary.
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
    # fairseq starts one process fewer than --workers; it binarizes the first part itself afterwards
    processes = workers + 1 if workers > 1 else 1
    command += ["--destdir", short(target), *options, "--workers", str(processes)]
    print(f"$ {format_command(command)}", flush=True)
    log = target.parent / "preprocess.log"
    run_child(command, log)
    log.unlink()
    sizes = {split: rewrite_index(str(target / split)) for split in splits}
    for split, size in sizes.items():
        share = size["unknown"] / max(1, size["tokens"])
        print(f"{split}: {size['tokens']:,} tokens, {share:.2%} of them <unk>", flush=True)
    return sizes
