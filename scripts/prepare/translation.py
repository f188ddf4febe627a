r"""Parallel texts in Moses tokens and joint BPE units for fairseq's translation.

    python -m scripts.prepare.translation --source-lang en --target-lang de \
        --train raw/europarl raw/news --valid raw/dev --test raw/test2014 raw/test2013 \
        --output data/en-de

Each PREFIX is a pair of raw texts PREFIX.en and PREFIX.de, or .en.gz and .de.gz, a sentence a line.
Punctuation is made uniform and the texts are tokenized as Moses does both; the codes are learned on
both sides of the training part; pairs that are empty on a side, too long or of too different
lengths are removed from the training and validation parts, never from a test part. With several
--test the parts are test, test1 and so on.

OUTPUT/inputs.json            pairs of each PREFIX
OUTPUT/references             test.{en,de} and so on as they were given, for detokenized sacreBLEU
OUTPUT/tokens, OUTPUT/bpe     {train,valid,test}.{en,de}, as Moses tokens and as units; bpe/codes
OUTPUT/clean                  {train,valid}.{en,de}, the units of the pairs that are kept
OUTPUT/bin                    dict.{en,de}.txt and {train,valid,test}.en-de.{en,de}.{bin,idx}
OUTPUT/preparation.json       options and sizes
OUTPUT/steps.json             the steps that are done: they are not done again

With another option or a changed input the script refuses to go on and names what to remove. Once
it is done only bin, references and bpe/codes are needed.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from scripts._shared.command_line import command_parser
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare import _bpe as subword_units
from scripts.prepare._bitext import Bitext, copy_references, survey
from scripts.prepare._clean_pairs import REASONS, Limits, clean
from scripts.prepare._dictionary import counted_dictionary
from scripts.prepare._lines import check_workers
from scripts.prepare._moses import check_language, tokenize
from scripts.prepare._preprocess import preprocess_command
from scripts.prepare._steps import Steps, run_script
from scripts.prepare._words import SplitSizes, binarize_splits

# Parts that are cleaned; a test part has to keep every sentence.
CLEANED = ("train", "valid")
MOST_WORKERS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every preparation for translation to a parser."""
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    add("--bpe-size", type=int, default=32_000, metavar="N", help="merges (default: %(default)s)")
    add(
        "--bpe-tool",
        default=subword_units.FASTBPE,
        metavar="|".join(subword_units.TOOLS),
        help="what applies the codes, to the same effect (default: %(default)s)",
    )
    add(
        "--separate-dictionaries",
        action="store_true",
        help="a dictionary of its own for each language, instead of one for both",
    )
    add(
        "--aggressive-hyphens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split words at hyphens, as is usual for WMT14 (default: yes)",
    )
    limits = Limits()
    add(
        "--max-length",
        type=int,
        default=limits.max_length,
        metavar="N",
        help="units of a side at most, in training and validation (default: %(default)s)",
    )
    add(
        "--max-ratio",
        type=float,
        default=limits.max_ratio,
        metavar="X",
        help="the longer side is at most X times the shorter, likewise (default: %(default)s)",
    )
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    add(
        "--workers", type=int, default=workers, metavar="N", help="processes (default: %(default)s)"
    )


def check_options(options: argparse.Namespace, languages: Sequence[str]) -> None:
    """Check what add_options added, and the codes of source and target language.

    Raises ValueError when a value is impossible.
    """
    for option, language in zip(("source-lang", "target-lang"), languages, strict=True):
        check_language(language, option)
    check_workers(options.workers)
    subword_units.check_size(options.bpe_size)
    subword_units.check_tool(options.bpe_tool)
    Limits(options.max_length, options.max_ratio)
    if "," in short(options.output):
        raise ValueError(
            f"--output {short(options.output)} has a comma, where fairseq-preprocess ends the name "
            "of a file: give another folder"
        )


def binarize(
    output: Path,
    languages: tuple[str, str],
    parts: Mapping[str, Mapping[str, SplitSizes]],
    separate: bool,
    workers: int,
    target: Path,
) -> dict:
    """Write the folder for fairseq; return its symbols and each part's unknown units, by language.

    Args:
        output: has the units.
        languages: source and target.
        parts: lines and tokens in each language of each part.
        separate: make a dictionary for each language.
        workers: number of processes.
        target: a new folder for the binarized data.

    Raises ValueError when fairseq-preprocess fails or writes something else.
    """
    texts = {language: output / "clean" / f"train.{language}" for language in languages}
    target.mkdir()
    if separate:
        dictionaries = {
            language: counted_dictionary(subword_units.count_words([text]))
            for language, text in texts.items()
        }
    else:
        joined = counted_dictionary(subword_units.count_words(texts.values()))
        dictionaries = dict.fromkeys(languages, joined)
    which = []
    for option, language in zip(("--srcdict", "--tgtdict"), languages, strict=True):
        # Of a joined dictionary fairseq writes the second file, and refuses one that is there.
        if separate or option == "--srcdict":
            file = target / f"dict.{language}.txt"
            dictionaries[language].save(str(file))
            which += [option, short(file)]
    if not separate:
        which.append("--joined-dictionary")
    command = preprocess_command(
        {
            "train": output / "clean" / "train",
            "valid": output / "clean" / "valid",
            "test": [output / "bpe" / part for part in parts if part not in CLEANED],
        },
        target,
        # fairseq binarizes the first part of a text after the others.
        workers + 1 if workers > 1 else 1,
        *which,
        languages=languages,
    )
    pair = "-".join(languages)
    names = {
        f"{part}.{pair}.{language}": (part, language) for part in parts for language in languages
    }
    unknown = binarize_splits(
        command,
        target,
        # Beside the folder, which does not outlive a failure.
        output / "preprocess.log",
        {name: parts[part][language] for name, (part, language) in names.items()},
        {name: dictionaries[language] for name, (_, language) in names.items()},
    )
    symbols = {
        language: len(dictionary) - dictionary.nspecial
        for language, dictionary in dictionaries.items()
    }
    return {
        "symbols": symbols if separate else symbols[languages[0]],
        "unknown": {
            part: {language: unknown[f"{part}.{pair}.{language}"] for language in languages}
            for part in parts
        },
    }


def prepare(
    steps: Steps,
    bitext: Bitext,
    options: argparse.Namespace,
    origin: Mapping[str, str],
    sources: Sequence[str] = (),
) -> dict:
    """Do the steps that are not done yet and return what is in preparation.json.

    Args:
        steps: of the folder --output.
        bitext: the raw texts.
        options: what add_options added, checked.
        origin: options that tell whether the raw texts are the same as before.
        sources: steps that made the raw texts.

    Raises ValueError when a text or the output cannot be used.
    """
    output, workers, languages = steps.output, options.workers, bitext.languages
    limits = Limits(options.max_length, options.max_ratio)
    pairs = steps.run("inputs.json", origin, sources, partial(survey, bitext))
    steps.run("references", {}, ["inputs.json"], partial(copy_references, bitext, pairs))

    def tokens_of(part: str, language: str, target: Path) -> dict:
        lines = bitext.lines(part, language)
        hyphens = options.aggressive_hyphens
        sizes = tokenize(lines, pairs[part], target, language, workers, True, hyphens)
        return asdict(sizes)

    def units_of(name: str, expected: int, target: Path) -> dict:
        codes, source, tool = output / "bpe" / "codes", output / "tokens" / name, options.bpe_tool
        return asdict(subword_units.apply(tool, codes, source, expected, target, workers))

    def clean_parts(target: Path) -> dict:
        target.mkdir()
        found = {}
        for part in CLEANED:
            texts, cleaned = (
                {language: folder / f"{part}.{language}" for language in languages}
                for folder in (output / "bpe", target)
            )
            found[part] = clean(texts, cleaned, pairs[part], limits, part)
        return found

    names = {f"{part}.{language}": part for part in pairs for language in languages}
    hyphens = {"aggressive-hyphens": options.aggressive_hyphens}
    size, tool = {"bpe-size": options.bpe_size}, {"bpe-tool": options.bpe_tool}
    kept = {"max-length": limits.max_length, "max-ratio": limits.max_ratio}
    separate = {"separate-dictionaries": options.separate_dictionaries}
    tokens, units = {}, {}
    for name, part in names.items():
        language = name.removeprefix(f"{part}.")
        work = partial(tokens_of, part, language)
        tokens[name] = steps.run(f"tokens/{name}", hyphens, ["inputs.json"], work)
    training = [f"tokens/train.{language}" for language in languages]
    learn = partial(subword_units.learn, [output / name for name in training])
    merges = steps.run("bpe/codes", size, training, lambda target: learn(target, options.bpe_size))
    if merges < options.bpe_size:
        print(f"bpe/codes: {merges:,} of {options.bpe_size:,}: no other pair is there twice")
    for name, part in names.items():
        work = partial(units_of, name, pairs[part])
        units[name] = steps.run(f"bpe/{name}", tool, ["bpe/codes", f"tokens/{name}"], work)
    to_clean = [f"bpe/{part}.{language}" for part in CLEANED for language in languages]
    cleaned = steps.run("clean", kept, to_clean, clean_parts)

    # What each part has in bin: its pairs, and the units of each language.
    held = {
        part: (cleaned[part]["kept"], cleaned[part]["units"])
        if part in CLEANED
        else (pairs[part], {one: units[f"{part}.{one}"]["words"] for one in languages})
        for part in pairs
    }
    sizes = {
        part: {one: SplitSizes(lines=lines, tokens=words[one] + lines) for one in languages}
        for part, (lines, words) in held.items()
    }
    binarized = steps.run(
        "bin",
        separate,
        ["clean", *(f"bpe/{part}.{one}" for part in bitext.tests for one in languages)],
        partial(binarize, output, languages, sizes, options.separate_dictionaries, workers),
    )
    parts = {}
    for part in pairs:
        parts[part] = {"pairs": pairs[part], "kept": held[part][0]}
        if part in CLEANED:
            parts[part] |= {reason: cleaned[part][reason] for reason in REASONS}
        for one in languages:
            parts[part][one] = {
                "words": tokens[f"{part}.{one}"]["words"],
                "units": units[f"{part}.{one}"]["words"],
                # Of the pairs that are kept, with the </s> of each line.
                "tokens": sizes[part][one].tokens,
                "unknown_units": binarized["unknown"][part][one],
            }
    description = {
        "source-lang": languages[0],
        "target-lang": languages[1],
        **origin,
        **hyphens,
        **size,
        **tool,
        **kept,
        **separate,
        "merges": merges,
        "symbols": binarized["symbols"],
        "versions": {name: version(name) for name in ("sacremoses", "subword-nmt")},
        "parts": parts,
    }
    write_json(output / "preparation.json", description)
    return description


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = command_parser(__doc__)
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-lang", required=True, metavar="CODE", help=f"{side} language, such as en"
        )
    for part, number, text in (
        ("train", "+", "prefixes of the texts to train on"),
        ("valid", None, "prefix of the text to validate on"),
        ("test", "+", "prefixes of the texts to test on"),
    ):
        parser.add_argument(
            f"--{part}", type=Path, required=True, nargs=number, metavar="PREFIX", help=text
        )
    add_options(parser)
    options = parser.parse_args()
    options.output = options.output.resolve()
    return options


def test_parts(prefixes: Sequence[Path]) -> dict[str, tuple[Path, ...]]:
    """Texts to test on by the names that fairseq gives their parts: test, test1 and so on."""
    return {f"test{number or ''}": (prefix.resolve(),) for number, prefix in enumerate(prefixes)}


def prepare_raw(options: argparse.Namespace) -> None:
    """Do the work of the script and print what is in preparation.json.

    Raises ValueError when an option, a text or the output cannot be used.
    """
    languages = options.source_lang, options.target_lang
    check_options(options, languages)
    parts = {
        "train": tuple(prefix.resolve() for prefix in options.train),
        "valid": (options.valid.resolve(),),
        **test_parts(options.test),
    }
    bitext = Bitext(languages, parts)
    steps = Steps(options.output, "translation data")
    codes = {"source-lang": languages[0], "target-lang": languages[1]}
    description = prepare(steps, bitext, options, {**codes, **bitext.fingerprints()})
    print(json.dumps(description, indent=2))


def main() -> int:
    """Command line of the script; returns its exit status."""
    options = parse()
    return run_script(lambda: prepare_raw(options), options.output)


if __name__ == "__main__":
    sys.exit(main())
