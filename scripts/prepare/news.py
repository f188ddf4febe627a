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
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from scripts._shared.command_line import command_parser
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare import _bpe as subword_units
from scripts.prepare._data_set import SPLITS
from scripts.prepare._dictionary import counted_dictionary
from scripts.prepare._lines import TextSizes, check_workers, read_lines
from scripts.prepare._moses import VISIBLE, check_language, tokenize
from scripts.prepare._preprocess import preprocess_command
from scripts.prepare._steps import Steps, run_script
from scripts.prepare._words import SplitSizes, binarize_splits

# Validation and test "are both composed of 5000 news articles" (4.1).
HELD_OUT = 5000
SEED = 1
SUFFIX = re.compile(r"\.txt(\.gz)?$")
MOST_WORKERS = 16


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
        digest = hashlib.sha256()
        for name in sorted(name for names in self.files.values() for name in names):
            status = (self.folder / name).stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]


def find_files(folder: Path) -> dict[str, str]:
    """Names of the texts in a folder and below it, sorted, by what they are without a suffix.

    Raises ValueError when there are none, or one is there twice.
    """
    if not folder.is_dir():
        raise ValueError(f"--input {short(folder)} is no folder: give the folder of the articles")
    found: dict[str, str] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            if not SUFFIX.search(name):
                continue
            path = Path(place, name).relative_to(folder).as_posix()
            stem = SUFFIX.sub("", path)
            if stem in found:
                raise ValueError(
                    f"--input {short(folder)} has {found[stem]} and {path}: remove one of them"
                )
            found[stem] = path
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
    for option, number in (("valid", valid), ("test", test)):
        if number < 1:
            raise ValueError(f"--{option} {number} is no number of articles: give 1 or more")
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
    with tqdm(desc="read", unit=" articles", unit_scale=True, disable=None) as bar:
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


def check_articles(sizes: TextSizes, expected: dict, name: str) -> None:
    """Check that a text has the lines and the articles of its split.

    Raises ValueError when it has others.
    """
    lines, articles = sizes.lines, sizes.empty + 1
    if (lines, articles) != (expected["lines"], expected["articles"]):
        raise ValueError(
            f"{name} has {lines:,} lines of {articles:,} articles, the input "
            f"{expected['lines']:,} of {expected['articles']:,}: leave the input as it is while it "
            "is prepared, and run the same command again"
        )


def binarize(output: Path, sizes: dict[str, dict], workers: int, target: Path) -> dict:
    """Write the folder for fairseq and return its symbols and each split's unknown units.

    Args:
        output: has the units of each split.
        sizes: lines and words, which are units, of each split.
        workers: number of processes.
        target: a new folder for the binarized data.

    Raises ValueError when fairseq-preprocess fails or writes something else.
    """
    texts = {split: output / "bpe" / f"{split}.txt" for split in SPLITS}
    dictionary = counted_dictionary(subword_units.count_words([texts["train"]]))
    target.mkdir()
    dictionary.save(str(target / "dict.txt"))
    # fairseq binarizes the first part of a text after the others.
    processes = workers + 1 if workers > 1 else 1
    command = preprocess_command(texts, target, processes, "--srcdict", short(target / "dict.txt"))
    # Beside the folder, which does not outlive a failure.
    log = output / "preprocess.log"
    expected = {
        split: SplitSizes(lines=size["lines"], tokens=size["words"] + size["lines"])
        for split, size in sizes.items()
    }
    dictionaries = dict.fromkeys(sizes, dictionary)
    unknown = binarize_splits(command, target, log, expected, dictionaries)
    return {"symbols": len(dictionary) - dictionary.nspecial, "unknown": unknown}


def prepare(options: argparse.Namespace) -> dict:
    """Do the steps that are not done yet and return what is in preparation.json.

    Raises ValueError when an option, the input or the output cannot be used.
    """
    output, workers = options.output, options.workers
    check_workers(workers)
    check_language(options.language)
    subword_units.check_size(options.bpe_size)
    subword_units.check_tool(options.bpe_tool)
    if output.is_relative_to(options.input):
        raise ValueError(
            f"--output {short(output)} lies within --input {short(options.input)}, where its texts "
            "would be taken for articles: give a folder beside it"
        )
    steps = Steps(output, "news")
    drawn = {option: getattr(options, option) for option in ("valid", "test", "seed")}
    news = find_news(options.input, drawn)
    drawn.update(news.drawn or {})
    found = steps.run(
        "held_out.json", {"input": news.fingerprint(), **drawn}, [], partial(survey, news)
    )

    def tokens_of(split: str, target: Path) -> dict:
        lines, expected = news.lines(split), found[split]
        sizes = tokenize(lines, expected["lines"], target, options.language, workers)
        check_articles(sizes, expected, f"tokens/{split}.txt")
        return asdict(sizes)

    def codes_of_training(target: Path) -> int:
        return subword_units.learn([texts["train"]], target, options.bpe_size)

    def units_of(split: str, target: Path) -> dict:
        codes, source, expected = output / "bpe" / "codes", texts[split], found[split]
        tool = options.bpe_tool
        sizes = subword_units.apply(tool, codes, source, expected["lines"], target, workers)
        check_articles(sizes, expected, f"bpe/{split}.txt")
        return asdict(sizes)

    texts = {split: output / "tokens" / f"{split}.txt" for split in SPLITS}
    language, tool = {"language": options.language}, {"bpe-tool": options.bpe_tool}
    tokens, units = {}, {}
    for split in SPLITS:
        tokens[split] = steps.run(
            f"tokens/{split}.txt", language, ["held_out.json"], partial(tokens_of, split)
        )
    size = {"bpe-size": options.bpe_size}
    merges = steps.run("bpe/codes", size, ["tokens/train.txt"], codes_of_training)
    if merges < options.bpe_size:
        print(f"bpe/codes: {merges:,} of {options.bpe_size:,}: no other pair is there twice")
    for split in SPLITS:
        sources = ["bpe/codes", f"tokens/{split}.txt"]
        units[split] = steps.run(f"bpe/{split}.txt", tool, sources, partial(units_of, split))
    sources = [f"bpe/{split}.txt" for split in SPLITS]
    binarized = steps.run("bin", {}, sources, partial(binarize, output, units, workers))
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
        **size,
        **tool,
        "merges": merges,
        "symbols": binarized["symbols"],
        "versions": {name: version(name) for name in ("sacremoses", "subword-nmt")},
        "splits": splits,
    }
    write_json(output / "preparation.json", description)
    return description


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--input", type=Path, required=True, metavar="FOLDER", help="folder of the news")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    add("--language", default="en", help="code of Moses' rules (default: %(default)s)")
    add("--bpe-size", type=int, default=60_000, metavar="N", help="merges (default: %(default)s)")
    add(
        "--bpe-tool",
        default=subword_units.FASTBPE,
        metavar="|".join(subword_units.TOOLS),
        help="what applies the codes, to the same effect (default: %(default)s)",
    )
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    add(
        "--workers", type=int, default=workers, metavar="N", help="processes (default: %(default)s)"
    )
    for split in ("valid", "test"):
        add(
            f"--{split}",
            type=int,
            metavar="N",
            help=f"articles drawn for the split (default: {HELD_OUT}); not if it is split already",
        )
    add("--seed", type=int, metavar="N", help=f"what they are drawn with (default: {SEED})")
    options = parser.parse_args()
    options.input, options.output = options.input.resolve(), options.output.resolve()
    return options


def main() -> int:
    """Command line of the script; returns its exit status."""
    options = parse()
    return run_script(lambda: print(json.dumps(prepare(options), indent=2)), options.output)


if __name__ == "__main__":
    sys.exit(main())
