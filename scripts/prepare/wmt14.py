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
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from sacrebleu.dataset import DATASETS

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts.prepare._bitext import Bitext
from scripts.prepare._sources import (
    BLOCK,
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
# newstest2014, whose sentences are taken from its SGM files as sacrebleu does for its references:
# scores compare.
TEST_SET = DATASETS["wmt14/full"]


@dataclass(frozen=True)
class Corpus:
    """Parallel text in an archive of the workshop.

    Args:
        name: its folder in OUTPUT/raw and the prefix of its files there.
        folder: that has the archive in each of the hosts.
        archive: file that has it.
        member: file in the archive, with {other} for the language beside English, {language}, and
            {side} for src or ref.
        checksum: of the archive, None where none is known: damage shows as it is unpacked.
        hosts: URLs.
    """

    name: str
    folder: str
    archive: str
    member: str
    checksum: Checksum | None = None
    hosts: tuple[str, ...] = HOSTS

    def members(self, languages: tuple[str, str]) -> dict[str, str]:
        """Language of each file in the archive."""
        other = languages[1]
        return {
            self.member.format(other=other, language=language, side=side): language
            for language, side in zip(languages, ("src", "ref"), strict=True)
        }

    def check(self, path: Path, label: str) -> None:
        """Check an archive; label tells what it is.

        Raises ValueError when it has another checksum.
        """
        if self.checksum:
            with open_with_progress(path, f"check {self.archive}") as stream:
                self.checksum.check(stream, label)


EUROPARL = Corpus(
    name="europarl",
    folder="wmt13",
    archive="training-parallel-europarl-v7.tgz",
    member="europarl-v7.{other}-en.{language}",
    checksum=Checksum("sha256", "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7"),
)
COMMON_CRAWL = Corpus(
    name="commoncrawl",
    folder="wmt13",
    archive="training-parallel-commoncrawl.tgz",
    member="commoncrawl.{other}-en.{language}",
    checksum=Checksum("sha256", "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5"),
)
NEWS_COMMENTARY = Corpus(
    name="news-commentary",
    folder="wmt14",
    archive="training-parallel-nc-v9.tgz",
    member="news-commentary-v9.{other}-en.{language}",
    checksum=Checksum("sha256", "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485"),
)
UNITED_NATIONS = Corpus(
    name="un",
    folder="wmt13",
    archive="training-parallel-un.tgz",
    member="undoc.2000.{other}-en.{language}",
)
GIGA = Corpus(
    name="giga-fren",
    folder="wmt10",
    archive="training-giga-fren.tar",
    member="giga-fren.release2.fixed.{language}.gz",
)
NEWSTEST2014 = Corpus(
    name="newstest2014",
    folder="wmt14",
    archive="test-full.tgz",
    member="newstest2014-{other}en-{side}.{language}.sgm",
    checksum=Checksum("md5", TEST_SET.md5[0]),
)
NEWSTEST2013 = Corpus(
    name="newstest2013",
    folder="wmt17/translation-task",
    archive="dev.tgz",
    member="newstest2013.{language}",
    checksum=Checksum("sha256", "9d5ff04a28496b7796904ea65e50e3837bab14dbdca88b1e063105f17513dca9"),
    hosts=DATA_HOSTS,
)
TRAIN = {
    "en-de": (EUROPARL, COMMON_CRAWL, NEWS_COMMENTARY),
    "en-fr": (EUROPARL, COMMON_CRAWL, UNITED_NATIONS, NEWS_COMMENTARY, GIGA),
}
# Space that the preparation of a pair takes at most, with the archives.
DISK_BYTES = {"en-de": 12_000_000_000, "en-fr": 75_000_000_000}
VALID = NEWSTEST2013
TESTS = (NEWSTEST2014, NEWSTEST2013)


def copy(stream: BinaryIO, target: Path) -> str:
    """Write a stream to a file and return its SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while block := stream.read(BLOCK):
            file.write(block)
            digest.update(block)
    return digest.hexdigest()


def extract(
    corpus: Corpus, languages: tuple[str, str], archive: Path, label: str, target: Path
) -> dict[str, str]:
    """Write the two raw texts of a corpus to a new folder and return their SHA-256.

    Args:
        corpus: what is wanted.
        languages: source and target.
        archive: has it.
        label: of the archive in messages.
        target: the folder.

    Raises ValueError when the archive lacks a text or is damaged.
    """
    target.mkdir()
    members = corpus.members(languages)
    digests = {}

    def take(name: str, stream: BinaryIO) -> None:
        text = target / f"{corpus.name}.{members[name]}"
        suffix = Path(name).suffix
        path = text.with_name(text.name + suffix) if suffix in (".gz", ".sgm") else text
        digests[members[name]] = copy(stream, path)
        if suffix == ".sgm":
            # What it publishes of this would download the archive to a folder of its own.
            TEST_SET._convert_format(str(path), str(text))
            path.unlink()
            digests[members[name]] = hashlib.sha256(text.read_bytes()).hexdigest()

    read_members(archive, list(members), take, label, f"unpack {corpus.name}")
    return dict(sorted(digests.items()))


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
