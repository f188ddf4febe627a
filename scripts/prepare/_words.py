"""Published texts that are words line by line."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts._shared.command_line import check_at_least, exit_status
from scripts._shared.commands import short
from scripts.prepare._binarize import (
    NO_MADE_UP_SYMBOLS,
    OTHER_WHITESPACE,
    VISIBLE_SPACE,
    check_vocabulary,
    load_srcdict,
    preprocess,
    write_units,
)
from scripts.prepare._downloads import Archive, data_set_parser
from scripts.prepare._lines import add_workers_option
from scripts.prepare._stages import SPLITS, Stages, file_digest


@dataclass(frozen=True)
class Words:
    """A data set of words; each line ends with </s>.

    Args:
        archives: published files with its texts.
        splits: the part of each text, by file name.
        vocabulary: number of symbols, as published.
        unlisted: number of those that are not in dict.txt, such as <unk> and the end of line.
        threshold: words seen less often in training become <unk>.
        ascii_blanks: only ASCII whitespace separates words, and only newlines separate lines.
    """

    archives: Sequence[Archive]
    splits: Mapping[str, str]
    vocabulary: int
    unlisted: int = 2
    threshold: int = 0
    ascii_blanks: bool = False


def write_texts(data_set: Words, options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write the text of each part into a folder, words with single spaces between them."""
    raw = folder / "raw"
    raw.mkdir()
    texts = {part: folder / f"{part}.txt" for part in SPLITS}
    for archive in data_set.archives:
        for path in archive.unpack(options, raw):
            lines = path.open(encoding="utf-8", newline="\n" if data_set.ascii_blanks else None)
            text = texts[data_set.splits[path.name]]
            with lines, text.open("a", encoding="utf-8", newline="\n") as file:
                for line in lines:
                    if data_set.ascii_blanks:
                        line = OTHER_WHITESPACE.sub(VISIBLE_SPACE, line)
                    file.write(" ".join(line.split()) + "\n")
    shutil.rmtree(raw)
    return texts


def write_plain(data_set: Words, options: argparse.Namespace, folder: Path) -> dict:
    """Write the texts alone; there are no sizes to describe."""
    write_texts(data_set, options, folder)
    return {}


def binarize(data_set: Words, options: argparse.Namespace, folder: Path) -> dict:
    """Binarize the texts into a folder; return the vocabulary size and the splits' sizes."""
    plain = folder / "plain"
    plain.mkdir()
    texts = write_texts(data_set, options, plain)
    dictionary_options = [*NO_MADE_UP_SYMBOLS, "--thresholdsrc", str(data_set.threshold)]
    if options.srcdict:
        load_srcdict(options.srcdict)
        dictionary_options = ["--srcdict", short(options.srcdict)]
    sizes = preprocess(texts, folder, options.workers, dictionary_options)
    shutil.rmtree(plain)
    with (folder / "dict.txt").open(encoding="utf-8") as symbols:
        vocabulary = sum(1 for _ in symbols) + data_set.unlisted
    if not options.srcdict:
        check_vocabulary(vocabulary, data_set.vocabulary)
    write_units(folder, "words")
    return {"vocabulary": vocabulary, "splits": sizes}


def prepare(data_set: Words, name: str, options: argparse.Namespace) -> None:
    """Make the --output folder, unless it is complete already."""
    check_at_least(1, workers=options.workers)
    settings = {"data_set": name, "srcdict": file_digest(options.srcdict)}
    stages = Stages(options.output, settings)
    if options.text:
        stages.finish(stages.run("text", write_plain, data_set, options))
    else:
        stages.finish(stages.run("bin", binarize, data_set, options))


def run(data_set: Words, description: str, arguments: list[str] | None = None) -> int:
    """Run the command of a data set, given its module's docstring; return the exit status."""
    parser = data_set_parser(description, data_set.archives)
    add_workers_option(parser)
    text = "write OUTPUT/text/{train,valid,test}.txt, and binarize nothing"
    parser.add_argument("--text", action="store_true", help=text)
    options, name = parser.parse_args(arguments), description.partition(",")[0]
    return exit_status(lambda: prepare(data_set, name, options), output=options.output)
