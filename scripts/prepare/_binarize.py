"""Step 5: binarize texts of symbols with fairseq-preprocess, or bytes; count what is in them.

The file units.json beside the binarized files describes the symbols:

unit        bytes (by their numbers), characters, words or subwords
bpe         the tool that makes subwords: subword_nmt or sentencepiece, else null
model       path of its codes or model, relative to the folder of units.json, else null
tokenizer   moses if it made the words, else null; language: code of the language of its rules;
            moses_no_dash_splits: true if it keeps words with hyphens whole
symbols     symbols of characters that are not written as themselves, such as the space
split_punctuation   true if each punctuation mark is a word
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.commands import format_command, program, run_child, short
from scripts._shared.files import write_json
from scripts.prepare._clean import CLEANED
from scripts.prepare._corpora import Corpus
from scripts.prepare._lines import folder_progress, read_lines
from scripts.prepare._split import Parts
from scripts.prepare._symbols import MODEL, text_characters

if TYPE_CHECKING:
    import numpy as np
    from fairseq.data import Dictionary

# With its default padding factor of 8, fairseq would add made-up symbols to a new dictionary.
NO_MADE_UP_SYMBOLS = ("--padding-factor", "1")
# Tokens compared at once.
TOKENS_AT_ONCE = 2**24
NEWLINE = 10
# Tokens per item of a text without lines: fairseq's own tasks copy a whole item at each access.
ITEM = 4096
# The share of <unk> above which they matter for a loss.
MANY_UNKNOWN = 0.01


def write_units(
    folder: Path,
    unit: str,
    bpe: str | None = None,
    model: str | None = None,
    language: str | None = None,
    symbols: Mapping[str, str] = {},
    hyphens: bool = False,
    split_punctuation: bool = False,
) -> None:
    """Write units.json; give Moses' language and hyphens (True: split) if it made the words."""
    tokenizer = "moses" if language else None
    content = {"unit": unit, "bpe": bpe, "model": model, "tokenizer": tokenizer}
    content |= {"language": language, "moses_no_dash_splits": bool(language) and not hyphens}
    content["split_punctuation"] = split_punctuation
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
    with folder_progress(target):
        run_child(command, log)
    log.unlink()
    sizes = {split: rewrite_index(str(target / split)) for split in splits}
    for split, size in sizes.items():
        share = size["unknown"] / max(1, size["tokens"])
        print(f"{split}: {size['tokens']:,} tokens, {share:.2%} of them <unk>", flush=True)
    return sizes


def warn_of_unseen(sizes: Mapping[str, Mapping[str, int]], foreign: bool) -> None:
    """Warn if <unk> is frequent in a foreign dictionary, or hardly seen in training."""
    shares = {name: size["unknown"] / max(1, size["tokens"]) for name, size in sizes.items()}
    for split, share in shares.items():
        if share > MANY_UNKNOWN and foreign:
            print(
                f"warning: {share:.1%} of the tokens of {split} are <unk>: the dictionary of "
                "--srcdict lacks them. Give the options with which the dictionary was made",
                flush=True,
            )
        elif share > MANY_UNKNOWN and shares["train"] < share / 10:
            print(
                f"warning: {share:.1%} of the tokens of {split} are <unk>, but only "
                f"{shares['train']:.2%} in training: a model hardly learns to predict it, and its "
                "loss is mostly theirs. Give --threshold 2, so that words seen once in training "
                "become <unk>, or --unit subwords",
                flush=True,
            )


def binarize_text(
    corpus: Corpus, parts: Parts, options: argparse.Namespace, folder: Path
) -> tuple[int, dict[str, dict[str, int]]]:
    """Write FOLDER/bin for texts in one language; return the number of symbols and the sizes."""
    target, threshold = folder / "bin", options.threshold
    if threshold is None:
        threshold = corpus.get("threshold", 0) if options.unit == "words" else 0
    texts, unit, bpe, model = folder / "tokens", options.unit, None, None
    dictionary_options = [*NO_MADE_UP_SYMBOLS, "--thresholdsrc", str(threshold)]
    if options.srcdict:
        dictionary_options = ["--srcdict", short(options.srcdict)]
    if unit == "subwords":
        texts, bpe, model = folder / "bpe", "subword_nmt", "../bpe/codes"
    elif unit == "sentencepiece":
        texts, unit, bpe, model = folder / "pieces", "subwords", unit, f"../pieces/{MODEL}"
        dictionary_options = ["--srcdict", short(texts / "dict.txt")]
    paths = {part: texts / f"{part}.txt" for part in parts}
    sizes = preprocess(paths, target, options.workers, dictionary_options)
    dictionary = [line.split()[0] for line in read_lines(target / "dict.txt")]
    symbols = {}
    if unit == "characters":
        characters = text_characters(options)
        space, encode = characters.symbols[" "], characters.encode
        known = {space, *dictionary}
        blanks = (*filter(str.isspace, map(chr, range(sys.maxunicode))), space)
        symbols = {blank: name for blank in blanks for name in encode(blank) if name in known}
    unknown = sum(size["unknown"] for size in sizes.values())
    if bpe == "sentencepiece" and unknown:
        raise ValueError(
            f"{unknown} tokens are <unk>, from characters that the pieces lack: use a Python that "
            "has the whole library, or give more packages"
        )
    if "vocabulary" in corpus and unit == "words" and not (options.srcdict or options.moses):
        check_vocabulary(len(dictionary) + corpus.get("unlisted", 2), corpus["vocabulary"])
    punctuation = bool(options.split_punctuation)
    write_units(target, unit, bpe, model, options.moses, symbols, split_punctuation=punctuation)
    warn_of_unseen(sizes, options.srcdict is not None)
    return len(dictionary), sizes


def binarize_pairs(
    parts: Parts, options: argparse.Namespace, folder: Path
) -> tuple[int, dict[str, dict[str, int]]]:
    """Write FOLDER/bin for both languages; return the number of symbols and the sizes."""
    languages = options.source_lang, options.target_lang
    texts = {part: folder / ("clean" if part in CLEANED else "bpe") / part for part in parts}
    joined = (*NO_MADE_UP_SYMBOLS, "--joined-dictionary")
    sizes = preprocess(texts, folder / "bin", options.workers, joined, languages)
    bpe = ("subword_nmt", "../bpe/codes")
    write_units(folder / "bin", "subwords", *bpe, languages[0], hyphens=options.aggressive_hyphens)
    symbols = sum(1 for _ in read_lines(folder / "bin" / f"dict.{languages[0]}.txt"))
    return symbols, sizes


def binarize_bytes(
    corpus: Corpus, parts: Parts, options: argparse.Namespace, folder: Path
) -> tuple[int, dict[str, dict[str, int]]]:
    """Write FOLDER/bin for texts whose bytes are tokens; return the vocabulary and the sizes.

    There are two conventions for newlines, whose bits per character are not comparable:
    drop    remove them, as in the Transformer-XL code
    eos     replace each by </s>, as in the adaptive-span and all-attention code; a split that ends
            within a line gets a </s> there, too, as in these and with fairseq-preprocess
    """
    import numpy as np
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    target, names = folder / "bin", corpus.get("symbols")
    target.mkdir()
    print("binarize bytes", flush=True)
    texts = {part: np.fromfile(sides["txt"][0].path, np.uint8) for part, sides in parts.items()}
    counts = {part: np.bincount(text, minlength=256) for part, text in texts.items()}
    used = np.flatnonzero(sum(counts.values())).tolist()
    check_vocabulary(len(used), corpus["vocabulary"])
    symbols = {}
    for byte in used:
        if byte != NEWLINE or not options.newlines:
            symbols[byte] = names.get(chr(byte), chr(byte)) if names else str(byte)
    # the original codes count all splits; here a symbol that training lacks comes last
    dictionary = make_dictionary(
        {symbol: int(counts["train"][byte]) for byte, symbol in symbols.items()}, options.srcdict
    )
    dictionary.save(str(target / "dict.txt"))
    # newlines have no symbol of their own
    table = np.full(256, dictionary.eos(), dtype=best_fitting_int_dtype(len(dictionary)))
    for byte, symbol in symbols.items():
        table[byte] = dictionary.index(symbol)
    sizes = {}
    for part, text in texts.items():
        tokens = write_byte_tokens(str(target / part), text, table, options.newlines)
        sizes[part] = {"bytes": len(text), "tokens": tokens, "unknown": 0}
    write_units(target, "characters" if names else "bytes", symbols=names or {})
    # with --newlines eos, </s> is a symbol of the text
    return len(symbols) + (options.newlines == "eos"), sizes


def make_dictionary(counts: Mapping[str, int], srcdict: Path | None) -> "Dictionary":
    """Load srcdict, which must have all symbols, or make a dictionary of them sorted by count."""
    from fairseq.data import Dictionary

    if srcdict is None:
        dictionary = Dictionary()
        for symbol, count in counts.items():
            dictionary.add_symbol(symbol, count)
        dictionary.finalize(padding_factor=1)
        return dictionary
    dictionary = load_srcdict(srcdict)
    if missing := [symbol for symbol in counts if symbol not in dictionary]:
        raise ValueError(
            f"--srcdict {short(srcdict)} lacks {len(missing)} of the text's {len(counts)} "
            f"symbols, such as {', '.join(map(repr, missing[:5]))}: give a dictionary of this "
            "data set, or leave the option out for a new one"
        )
    return dictionary


def write_byte_tokens(
    prefix: str, text: "np.ndarray", table: "np.ndarray", newlines: str | None
) -> int:
    """Write PREFIX.bin and PREFIX.idx: the tokens of bytes (N,), looked up in table (256,).

    Returns the number of tokens.
    """
    import numpy as np
    from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path

    if newlines == "eos" and text[-1] != NEWLINE:
        text = np.append(text, np.uint8(NEWLINE))
    if newlines == "drop":
        text = text[text != NEWLINE]
    table[text].tofile(data_file_path(prefix))
    # with --newlines eos an item is a line with its </s>, otherwise a piece of ITEM tokens
    ends = np.arange(ITEM, len(text), ITEM)
    if newlines == "eos":
        ends = np.flatnonzero(text[:-1] == NEWLINE) + 1
    with MMapIndexedDataset.Index.writer(index_file_path(prefix), table.dtype.type) as index:
        index.write(np.diff(ends, prepend=0, append=len(text)).tolist())
    return len(text)
