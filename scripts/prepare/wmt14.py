"""WMT14 English-German or English-French in joint BPE units for fairseq's translation.

    python -m scripts.prepare.wmt14 --pair en-de --output data/wmt14_en_de

Downloads the archives of the workshop, or takes them from the folder of --from, and prepares their
texts as scripts.prepare.translation does, with the same further options. It trains on all that the
workshop gave for the pair, validates on newstest2013 and tests on newstest2014 (test) and
newstest2013 (test1), both whole.

OUTPUT/archives       what is downloaded, until all is done; an interrupted download is gone on with
OUTPUT/raw            a folder a corpus, with its two raw texts
and the rest as scripts.prepare.translation writes it.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts.prepare._bitext import Bitext
from scripts.prepare._sources import (
    Checksum,
    add_source_options,
    download,
    open_with_progress,
    read_members,
)
from scripts.prepare._steps import Steps, check_space, file_sizes, remove
from scripts.prepare.translation import add_options, check_options, prepare, test_parts

HOSTS = ("https://www.statmt.org", "http://www.statmt.org")
DATA_HOSTS = ("https://data.statmt.org", "http://data.statmt.org")
TEST_SET = DATASETS["wmt14/full"]


@dataclass(frozen=True)
class Corpus:
    """Parallel text in an archive of the workshop.

    Args:
        name: its folder in OUTPUT/raw and the prefix of its files there.
        folder: that has the archive in each of the hosts.
        archive: file that has it.
        checksum: of the archive, None where none is known: damage shows as it is unpacked.
        member: file in the archive, with {other} for the language beside English and {language};
            None for the test set, whose sentences sacrebleu takes from it: scores compare.
        hosts: URLs.
    """

    name: str
    folder: str
    archive: str
    checksum: Checksum | None
    member: str | None
    hosts: tuple[str, ...] = HOSTS

    def check(self, path: Path, label: str) -> None:
        """Raise ValueError, naming label, when an archive has another checksum."""
        if self.checksum:
            with open_with_progress(path, f"check {self.archive}") as stream:
                self.checksum.check(stream, label)


EUROPARL = Corpus(
    "europarl",
    "wmt13",
    "training-parallel-europarl-v7.tgz",
    Checksum("sha256", "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7"),
    "europarl-v7.{other}-en.{language}",
)
COMMON_CRAWL = Corpus(
    "commoncrawl",
    "wmt13",
    "training-parallel-commoncrawl.tgz",
    Checksum("sha256", "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5"),
    "commoncrawl.{other}-en.{language}",
)
NEWS_COMMENTARY = Corpus(
    "news-commentary",
    "wmt14",
    "training-parallel-nc-v9.tgz",
    Checksum("sha256", "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485"),
    "news-commentary-v9.{other}-en.{language}",
)
UNITED_NATIONS = Corpus(
    "un", "wmt13", "training-parallel-un.tgz", None, "undoc.2000.{other}-en.{language}"
)
GIGA = Corpus(
    "giga-fren",
    "wmt10",
    "training-giga-fren.tar",
    None,
    "giga-fren.release2.fixed.{language}.gz",
)
NEWSTEST2014 = Corpus(
    "newstest2014", "wmt14", "test-full.tgz", Checksum("md5", TEST_SET.md5[0]), None
)
NEWSTEST2013 = Corpus(
    "newstest2013",
    "wmt17/translation-task",
    "dev.tgz",
    Checksum("sha256", "9d5ff04a28496b7796904ea65e50e3837bab14dbdca88b1e063105f17513dca9"),
    "newstest2013.{language}",
    DATA_HOSTS,
)
TRAIN = {
    "en-de": (EUROPARL, COMMON_CRAWL, NEWS_COMMENTARY),
    "en-fr": (EUROPARL, COMMON_CRAWL, UNITED_NATIONS, NEWS_COMMENTARY, GIGA),
}
# Space that the preparation of a pair takes at most, with the archives.
DISK_BYTES = {"en-de": 12_000_000_000, "en-fr": 75_000_000_000}
VALID = NEWSTEST2013
TESTS = (NEWSTEST2014, NEWSTEST2013)


def extract_test_set(corpus: Corpus, languages: Sequence[str], archive: Path, target: Path) -> None:
    """Write the sentences that sacrebleu takes from its archive to a folder."""
    pair = "-".join(languages)
    with TemporaryDirectory() as folder:
        # An absolute name and a file's URL: it works in this folder and without a network.
        facts = {"data": [archive.as_uri()], "langpairs": {pair: TEST_SET.langpairs[pair]}}
        test_set = FakeSGMLDataset(folder, **facts)
        files = [test_set.get_source_file(pair), *test_set.get_reference_files(pair)]
        for language, file in zip(languages, files, strict=True):
            shutil.copyfile(file, target / f"{corpus.name}.{language}")


def extract(
    corpus: Corpus, languages: Sequence[str], archive: Path, label: str, target: Path
) -> dict[str, int]:
    """Write the raw texts of a corpus in two languages to a new folder and return their bytes.

    Raises ValueError, naming the label of its checked archive, when that lacks one or is damaged.
    """
    target.mkdir()
    if corpus.member is None:
        extract_test_set(corpus, languages, archive, target)
    else:
        members = {corpus.member.format(other=languages[1], language=one): one for one in languages}

        def take(name: str, stream: BinaryIO) -> None:
            suffix = ".gz" if name.endswith(".gz") else ""
            with (target / f"{corpus.name}.{members[name]}{suffix}").open("wb") as file:
                shutil.copyfileobj(stream, file)

        read_members(archive, list(members), take, label, f"unpack {corpus.name}")
    return file_sizes(target)


def find_archive(corpus: Corpus, options: argparse.Namespace, steps: Steps) -> tuple[Path, str]:
    """Checked archive of a corpus, and what it is called in messages.

    Raises ValueError when it cannot be had or is not what was published.
    """
    if options.source:
        path = options.source / corpus.archive
        corpus.check(path, f"--from {short(path)}")
        return path, f"--from {short(path)}"
    # It is in the folder before any step is.
    steps.claim()
    folder = steps.output / "archives"
    folder.mkdir(exist_ok=True)
    mirrors = [*options.mirrors, *(f"{host}/{corpus.folder}" for host in corpus.hosts)]
    path = download(corpus.archive, mirrors, folder, corpus.check)
    return path, short(path)


def check_source(folder: Path, corpora: Sequence[Corpus]) -> None:
    """Raise ValueError when the folder of --from lacks an archive."""
    lacking = [corpus.archive for corpus in corpora if not (folder / corpus.archive).is_file()]
    if lacking:
        raise ValueError(
            f"--from {short(folder)} lacks {', '.join(lacking)}: give a folder that has them, or "
            "leave the option out to download them"
        )


def prepare_pair(options: argparse.Namespace) -> None:
    """Do the work of the command.

    Raises ValueError when an option, an archive or the output cannot be used.
    """
    if options.pair not in TRAIN:
        raise ValueError(f"--pair {options.pair} is unknown: give {' or '.join(TRAIN)}")
    train, name = TRAIN[options.pair], f"WMT14 {options.pair}"
    source, target = languages = tuple(options.pair.split("-"))
    check_options(options, languages)
    steps = Steps(options.output, name)
    # Each once, though newstest2013 validates and tests.
    names = {corpus: f"raw/{corpus.name}" for corpus in (*train, VALID, *TESTS)}
    missing = [corpus for corpus in names if not steps.is_complete(names[corpus], {}, [])]
    if missing:
        here = sum(file_sizes(options.output).values())
        check_space(name, DISK_BYTES[options.pair] - here, options.output)
        if options.source:
            check_source(options.source, missing)
    for corpus, raw in names.items():
        path, label = find_archive(corpus, options, steps) if corpus in missing else (None, "")
        steps.run(raw, {}, [], partial(extract, corpus, languages, path, label))
    prefixes = {corpus: steps.output / raw / corpus.name for corpus, raw in names.items()}
    parts = {
        "train": tuple(prefixes[corpus] for corpus in train),
        "valid": (prefixes[VALID],),
        **test_parts([prefixes[corpus] for corpus in TESTS]),
    }
    codes = {"source-lang": source, "target-lang": target}
    prepare(steps, Bitext(languages, parts), options, codes, list(names.values()))
    remove(steps.output / "archives")


def main() -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--pair", required=True, metavar="|".join(TRAIN), help="source and target language"
    )
    text = "folder that has the archives, instead of downloading them"
    add_source_options(parser, "DIR", text)
    add_options(parser)
    options = parser.parse_args()
    kept = "complete steps and what was downloaded are kept, run the same command again"
    return exit_status(lambda: prepare_pair(options), kept, options.output)


if __name__ == "__main__":
    sys.exit(main())
