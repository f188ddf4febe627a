r"""Parallel texts in Moses tokens and joint BPE units for fairseq's translation.

    python -m scripts.prepare.translation --source-lang en --target-lang de \
        --train raw/europarl raw/news --valid raw/dev --test raw/test2014 raw/test2013 \
        --output data/en-de

Each PREFIX is two raw texts, PREFIX.en and PREFIX.de or .en.gz and .de.gz, one sentence per line.
Moses' rules normalize the punctuation and tokenize the texts; the codes are learned on both sides
of the training part. Pairs with an empty side, too many units or too different lengths are
removed from the training and validation parts, never from a test part. Several prefixes after
--test give the parts test, test1 and so on.

OUTPUT/references             test.{en,de} and so on, unchanged, for detokenized sacreBLEU
OUTPUT/tokens, OUTPUT/bpe     {train,valid,test}.{en,de}, as Moses tokens and as units; bpe/codes
OUTPUT/clean                  {train,valid}.{en,de}, the units of the pairs that are kept
OUTPUT/bin                    dict.{en,de}.txt and {train,valid,test}.en-de.{en,de}.{bin,idx}
OUTPUT/preparation.json       options and sizes

Finished stages are not repeated; after a change of options the command says what to remove. In the
end only bin, references and bpe/codes are needed.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from scripts._shared.command_line import check_at_least
from scripts._shared.commands import short
from scripts.prepare._binarize import NO_MADE_UP_SYMBOLS, preprocess, write_units
from scripts.prepare._lines import (
    open_text,
    progress,
    read_lines,
    refuse_two_copies,
    write_lines,
)
from scripts.prepare._stages import Stages, absolute_path, fingerprint, run_preparation
from scripts.prepare._subwords import (
    add_subword_options,
    check_language,
    make_units,
    moses_tokenizer,
)

# Files by part and language; only the training part may have several.
Files = Mapping[str, Mapping[str, Sequence[Path]]]
# Parts that are cleaned; a test part has to keep every sentence.
CLEANED = ("train", "valid")


def option_of(part: str) -> str:
    """Return the option of a part: --test for test, test1 and test2."""
    return f"--{part.rstrip('0123456789')}"


def find_files(languages: Sequence[str], parts: Mapping[str, Sequence[Path]]) -> Files:
    """Return the files PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz for the prefixes of each part."""

    def find(part: str, prefix: Path, language: str) -> Path:
        plain = prefix.with_name(f"{prefix.name}.{language}")
        for path in (plain, Path(f"{plain}.gz")):
            if path.is_file():
                refuse_two_copies(path)
                return path
        raise ValueError(
            f"{option_of(part)} {short(prefix)}: there is no {plain.name} and no {plain.name}.gz: "
            "give the prefix that the names of two files, one for each language, have before "
            f".{language}"
        )

    return {
        part: {code: [find(part, prefix, code) for prefix in prefixes] for code in languages}
        for part, prefixes in parts.items()
    }


def copy_references(files: Files, target: Path) -> None:
    """Copy the raw texts of the test parts, decompressed but otherwise unchanged."""
    for part, sides in files.items():
        if option_of(part) == "--test":
            for language, (path,) in sides.items():
                with open_text(path) as source, (target / f"{part}.{language}").open("wb") as file:
                    shutil.copyfileobj(source, file)


def tokenize(files: Files, options: argparse.Namespace, target: Path) -> dict[str, dict]:
    """Write the Moses tokens of each text; return each part's number of pairs and of words.

    Raises ValueError if a text is empty or the two sides of a part differ in length.
    """
    sizes: dict[str, dict] = {}
    for part, sides in files.items():
        pairs, sizes[part] = {}, {}
        for language, paths in sides.items():
            name = f"{part}.{language}"
            # True: normalize punctuation
            make = partial(moses_tokenizer, language, True, options.aggressive_hyphens)
            lines = chain.from_iterable(map(read_lines, paths))
            size = write_lines(lines, target / name, make, options.workers, f"tokenize {name}")
            names = ", ".join(map(short, paths))
            if not size["words"]:
                raise ValueError(f"{option_of(part)}: {names} has no text: give one that has")
            pairs[names] = size["lines"]
            sizes[part] |= {"pairs": size["lines"], language: size["words"]}
        if len(set(pairs.values())) > 1:
            found = ", ".join(f"{names} has {lines:,} lines" for names, lines in pairs.items())
            raise ValueError(
                f"{option_of(part)}: {found}: give files whose lines are translations of each other"
            )
    return sizes


def reason(pair: tuple[str, str], max_length: int, max_ratio: float) -> str:
    """Return why a pair of lines is removed, or "kept" if it is not."""
    if not all(pair):
        return "empty"
    shorter, longer = sorted(line.count(" ") + 1 for line in pair)
    if longer > max_length:
        return "too_long"
    return "too_unequal" if longer > max_ratio * shorter else "kept"


def clean(languages: Sequence[str], options: argparse.Namespace, target: Path) -> dict[str, dict]:
    """Write the kept pairs of training and validation; return the counts by reason."""
    found = {}
    limits = options.max_length, options.max_ratio
    for part in CLEANED:
        counts = dict.fromkeys(("kept", "empty", "too_long", "too_unequal"), 0)
        names = [f"{part}.{language}" for language in languages]
        sides = [read_lines(options.output / "bpe" / name) for name in names]
        one, two = ((target / name).open("w", encoding="utf-8", newline="\n") for name in names)
        with one, two:
            for pair in progress(zip(*sides, strict=True), desc=f"clean {part}", unit=" pairs"):
                why = reason(pair, *limits)
                counts[why] += 1
                if why == "kept":
                    one.write(f"{pair[0]}\n")
                    two.write(f"{pair[1]}\n")
        if not counts["kept"]:
            raise ValueError(
                f"--max-length {limits[0]} and --max-ratio {limits[1]} keep no pair of {part} "
                f"({counts}): give larger limits, or other texts"
            )
        found[part] = counts
    return found


def binarize(files: Files, options: argparse.Namespace, target: Path) -> dict:
    """Write the fairseq data folder; return the number of symbols and the sizes."""
    texts = {
        part: options.output / ("clean" if part in CLEANED else "bpe") / part for part in files
    }
    dictionary_options = [*NO_MADE_UP_SYMBOLS, "--joined-dictionary"]
    languages = tuple(files["train"])
    sizes = preprocess(texts, target, options.workers, dictionary_options, languages)
    bpe = ("subword_nmt", "../bpe/codes")
    write_units(target, "subwords", *bpe, languages[0], hyphens=options.aggressive_hyphens)
    symbols = sum(1 for _ in read_lines(target / f"dict.{languages[0]}.txt"))
    return {"symbols": symbols, "sizes": sizes}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every preparation for translation."""
    add = parser.add_argument
    add_subword_options(parser)
    text = "split words at hyphens, as is usual for WMT14 (default: yes)"
    yes_or_no = argparse.BooleanOptionalAction
    add("--aggressive-hyphens", action=yes_or_no, default=True, help=text)
    text = "most units on a side, in training and validation (default: %(default)s)"
    add("--max-length", type=int, default=250, metavar="N", help=text)
    text = "the longer side is at most X times the shorter, likewise (default: %(default)s)"
    add("--max-ratio", type=float, default=1.5, metavar="X", help=text)


def check_options(options: argparse.Namespace, languages: Sequence[str]) -> None:
    """Check the options that add_options adds, and the source and target languages."""
    for option, language in zip(("source-lang", "target-lang"), languages, strict=True):
        check_language(language, option)
    if languages[0] == languages[1]:
        raise ValueError(
            f"--target-lang {languages[1]} is --source-lang as well: give two different languages"
        )
    names = ("workers", "bpe_size", "max_length", "max_ratio")
    check_at_least(1, **{name: getattr(options, name) for name in names})


def prepare(stages: Stages, files: Files, options: argparse.Namespace) -> None:
    """Do the stages that are not done yet."""
    languages = list(files["train"])
    hyphens = {"aggressive-hyphens": options.aggressive_hyphens}
    words = stages.run("tokens", partial(tokenize, files, options), hyphens)
    stages.run("references", partial(copy_references, files))
    names = [f"{part}.{language}" for part in files for language in languages]
    training = [f"train.{language}" for language in languages]
    work = partial(make_units, options.output / "tokens", names, training, options)
    merges = stages.run("bpe", work, {"bpe-size": options.bpe_size})
    limits = {"max-length": options.max_length, "max-ratio": options.max_ratio}
    cleaned = stages.run("clean", partial(clean, languages, options), limits)
    binarized = stages.run("bin", partial(binarize, files, options))
    parts = {}
    for part in files:
        pairs = words[part]["pairs"]
        parts[part] = {"pairs": pairs, "kept": pairs, **cleaned.get(part, {})}
        for language in languages:
            # lines and tokens of the kept pairs; tokens include the </s> of each line
            size = binarized["sizes"][f"{part}.{'-'.join(languages)}.{language}"]
            parts[part][language] = {"words": words[part][language], **size}
    stages.finish({"merges": merges, "symbols": binarized["symbols"], "parts": parts})


def test_parts(prefixes: Sequence[Path]) -> dict[str, Sequence[Path]]:
    """Return the test texts by the names of their parts in fairseq: test, test1 and so on."""
    return {f"test{number or ''}": [prefix] for number, prefix in enumerate(prefixes)}


def prepare_texts(options: argparse.Namespace) -> None:
    """Do the work of the command."""
    languages = options.source_lang, options.target_lang
    check_options(options, languages)
    parts = {"train": options.train, "valid": [options.valid], **test_parts(options.test)}
    files = find_files(languages, parts)
    settings = {"source-lang": languages[0], "target-lang": languages[1]}
    for option in ("train", "valid", "test"):
        sides = [files[part].values() for part in files if option_of(part) == f"--{option}"]
        settings[option] = fingerprint(chain.from_iterable(chain.from_iterable(sides)))
    prepare(Stages(options.output, settings), files, options)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(parser.add_argument, required=True)
    for side in ("source", "target"):
        add(f"--{side}-lang", metavar="CODE", help=f"{side} language, such as en")
    for part, number, text in (
        ("train", "+", "prefixes of the texts to train on"),
        ("valid", None, "prefix of the text to validate on"),
        ("test", "+", "prefixes of the texts to test on"),
    ):
        add(f"--{part}", type=absolute_path, nargs=number, metavar="PREFIX", help=text)
    add_options(parser)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_preparation(__doc__, add_text_options, prepare_texts, arguments)


if __name__ == "__main__":
    sys.exit(main())
