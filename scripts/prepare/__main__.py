"""Prepare texts for fairseq: published corpora, generated ones, and your own.

    python -m scripts.prepare --list
    python -m scripts.prepare NAME --output DIR [options]
    python -m scripts.prepare NAME --help

OUTPUT/text                   plain text: with --unit plain, and of some corpora
OUTPUT/tokens, OUTPUT/bpe     {train,valid,test}.txt, or .en and .de, as words or characters, and as
                              units; bpe/codes
OUTPUT/clean, references      of pairs: the units of those that fit; the raw text of the test parts
OUTPUT/pieces                 {train,valid,test}.txt as pieces; sentencepiece.model
OUTPUT/bin                    dict.txt, {train,valid,test}.{bin,idx}; units.json about the symbols
OUTPUT/preparation.json       options and sizes, to convert perplexities per unit to those per word

All is written into OUTPUT.partial-*, which becomes OUTPUT when it is whole: a preparation that was
stopped starts again, but finds what it downloaded, in OUTPUT.download.
"""

import argparse
import json
import platform
import shutil
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts._shared.command_line import exit_status
from scripts._shared.commands import name_commands, short
from scripts._shared.files import new_folder, write_json
from scripts.prepare._binarize import (
    binarize_bytes,
    binarize_pairs,
    binarize_text,
    load_srcdict,
)
from scripts.prepare._clean import clean
from scripts.prepare._corpora import (
    Corpus,
    add_options,
    find_corpus,
    options_of,
    read_yaml,
    recorded_options,
    settle,
)
from scripts.prepare._get import check, get
from scripts.prepare._lines import open_text, write_lines
from scripts.prepare._read import read
from scripts.prepare._split import Parts, split
from scripts.prepare._symbols import (
    check_codes,
    check_language,
    check_sizes,
    lines_of,
    write_pieces,
    write_subwords,
    write_tokens,
)


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit each other, or files that are something else."""
    if options.unit not in ("bytes", "plain") and "," in short(options.output):
        raise ValueError(
            f"--output {short(options.output)} has a comma, where fairseq-preprocess would split "
            "it: give another folder"
        )
    if options.pair:
        options.source_lang, options.target_lang = options.pair.split("-")
    for side in ("source_lang", "target_lang"):
        if language := getattr(options, side):
            check_language(language, side.replace("_", "-"))
    if options.source_lang and options.source_lang == options.target_lang:
        raise ValueError(
            f"--target-lang {options.target_lang} is --source-lang as well: give two different "
            "languages"
        )
    if options.moses:
        check_language(options.moses, "moses")
        if options.split_punctuation:
            raise ValueError("--split-punctuation is for words between blanks: leave --moses out")
    if options.held_out and not options.packages and not options.input:
        raise ValueError(
            f"--held-out {options.held_out} draws source files of packages: give --packages, too"
        )
    if options.bpe_codes:
        check_codes(options.bpe_codes)
    if options.srcdict:
        load_srcdict(options.srcdict)
        if options.threshold:
            raise ValueError("--threshold is for a new dictionary: leave it out with --srcdict")


def is_complete(output: Path, settings: dict[str, Any]) -> bool:
    """Return whether a folder was prepared with the same options; raise ValueError if another was.

    Nothing is there in a new folder.
    """
    path = output / "preparation.json"
    if not path.exists():
        if output.is_dir() and any(output.iterdir()):
            raise ValueError(
                f"--output {short(output)} has files that were not made by this command: remove "
                "them or give another folder"
            )
        return False
    content = json.loads(path.read_text(encoding="utf-8"))
    before = {name: content.get(name) for name in settings}
    for name, value in settings.items():
        if before[name] != value:
            raise ValueError(
                f"--output {short(output)} was prepared with another --{name} ({before[name]}, now "
                f"{value}): remove it or give another folder"
            )
    return True


def write_text(corpus: Corpus, parts: Parts, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the plain text of each part, and check it; return the sizes."""
    folder.mkdir()
    sizes: dict[str, dict[str, Any]] = {}
    for part, sides in parts.items():
        for language, texts in sides.items():
            path = folder / f"{part}.{language}"
            sizes.setdefault(part, {})[language] = size = {}
            write_lines(lines_of(texts, size), path, 1, lambda: list)
            check(path, corpus.get("written", {}).get(part), f"text/{path.name}")
    return sizes


def write_references(parts: Parts, folder: Path) -> None:
    """Write the raw texts of the test parts, decompressed but otherwise unchanged."""
    folder.mkdir()
    for part, sides in parts.items():
        for language, texts in sides.items() if part.startswith("test") else ():
            with (folder / f"{part}.{language}").open("wb") as file:
                for text in texts:
                    if text.path:
                        with open_text(text.path) as source:
                            shutil.copyfileobj(source, file)
                    else:
                        file.writelines(f"{line}\n".encode() for line in text.make())


def prepare_text(
    corpus: Corpus, parts: Parts, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Write the symbols of texts in one language, and binarize them; return a description."""
    merges = None
    if options.unit == "sentencepiece":
        sizes = write_pieces(corpus, parts, options, folder / "pieces")
    else:
        sizes = write_tokens(corpus, parts, options, folder / "tokens")
    check_sizes(parts, sizes)
    if options.unit == "subwords":
        merges = write_subwords(folder / "tokens", parts, options, folder / "bpe")
    symbols, binarized = binarize_text(corpus, parts, options, folder)
    splits = {}
    for part, size in binarized.items():
        splits[part] = {"texts": len(parts[part]["txt"]), **sizes[part]["txt"], **size}
        words = splits[part].pop("words")
        if options.unit not in ("characters", "bytes"):
            # Each line ends with </s>, which is predicted as well.
            rate = size["tokens"] / (words + size["lines"])
            splits[part] |= {"words": words, "tokens_per_word": rate}
    vocabulary = symbols + corpus.get("unlisted", 2)
    return {"merges": merges, "symbols": symbols, "vocabulary": vocabulary, "splits": splits}


def prepare_pairs(
    corpus: Corpus, parts: Parts, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Write the symbols of parallel texts, and binarize them; return a description."""
    languages = [options.source_lang, options.target_lang]
    words = write_tokens(corpus, parts, options, folder / "tokens")
    check_sizes(parts, words)
    write_references(parts, folder / "references")
    merges = write_subwords(folder / "tokens", parts, options, folder / "bpe")
    verdicts = clean(folder / "bpe", languages, options, folder / "clean")
    symbols, sizes = binarize_pairs(parts, options, folder)
    pairs: dict[str, dict[str, Any]] = {}
    for part, sides in words.items():
        number = sides[languages[0]]["lines"]
        pairs[part] = {"pairs": number, "kept": number, **verdicts.get(part, {})}
        for language in languages:
            # lines and tokens of the pairs that are left; tokens include the </s> of each line
            size = sizes[f"{part}.{'-'.join(languages)}.{language}"]
            pairs[part][language] = {"words": sides[language]["words"], **size}
    return {"merges": merges, "symbols": symbols, "parts": pairs}


def prepare(name: str, corpus: Corpus, options: argparse.Namespace) -> None:
    """Write a corpus into the --output folder, unless it is there."""
    settle(options, corpus)
    check_options(options)
    output, downloads = options.output, options.output.with_name(f"{options.output.name}.download")
    settings = {"corpus": name, **recorded_options(options, corpus)}
    if name == "python_source" and not options.packages:
        settings["python"] = platform.python_version()
    if is_complete(output, {**dict.fromkeys(options_of(corpus)), **settings}):
        print(f"{short(output)}: complete", flush=True)
        return
    try:
        with new_folder(output) as folder:
            raw = folder / "raw"
            raw.mkdir()
            files = get(corpus, options, downloads, raw)
            print(f"read {name}", flush=True)
            texts = read(corpus, files, options)
            print(f"split {len(texts):,} texts", flush=True)
            parts = split(corpus, texts, options, raw)
            description: dict[str, Any] = {}
            if options.unit == "plain" or corpus.get("keeps_text"):
                description = {"splits": write_text(corpus, parts, folder / "text")}
            if options.unit == "bytes":
                vocabulary, sizes = binarize_bytes(corpus, parts, options, folder)
                description = {"vocabulary": vocabulary, "splits": sizes}
            elif options.unit != "plain":
                work = prepare_pairs if options.source_lang else prepare_text
                description = work(corpus, parts, options, folder)
            shutil.rmtree(raw)
            write_json(folder / "preparation.json", {**settings, **description})
    except BaseException:
        # an empty folder, if nothing arrived
        with suppress(OSError):
            downloads.rmdir()
        raise
    shutil.rmtree(downloads, ignore_errors=True)
    print(json.dumps({**settings, **description}, indent=2, ensure_ascii=False), flush=True)


def parse(arguments: list[str]) -> tuple[str, Corpus, argparse.Namespace]:
    """Return the name and the declaration of the corpus, and its options."""
    corpora = read_yaml("corpora.yaml")
    name = arguments[0] if arguments and arguments[0][:1] != "-" else ""
    if not name:
        parser = argparse.ArgumentParser(
            prog=name_commands("python -m scripts.prepare"),
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("NAME", nargs="?", help="corpus; NAME --help prints its options")
        parser.add_argument("--list", action="store_true", help="list the corpora")
        if not parser.parse_args(arguments).list:
            parser.error("give the NAME of a corpus, or --list")
        for each, corpus in corpora.items():
            print(f"{each:15}{corpus['what']}")
        raise SystemExit(0)
    corpus = find_corpus(name)
    parser = argparse.ArgumentParser(
        prog=name_commands(f"python -m scripts.prepare {name}"),
        description=f"{corpus['what']}\n\n{corpus['about']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, corpus)
    return name, corpus, parser.parse_args(arguments[1:])


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        name, corpus, options = parse(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.library = Path(sysconfig.get_path("stdlib"))
    return exit_status(lambda: prepare(name, corpus, options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
