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
OUTPUT/clean                  {train,valid}.{en,de}, the units of the pairs that fit
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

from scripts._shared.command_line import check_at_least, exit_status
from scripts._shared.commands import short
from scripts.prepare._binarize import NO_MADE_UP_SYMBOLS, preprocess, write_units
from scripts.prepare._lines import open_text, progress, read_lines, write_lines
from scripts.prepare._stages import Stages, absolute_path, fingerprint, preparation_parser
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


def part_option(part: str) -> str:
    """Return the option of a part: --test for test, test1 and test2."""
    return f"--{part.rstrip('0123456789')}"


def find_file(part: str, prefix: Path, language: str) -> Path:
    """Return the file PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz."""
    plain = prefix.with_name(f"{prefix.name}.{language}")
    for path in (plain, Path(f"{plain}.gz")):
        if path.is_file():
            return path
    raise ValueError(
        f"{part_option(part)} {short(prefix)}: there is no {plain.name} and no {plain.name}.gz: "
        "give the prefix that the names of two files, one for each language, have before "
        f".{language}"
    )


def find_files(
    languages: Sequence[str], train: Sequence[Path], valid: Path, tests: Sequence[Path]
) -> Files:
    """Return the files for the prefixes of each part: train, valid, test, test1 and so on."""
    parts: dict[str, Sequence[Path]] = {"train": train, "valid": [valid]}
    for number, prefix in enumerate(tests):
        parts[f"test{number or ''}"] = [prefix]
    return {
        part: {code: [find_file(part, prefix, code) for prefix in prefixes] for code in languages}
        for part, prefixes in parts.items()
    }


def tokenize(files: Files, options: argparse.Namespace, target: Path) -> dict[str, dict]:
    """Write the Moses tokens of each text; return each part's number of pairs and of words.

    Raises ValueError if a text is empty or the two sides of a part differ in length.
    """
    sizes: dict[str, dict] = {}
    for part, sides in files.items():
        pairs, sizes[part] = {}, {}
        for language, paths in sides.items():
            lines = chain.from_iterable(map(read_lines, paths))
            # True: normalize punctuation
            tokenizer = moses_tokenizer, language, True, options.aggressive_hyphens
            path = target / f"{part}.{language}"
            size = write_lines(lines, path, options.workers, *tokenizer)
            names = ", ".join(map(short, paths))
            if not size["words"]:
                raise ValueError(f"{part_option(part)}: {names} has no text: give one that has")
            pairs[names] = size["lines"]
            sizes[part] |= {"pairs": size["lines"], language: size["words"]}
        if len(set(pairs.values())) > 1:
            counts = ", ".join(f"{names} has {lines:,} lines" for names, lines in pairs.items())
            raise ValueError(
                f"{part_option(part)}: {counts}: give files whose lines are translations of each "
                "other"
            )
    return sizes


def copy_references(files: Files, target: Path) -> None:
    """Copy the raw texts of the test parts, decompressed but otherwise unchanged."""
    for part, sides in files.items():
        if part_option(part) == "--test":
            for language, (path,) in sides.items():
                with open_text(path) as source, (target / f"{part}.{language}").open("wb") as file:
                    shutil.copyfileobj(source, file)


def verdict(pair: tuple[str, str], max_length: int, max_ratio: float) -> str:
    """Return why a pair of lines is removed, or "kept" if it is not."""
    if not all(pair):
        return "empty"
    shorter, longer = sorted(line.count(" ") + 1 for line in pair)
    if longer > max_length:
        return "too_long"
    return "too_unequal" if longer > max_ratio * shorter else "kept"


def clean(
    units: Path, languages: Sequence[str], options: argparse.Namespace, target: Path
) -> dict[str, dict]:
    """Write the pairs of training and validation that fit; count the pairs by verdict."""
    counts = {}
    limits = options.max_length, options.max_ratio
    for part in CLEANED:
        count = counts[part] = dict.fromkeys(("kept", "empty", "too_long", "too_unequal"), 0)
        names = [f"{part}.{language}" for language in languages]
        sides = [read_lines(units / name) for name in names]
        one, two = ((target / name).open("w", encoding="utf-8", newline="\n") for name in names)
        with one, two:
            for pair in progress(zip(*sides, strict=True), desc=f"clean {part}", unit=" pairs"):
                answer = verdict(pair, *limits)
                count[answer] += 1
                if answer == "kept":
                    one.write(f"{pair[0]}\n")
                    two.write(f"{pair[1]}\n")
        if not count["kept"]:
            raise ValueError(
                f"--max-length {limits[0]} and --max-ratio {limits[1]} keep no pair of {part} "
                f"({count}): give larger limits, or other texts"
            )
    return counts


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


def prepare_pair(stages: Stages, files: Files, options: argparse.Namespace) -> None:
    """Do the stages that are not done yet."""
    output, languages = options.output, list(files["train"])
    hyphens = {"aggressive-hyphens": options.aggressive_hyphens}
    words = stages.run("tokens", tokenize, files, options, settings=hyphens)
    stages.run("references", copy_references, files)
    names = [f"{part}.{language}" for part in files for language in languages]
    training = [f"train.{language}" for language in languages]
    units = output / "tokens", names, training, options
    merges = stages.run("bpe", make_units, *units, settings={"bpe-size": options.bpe_size})
    limits = {"max-length": options.max_length, "max-ratio": options.max_ratio}
    cleaned = stages.run("clean", clean, output / "bpe", languages, options, settings=limits)
    binarized = stages.run("bin", binarize, files, options)
    parts = {}
    for part in files:
        pairs = words[part]["pairs"]
        parts[part] = {"pairs": pairs, "kept": pairs, **cleaned.get(part, {})}
        for language in languages:
            # lines and tokens of the pairs that are left; tokens include the </s> of each line
            size = binarized["sizes"][f"{part}.{'-'.join(languages)}.{language}"]
            parts[part][language] = {"words": words[part][language], **size}
    stages.finish({"merges": merges, "symbols": binarized["symbols"], "parts": parts})


def prepare(options: argparse.Namespace) -> None:
    """Do the work of the command."""
    languages = options.source_lang, options.target_lang
    check_options(options, languages)
    files = find_files(languages, options.train, options.valid, options.test)
    settings = {"source-lang": languages[0], "target-lang": languages[1]}
    for option in ("train", "valid", "test"):
        sides = [files[part].values() for part in files if part_option(part) == f"--{option}"]
        settings[option] = fingerprint(chain.from_iterable(chain.from_iterable(sides)))
    prepare_pair(Stages(options.output, settings), files, options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    add = partial(parser.add_argument, required=True)
    for side in ("source", "target"):
        add(f"--{side}-lang", metavar="CODE", help=f"{side} language, such as en")
    text = "prefixes of the texts to train on"
    add("--train", type=absolute_path, nargs="+", metavar="PREFIX", help=text)
    add("--valid", type=absolute_path, metavar="PREFIX", help="prefix of the text to validate on")
    text = "prefixes of the texts to test on"
    add("--test", type=absolute_path, nargs="+", metavar="PREFIX", help=text)
    add_options(parser)
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
