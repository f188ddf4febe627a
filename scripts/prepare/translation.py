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
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare._binarize import NO_MADE_UP_SYMBOLS, Sizes, count_symbols, preprocess
from scripts.prepare._bitext import REASONS, Bitext, Limits, clean, copy_references, survey
from scripts.prepare._steps import INTERRUPTED, Steps, resolved
from scripts.prepare._subwords import (
    VERSIONS,
    RawText,
    add_subword_options,
    check_language,
    check_subword_options,
    make_units,
)

# Parts that are cleaned; a test part has to keep every sentence.
CLEANED = ("train", "valid")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every preparation for translation to a parser."""
    add = parser.add_argument
    add("--output", type=resolved, required=True, metavar="DIR", help="folder of the result")
    add_subword_options(parser, 32_000)
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


def check_options(options: argparse.Namespace, languages: Sequence[str]) -> None:
    """Check what add_options added, and the codes of source and target language.

    Raises ValueError when a value is impossible.
    """
    for option, language in zip(("source-lang", "target-lang"), languages, strict=True):
        check_language(language, option)
    check_subword_options(options)
    Limits(options.max_length, options.max_ratio)
    if "," in short(options.output):
        raise ValueError(
            f"--output {short(options.output)} has a comma, where fairseq-preprocess ends the name "
            "of a file: give another folder"
        )


def clean_parts(
    output: Path, bitext: Bitext, pairs: Mapping[str, int], limits: Limits, target: Path
) -> dict:
    """Clean the parts that are cleaned into a new folder; returns and raises as clean, by part."""
    target.mkdir()
    found = {}
    for part in CLEANED:
        texts, cleaned = (
            {language: folder / f"{part}.{language}" for language in bitext.languages}
            for folder in (output / "bpe", target)
        )
        found[part] = clean(texts, cleaned, pairs[part], limits, part)
    return found


def binarize(
    output: Path,
    languages: tuple[str, str],
    parts: Mapping[str, Mapping[str, Sizes]],
    separate: bool,
    workers: int,
    target: Path,
) -> dict:
    """Write a new folder for fairseq from the units in output, with one dictionary or two.

    Returns its symbols, and each part's unknown units by language. Raises ValueError when
    fairseq-preprocess fails or writes other sizes than those of the parts by language.
    """
    prefixes = {
        "train": output / "clean" / "train",
        "valid": output / "clean" / "valid",
        "test": [output / "bpe" / part for part in parts if part not in CLEANED],
    }
    names = {
        (part, one): f"{part}.{'-'.join(languages)}.{one}" for part in parts for one in languages
    }
    sizes = {name: parts[part][one] for (part, one), name in names.items()}
    which = [*NO_MADE_UP_SYMBOLS, *([] if separate else ["--joined-dictionary"])]
    log = output / "preprocess.log"
    unknown = preprocess(prefixes, target, log, sizes, workers, *which, languages=languages)
    symbols = {one: count_symbols(target / f"dict.{one}.txt") for one in languages}
    return {
        "symbols": symbols if separate else symbols[languages[0]],
        "unknown": {part: {one: unknown[names[part, one]] for one in languages} for part in parts},
    }


def prepare(
    steps: Steps,
    bitext: Bitext,
    options: argparse.Namespace,
    origin: Mapping[str, str],
    sources: Sequence[str] = (),
) -> None:
    """Do the steps that are not done yet and print what is in preparation.json.

    ``origin`` tells whether the raw texts, made by the steps ``sources``, are the same as before.
    Raises ValueError when a text or the output cannot be used.
    """
    output, workers, languages = steps.output, options.workers, bitext.languages
    limits = Limits(options.max_length, options.max_ratio)
    pairs = steps.run("inputs.json", origin, sources, partial(survey, bitext))
    steps.run("references", {}, ["inputs.json"], partial(copy_references, bitext, pairs))

    hyphens = {"aggressive-hyphens": options.aggressive_hyphens}
    texts = {
        f"{part}.{one}": RawText(
            partial(bitext.lines, part, one), {"lines": pairs[part]}, one, True, *hyphens.values()
        )
        for part in pairs
        for one in languages
    }
    training = [f"train.{one}" for one in languages]
    merges, tokens, units = make_units(steps, texts, training, ["inputs.json"], hyphens, options)
    kept = {"max-length": limits.max_length, "max-ratio": limits.max_ratio}
    to_clean = [f"bpe/{part}.{one}" for part in CLEANED for one in languages]
    work = partial(clean_parts, output, bitext, pairs, limits)
    cleaned = steps.run("clean", kept, to_clean, work)

    # What each part has in bin: its pairs, and the tokens of each language with their </s>.
    sizes: dict[str, dict[str, Sizes]] = {}
    for part in pairs:
        lines, words = pairs[part], {one: units[f"{part}.{one}"]["words"] for one in languages}
        if part in CLEANED:
            lines, words = cleaned[part]["kept"], cleaned[part]["units"]
        sizes[part] = {one: {"lines": lines, "tokens": words[one] + lines} for one in languages}
    separate = {"separate-dictionaries": options.separate_dictionaries}
    work = partial(binarize, output, languages, sizes, options.separate_dictionaries, workers)
    to_binarize = ["clean", *(f"bpe/{part}.{one}" for part in bitext.tests for one in languages)]
    binarized = steps.run("bin", separate, to_binarize, work)

    parts = {}
    for part in pairs:
        parts[part] = {"pairs": pairs[part], "kept": sizes[part][languages[0]]["lines"]}
        if part in CLEANED:
            parts[part] |= {reason: cleaned[part][reason] for reason in REASONS}
        for one in languages:
            parts[part][one] = {
                "words": tokens[f"{part}.{one}"]["words"],
                "units": units[f"{part}.{one}"]["words"],
                # Of the pairs that are kept, with the </s> of each line.
                "tokens": sizes[part][one]["tokens"],
                "unknown_units": binarized["unknown"][part][one],
            }
    description = {
        "source-lang": languages[0],
        "target-lang": languages[1],
        **origin,
        **hyphens,
        "bpe-size": options.bpe_size,
        "bpe-tool": options.bpe_tool,
        **kept,
        **separate,
        "merges": merges,
        "symbols": binarized["symbols"],
        "versions": VERSIONS,
        "parts": parts,
    }
    write_json(output / "preparation.json", description)
    print(json.dumps(description, indent=2))


def test_parts(prefixes: Sequence[Path]) -> dict[str, tuple[Path, ...]]:
    """Texts to test on by the names that fairseq gives their parts: test, test1 and so on."""
    return {f"test{number or ''}": (prefix,) for number, prefix in enumerate(prefixes)}


def prepare_raw(options: argparse.Namespace) -> None:
    """Do the work of the command; raises ValueError when an option or a text cannot be used."""
    languages = options.source_lang, options.target_lang
    check_options(options, languages)
    parts = {"train": tuple(options.train), "valid": (options.valid,), **test_parts(options.test)}
    bitext = Bitext(languages, parts)
    steps = Steps(options.output, "translation data")
    codes = {"source-lang": languages[0], "target-lang": languages[1]}
    prepare(steps, bitext, options, {**codes, **bitext.fingerprints()})


def main() -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    for side in ("source", "target"):
        add(f"--{side}-lang", required=True, metavar="CODE", help=f"{side} language, such as en")
    for part, number, text in (
        ("train", "+", "prefixes of the texts to train on"),
        ("valid", None, "prefix of the text to validate on"),
        ("test", "+", "prefixes of the texts to test on"),
    ):
        add(f"--{part}", type=resolved, required=True, nargs=number, metavar="PREFIX", help=text)
    add_options(parser)
    options = parser.parse_args()
    return exit_status(lambda: prepare_raw(options), INTERRUPTED, options.output)


if __name__ == "__main__":
    sys.exit(main())
