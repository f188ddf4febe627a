"""News articles in Moses tokens and BPE units for fairseq, whole and in order.

    python -m scripts.prepare.news --input news --output data/news

The data way of product-key memory (Lample et al. 2019, 4.1). INPUT holds one article a file, *.txt
or *.txt.gz in any folder, of which whole articles are drawn for validation and test; or it holds
train.txt, valid.txt and test.txt (or .txt.gz) with empty lines between articles. Each line is a
paragraph. In the result each line ends with </s>, and an empty line, a lone </s>, is between two
articles. The codes are learned on the training part only.

OUTPUT/held_out.json          files that validate and test
OUTPUT/tokens, OUTPUT/bpe     {train,valid,test}.txt, as Moses tokens and as units; bpe/codes
OUTPUT/bin                    dict.txt and {train,valid,test}.{bin,idx}
OUTPUT/preparation.json       options and sizes, to turn perplexities of units into those of words
OUTPUT/steps.json             the steps that are done: they are not done again

With another option or a changed INPUT the script refuses to go on and names what to remove.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts._shared.command_line import check_at_least, command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare._binarize import NO_MADE_UP_SYMBOLS, count_symbols, preprocess
from scripts.prepare._lines import progress, read_lines
from scripts.prepare._published import SPLITS
from scripts.prepare._steps import INTERRUPTED, Steps, fingerprint, resolved
from scripts.prepare._subwords import (
    VERSIONS,
    VISIBLE,
    RawText,
    add_subword_options,
    check_language,
    check_subword_options,
    make_units,
)

# Validation and test "are both composed of 5000 news articles" (4.1).
HELD_OUT = 5000
SEED = 1
SUFFIX = re.compile(r"\.txt(\.gz)?$")


@dataclass(frozen=True)
class News:
    """Articles of the input.

    Args:
        folder: --input.
        files: names of the files of each split, in order.
        drawn: --valid, --test and --seed that they were drawn with, each file an article; None
            where the input is split already, with empty lines between articles.
    """

    folder: Path
    files: dict[str, list[str]]
    drawn: dict[str, int] | None

    def articles(self, split: str) -> Iterator[list[str]]:
        """Paragraphs of each article of a split, in order.

        Raises ValueError, naming the file, when one is not UTF-8 or has no text.
        """
        for name in self.files[split]:
            article: list[str] = []
            found = False
            for line in read_lines(self.folder / name):
                if VISIBLE.search(line):
                    article.append(line)
                    found = True
                elif article and self.drawn is None:
                    yield article
                    article = []
            if article:
                yield article
            if not found:
                raise ValueError(
                    f"--input {short(self.folder)}: {name} has no text: remove or replace it"
                )

    def lines(self, split: str) -> Iterator[str]:
        """Lines of a split's text: paragraphs, and an empty line between articles."""
        for number, article in enumerate(self.articles(split)):
            if number:
                yield ""
            yield from article

    def fingerprint(self) -> str:
        """Digest of the names, sizes and modification times of the files."""
        names = sorted(name for names in self.files.values() for name in names)
        return fingerprint((name, self.folder / name) for name in names)


def find_files(folder: Path) -> dict[str, str]:
    """Names of the texts in a folder and below it, sorted, by what they are without a suffix.

    Raises ValueError when there are none, or one is there twice.
    """
    if not folder.is_dir():
        raise ValueError(f"--input {short(folder)} is no folder: give the folder of the articles")
    found: dict[str, str] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        stem = SUFFIX.sub("", name)
        if stem == name or path.is_dir():
            continue
        if stem in found:
            raise ValueError(
                f"--input {short(folder)} has {found[stem]} and {name}: remove one of them"
            )
        found[stem] = name
    if not found:
        raise ValueError(
            f"--input {short(folder)} has no file *.txt or *.txt.gz: give the folder of the "
            "articles"
        )
    return dict(sorted(found.items()))


def hold_out(names: list[str], valid: int, test: int, seed: int) -> dict[str, list[str]]:
    """Names of the articles of each split, in their order, drawn at random.

    Raises ValueError when a split would be empty.
    """
    check_at_least(1, valid=valid, test=test)
    if valid + test >= len(names):
        raise ValueError(
            f"--valid {valid} and --test {test} leave none of {len(names)} articles to train on: "
            "give smaller numbers or more articles"
        )
    drawn = random.Random(seed).sample(range(len(names)), valid + test)
    places = dict.fromkeys(drawn[:valid], "valid") | dict.fromkeys(drawn[valid:], "test")
    files: dict[str, list[str]] = {split: [] for split in SPLITS}
    for number, name in enumerate(names):
        files[places.get(number, "train")].append(name)
    return files


def find_news(folder: Path, drawn: dict[str, int | None]) -> News:
    """Articles of a folder, with what was given of --valid, --test and --seed, None if not.

    Raises ValueError when the folder is not one of the two kinds or does not go with an option.
    """
    found = find_files(folder)
    label = f"--input {short(folder)}"
    given = {option: value for option, value in drawn.items() if value is not None}
    splits = [split for split in SPLITS if split in found]
    if not splits:
        given = {"valid": HELD_OUT, "test": HELD_OUT, "seed": SEED, **given}
        return News(folder, hold_out(list(found.values()), **given), given)
    for split in SPLITS:
        if split not in found:
            raise ValueError(
                f"{label} has {found[splits[0]]} but no {split}.txt: add it, or rename the former "
                "if it is an article"
            )
    others = [path for stem, path in found.items() if stem not in SPLITS]
    if others:
        raise ValueError(
            f"{label} has {found['train']} and {others[0]} beside it: remove the latter, or rename "
            f"{', '.join(SPLITS)} if they are articles"
        )
    if given:
        option, value = next(iter(given.items()))
        raise ValueError(
            f"--{option} {value} does not go with {label}, which is split already: leave it out"
        )
    return News(folder, {split: [found[split]] for split in SPLITS}, None)


def survey(news: News, target: Path) -> dict:
    """Read all, write what is held out, return articles, lines and bytes of each split."""
    sizes = {}
    with progress(desc="read", unit=" articles") as bar:
        for split in news.files:
            # Empty lines are between articles only.
            size = {"articles": 0, "lines": -1, "bytes": -1}
            for article in news.articles(split):
                size["articles"] += 1
                size["lines"] += len(article) + 1
                size["bytes"] += sum(len(line.encode()) + 1 for line in article) + 1
                bar.update()
            sizes[split] = size
    write_json(target, {split: news.files[split] for split in ("valid", "test")})
    return sizes


def binarize(output: Path, sizes: dict[str, dict], workers: int, target: Path) -> dict:
    """Write a new folder for fairseq; return its symbols and each split's unknown units.

    Raises ValueError when fairseq-preprocess fails or writes another number of lines or units.
    """
    texts = {split: output / "bpe" / f"{split}.txt" for split in SPLITS}
    # Each line ends with </s>.
    expected = {
        split: {"lines": size["lines"], "tokens": size["words"] + size["lines"]}
        for split, size in sizes.items()
    }
    log = output / "preprocess.log"
    unknown = preprocess(texts, target, log, expected, workers, *NO_MADE_UP_SYMBOLS)
    return {"symbols": count_symbols(target / "dict.txt"), "unknown": unknown}


def prepare(options: argparse.Namespace) -> None:
    """Do the steps that are not done yet and print what is in preparation.json.

    Raises ValueError when an option, the input or the output cannot be used.
    """
    output = options.output
    check_language(options.language)
    check_subword_options(options)
    if output.is_relative_to(options.input):
        raise ValueError(
            f"--output {short(output)} lies within --input {short(options.input)}, where its texts "
            "would be taken for articles: give a folder beside it"
        )
    steps = Steps(output, "news")
    drawn = {option: getattr(options, option) for option in ("valid", "test", "seed")}
    news = find_news(options.input, drawn)
    drawn.update(news.drawn or {})
    held_out = {"input": news.fingerprint(), **drawn}
    found = steps.run("held_out.json", held_out, [], partial(survey, news))

    texts = {}
    for split in SPLITS:
        sizes = {"lines": found[split]["lines"], "empty": found[split]["articles"] - 1}
        texts[f"{split}.txt"] = RawText(partial(news.lines, split), sizes, options.language)
    language = {"language": options.language}
    training, sources = ["train.txt"], ["held_out.json"]
    merges, tokens, units = make_units(steps, texts, training, sources, language, options)
    tokens, units = ({name[:-4]: size for name, size in sizes.items()} for sizes in (tokens, units))
    work = partial(binarize, output, units, options.workers)
    binarized = steps.run("bin", {}, [f"bpe/{name}" for name in texts], work)
    splits = {}
    for split in SPLITS:
        lines, words, pieces = units[split]["lines"], tokens[split]["words"], units[split]["words"]
        splits[split] = {
            **found[split],
            "words": words,
            "units": pieces,
            "unknown_units": binarized["unknown"][split],
            # Each line ends with </s>, which is predicted as well.
            "tokens": pieces + lines,
            "tokens_per_word": (pieces + lines) / (words + lines),
        }
    description = {
        **drawn,
        **language,
        "bpe-size": options.bpe_size,
        "bpe-tool": options.bpe_tool,
        "merges": merges,
        "symbols": binarized["symbols"],
        "versions": VERSIONS,
        "splits": splits,
    }
    write_json(output / "preparation.json", description)
    print(json.dumps(description, indent=2))


def main() -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--input", type=resolved, required=True, metavar="FOLDER", help="folder of the news")
    add("--output", type=resolved, required=True, metavar="DIR", help="folder of the result")
    add("--language", default="en", help="code of Moses' rules (default: %(default)s)")
    add_subword_options(parser, 60_000)
    for split in ("valid", "test"):
        add(
            f"--{split}",
            type=int,
            metavar="N",
            help=f"articles drawn for the split (default: {HELD_OUT}); not if it is split already",
        )
    add("--seed", type=int, metavar="N", help=f"what they are drawn with (default: {SEED})")
    options = parser.parse_args()
    return exit_status(lambda: prepare(options), INTERRUPTED, options.output)


if __name__ == "__main__":
    sys.exit(main())
