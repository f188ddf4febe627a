"""Text of your own, binarized for fairseq: words, characters, or two kinds of subword units.

    python -m scripts.prepare.text --input TEXT --unit subwords --moses en --output DATA

TEXT is one text, whose last --held-out lines are for testing and those before them for validation;
a folder with one document per file, of which --held-out are drawn for each of these parts; or a
folder with train.txt, valid.txt and test.txt. Files are UTF-8 and may be compressed (.gz). Lines,
even empty ones, keep their order; each line ends with </s>, and an empty line is a lone </s>. An
empty line separates documents of a folder. Windows line ends and a byte-order mark are left out.

--unit characters   characters; the space becomes U+2581, other whitespace a symbol such as <U+00A0>
--unit words        words between whitespace of any kind, or Moses tokens with --moses LANGUAGE
--unit subwords     units of these words, by codes that are learned on the training part
--unit sentencepiece  pieces of raw text, learned on the training part, which keep every blank

OUTPUT/tokens, OUTPUT/bpe     {train,valid,test}.txt as words or characters, as units; bpe/codes
OUTPUT/pieces                 {train,valid,test}.txt as pieces; sentencepiece.model
OUTPUT/bin                    dict.txt, {train,valid,test}.{bin,idx}; units.json about the symbols
OUTPUT/preparation.json       options and sizes, to convert perplexities per unit to those per word

Finished stages are not repeated; after a change of options the command says what to remove.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fairseq_plugins.python_interface.lines import BLANK, Characters, Words
from scripts._shared.command_line import check_at_least, exit_status
from scripts._shared.commands import short
from scripts.prepare._binarize import NO_MADE_UP_SYMBOLS, load_srcdict, preprocess, write_units
from scripts.prepare._lines import LineMapper, read_lines, write_lines
from scripts.prepare._pieces import MODEL, make_pieces
from scripts.prepare._stages import (
    SPLITS,
    Stages,
    file_digest,
    fingerprint,
    preparation_parser,
    readable_path,
)
from scripts.prepare._subwords import (
    add_subword_options,
    check_codes,
    check_language,
    check_words,
    make_units,
    moses_tokenizer,
)

SUFFIXES = (".txt", ".txt.gz")
# Without --held-out, one in this many documents or lines is for validation, and one for testing.
SHARE = 20
# units that are made from lines as they are
RAW = ("characters", "sentencepiece")
# the share of <unk> above which they matter for a loss
MANY_UNKNOWN = 0.01


@dataclass(frozen=True)
class Text:
    """Files to read one after another, or lines of one file, from start to before stop."""

    files: tuple[Path, ...]
    start: int = 0
    stop: int | None = None

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line and its location, for messages."""
        for index, path in enumerate(self.files):
            if index:
                yield "", ""
            for number, line in enumerate(read_lines(path)):
                if self.start <= number and (self.stop is None or number < self.stop):
                    yield line, f"{short(path)}, line {number + 1}"


def check_held_out(option: int | None, count: int, things: str) -> int:
    """Return the number of lines or files to hold out for each of valid and test."""
    number = max(1, count // SHARE) if option is None else option
    check_at_least(1, held_out=number)
    if 2 * number >= count:
        raise ValueError(
            f"--held-out {number} for each of valid and test leaves none of {count} {things} to "
            "train on: give a smaller number or more text"
        )
    return number


def split_file(path: Path, options: argparse.Namespace) -> dict[str, Text]:
    """Split a file: its last lines are for testing, those before them for validation."""
    count = sum(1 for _ in read_lines(path))
    number = check_held_out(options.held_out, count, "lines")
    cuts = (0, count - 2 * number, count - number, count)
    return {split: Text((path,), *cuts[part : part + 2]) for part, split in enumerate(SPLITS)}


def split_documents(folder: Path, options: argparse.Namespace) -> dict[str, Text]:
    """Split the documents of a folder at random; each part is in the order of names."""
    # by name: of a.txt and a.txt.gz, a.txt is read
    documents = {}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.name.endswith(SUFFIXES) and path.is_file():
            name = path.relative_to(folder).as_posix().removesuffix(".gz").removesuffix(".txt")
            documents[name] = path
    files = [documents[name] for name in sorted(documents)]
    number = check_held_out(options.held_out, len(files), "files *.txt and *.txt.gz")
    drawn = random.Random(options.seed).sample(range(len(files)), 2 * number)
    indices = {"valid": set(drawn[:number]), "test": set(drawn[number:])}
    indices["train"] = set(range(len(files))) - set(drawn)
    return {split: Text(tuple(files[i] for i in sorted(indices[split]))) for split in SPLITS}


def find_parts(options: argparse.Namespace) -> dict[str, Text]:
    """Return the text of each part; raise ValueError if a folder has some of the three only."""
    source = options.input
    if source.is_file():
        return split_file(source, options)
    parts = {
        split: path
        for split in SPLITS
        for path in (source / f"{split}{suffix}" for suffix in reversed(SUFFIXES))
        if path.is_file()
    }
    if not parts:
        if options.output.resolve().is_relative_to(source.resolve()):
            raise ValueError(
                f"--output {short(options.output)} lies within --input {short(source)}, where its "
                "texts would be taken for documents: give a folder beside it"
            )
        return split_documents(source, options)
    if missing := [f"{split}.txt" for split in SPLITS if split not in parts]:
        raise ValueError(
            f"--input {short(source)} has {next(iter(parts))}.txt and lacks {', '.join(missing)}: "
            "give all three parts, or a text or folder to be split"
        )
    if options.held_out is not None:
        raise ValueError(
            f"--held-out is {options.held_out}, and --input {short(source)} has all three parts: "
            "leave it out"
        )
    return {split: Text((parts[split],)) for split in SPLITS}


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError if an option is invalid or does not fit the unit."""
    check_at_least(1, workers=options.workers, bpe_size=options.bpe_size)
    if options.pieces is not None and options.unit != "sentencepiece":
        raise ValueError(f"--pieces {options.pieces} is for --unit sentencepiece: leave it out")
    options.pieces = 8000 if options.pieces is None else options.pieces
    check_at_least(1, pieces=options.pieces)
    check_at_least(0, threshold=options.threshold)
    if options.moses and options.unit in RAW:
        raise ValueError(f"--moses {options.moses} makes words: leave it out for {options.unit}")
    if options.split_punctuation and (options.moses or options.unit in RAW):
        raise ValueError("--split-punctuation is for words between blanks: leave it out")
    if options.moses:
        check_language(options.moses, "moses")
    if options.bpe_codes:
        if options.unit != "subwords":
            raise ValueError(
                f"--bpe-codes {short(options.bpe_codes)} is for subwords: give --unit subwords"
            )
        check_codes(options.bpe_codes)
    if options.srcdict:
        load_srcdict(options.srcdict)
    if options.unit == "sentencepiece" and (options.srcdict or options.threshold):
        name = "srcdict" if options.srcdict else "threshold"
        raise ValueError(f"--{name} is for other units: --unit sentencepiece learns its own pieces")


def character_symbols() -> LineMapper:
    """Return a function from lines to lines of their characters, separated by single spaces.

    The symbol of a space is U+2581, as in sentencepiece. Other whitespace, which fairseq would take
    for separators, and a U+2581 of the text have other symbols.
    """
    encode = Characters().encode
    return lambda lines: [" ".join(encode(line)) for line in lines]


def split_lines(text: Text, options: argparse.Namespace, size: dict) -> Iterator[str]:
    """Yield the lines of a text as words with single spaces; add up its "characters" in size."""
    words = Words(punctuation=options.split_punctuation).words
    for line, location in text.lines():
        size["characters"] += len(line) + 1
        if options.unit not in RAW and not options.moses:
            line = words(line)
            check_words(line, location, options.unit == "subwords")
        yield line


def tokenize(parts: dict[str, Text], options: argparse.Namespace, folder: Path) -> dict:
    """Write the words or characters of each part; count its characters, lines and words."""
    sizes = {}
    for split, text in parts.items():
        size = sizes[split] = {"characters": 0}
        lines, target = split_lines(text, options, size), folder / f"{split}.txt"
        if options.unit == "characters":
            size |= write_lines(lines, target, options.workers, character_symbols)
        elif options.moses:
            size |= write_lines(lines, target, options.workers, moses_tokenizer, options.moses)
        else:
            # lines are words already; one process
            size |= write_lines(lines, target, 1, lambda: list)
        if not size["words"]:
            files = ", ".join(map(short, text.files[:3]))
            raise ValueError(f"the {split} part has no text ({files}): give files with text")
    return sizes


def binarize(texts: Path, options: argparse.Namespace, folder: Path) -> dict:
    """Write the fairseq data folder; return the number of symbols and the sizes of each part."""
    dictionary_options = [*NO_MADE_UP_SYMBOLS, "--thresholdsrc", str(options.threshold)]
    if options.srcdict:
        dictionary_options = ["--srcdict", short(options.srcdict)]
    bpe, model = None, None
    if options.unit == "subwords":
        bpe, model = "subword_nmt", "../bpe/codes"
    elif options.unit == "sentencepiece":
        bpe, model = "sentencepiece", f"../pieces/{MODEL}"
        dictionary_options = ["--srcdict", short(texts / "dict.txt")]
    paths = {split: texts / f"{split}.txt" for split in SPLITS}
    sizes = preprocess(paths, folder, options.workers, dictionary_options)
    dictionary = [line.split()[0] for line in read_lines(folder / "dict.txt")]
    symbols = {}
    if options.unit == "characters":
        known, encode = {BLANK, *dictionary}, Characters().encode
        blanks = (*filter(str.isspace, map(chr, range(sys.maxunicode))), BLANK)
        symbols = {blank: name for blank in blanks for name in encode(blank) if name in known}
    unit = "subwords" if bpe else options.unit
    write_units(folder, unit, bpe, model, options.moses, symbols)
    return {"symbols": len(dictionary), "splits": sizes}


def prepare(options: argparse.Namespace) -> None:
    """Do the stages that are not done yet."""
    check_options(options)
    parts = find_parts(options)
    files = [path for text in parts.values() for path in text.files]
    settings = {"held-out": options.held_out, "seed": options.seed, "unit": options.unit}
    settings |= {"moses": options.moses, "input": fingerprint(files)}
    settings["split-punctuation"] = options.split_punctuation or None
    stages = Stages(options.output, settings)
    sizes = stages.run("tokens", tokenize, parts, options)
    texts, merges = options.output / "tokens", None
    if options.unit == "subwords":
        codes = {"bpe-codes": file_digest(options.bpe_codes)}
        if not options.bpe_codes:
            codes["bpe-size"] = options.bpe_size
        names = [f"{split}.txt" for split in SPLITS]
        merges = stages.run("bpe", make_units, texts, names, names[:1], options, settings=codes)
        texts = options.output / "bpe"
    elif options.unit == "sentencepiece":
        pieces = {"pieces": options.pieces}
        stages.run("pieces", make_pieces, texts, options.pieces, options.workers, settings=pieces)
        texts = options.output / "pieces"
    dictionary = {"srcdict": file_digest(options.srcdict), "threshold": options.threshold}
    binarized = stages.run("bin", binarize, texts, options, settings=dictionary)
    for split, size in binarized["splits"].items():
        sizes[split] |= size
        # Each line ends with </s>, which is predicted as well.
        words = sizes[split]["words"] + size["lines"]
        sizes[split]["tokens_per_word"] = size["tokens"] / words
    warn_of_unseen(binarized["splits"])
    stages.finish({"merges": merges, "symbols": binarized["symbols"], "splits": sizes})


def warn_of_unseen(sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Warn if <unk> is frequent in valid or test, and the model hardly sees it in training."""
    shares = {name: size["unknown"] / max(1, size["tokens"]) for name, size in sizes.items()}
    for split, share in shares.items():
        if share > MANY_UNKNOWN and shares["train"] < share / 10:
            print(
                f"warning: {share:.1%} of the tokens of {split} are <unk>, but only "
                f"{shares['train']:.2%} in training: a model hardly learns to predict it, and its "
                "loss is mostly theirs. Give --threshold 2, so that words seen once in training "
                "become <unk>, or --unit subwords",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    add = parser.add_argument
    text = "the text: a file or a folder"
    add("--input", type=readable_path, required=True, metavar="TEXT", help=text)
    text = "lines or documents for each of valid and test (default: a twentieth)"
    add("--held-out", type=int, metavar="N", help=text)
    add("--seed", type=int, default=1, help="seed for drawing documents (default: %(default)s)")
    units = ("words", "characters", "subwords", "sentencepiece")
    add("--unit", required=True, choices=units, help="what a symbol is")
    add("--moses", metavar="LANGUAGE", help="tokenize with Moses, by the rules of en, de, ...")
    text = "make each punctuation mark a word (without --moses)"
    add("--split-punctuation", action="store_true", help=text)
    add_subword_options(parser)
    text = "pieces of --unit sentencepiece (default: 8000)"
    add("--pieces", type=int, metavar="N", help=text)
    text = "codes of byte pair encoding of a trained model, to use instead of new ones"
    add("--bpe-codes", type=readable_path, metavar="FILE", help=text)
    dictionary = parser.add_mutually_exclusive_group()
    text = "dict.txt of a trained model, to use instead of a new one"
    dictionary.add_argument("--srcdict", type=readable_path, metavar="FILE", help=text)
    text = "symbols seen less often in training become <unk> (default: none)"
    dictionary.add_argument("--threshold", type=int, default=0, metavar="N", help=text)
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
