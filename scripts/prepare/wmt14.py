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
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from scripts._shared.command_line import command_parser
from scripts._shared.commands import short
from scripts.prepare._archives import open_with_progress, read_members
from scripts.prepare._bitext import Bitext
from scripts.prepare._checksums import BLOCK, Checksum
from scripts.prepare._corpus import check_space
from scripts.prepare._download import download
from scripts.prepare._sgm import check_same_sentences, read_sgm
from scripts.prepare._steps import Steps, file_sizes, remove, run_script
from scripts.prepare.translation import add_options, check_options, prepare, test_parts

HOSTS = ("https://www.statmt.org", "http://www.statmt.org")


@dataclass(frozen=True)
class Corpus:
    """Parallel text in an archive of the workshop.

    Args:
        name: its folder in OUTPUT/raw and the prefix of its files there.
        archive: file that has it.
        mirrors: URLs of folders that have the archive.
        member: file in the archive, with {other} for the language beside English, {language}, and
            {side} for src or ref.
        checksum: of the archive, None where none is known: damage shows as it is unpacked.
    """

    name: str
    archive: str
    mirrors: tuple[str, ...]
    member: str
    checksum: Checksum | None = None

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


def _corpus(name: str, folder: str, archive: str, member: str, *checksum: str) -> Corpus:
    mirrors = tuple(f"{host}/{folder}" for host in HOSTS)
    return Corpus(name, archive, mirrors, member, Checksum(*checksum) if checksum else None)


EUROPARL = _corpus(
    *("europarl", "wmt13", "training-parallel-europarl-v7.tgz"),
    "europarl-v7.{other}-en.{language}",
    *("sha256", "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7"),
)
COMMON_CRAWL = _corpus(
    *("commoncrawl", "wmt13", "training-parallel-commoncrawl.tgz"),
    "commoncrawl.{other}-en.{language}",
    *("sha256", "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5"),
)
NEWS_COMMENTARY = _corpus(
    *("news-commentary", "wmt14", "training-parallel-nc-v9.tgz"),
    "news-commentary-v9.{other}-en.{language}",
    *("sha256", "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485"),
)
UNITED_NATIONS = _corpus(
    *("un", "wmt13", "training-parallel-un.tgz"), "undoc.2000.{other}-en.{language}"
)
GIGA = _corpus(
    *("giga-fren", "wmt10", "training-giga-fren.tar"), "giga-fren.release2.fixed.{language}.gz"
)
NEWSTEST2014 = _corpus(
    *("newstest2014", "wmt14", "test-full.tgz"),
    "newstest2014-{other}en-{side}.{language}.sgm",
    *("md5", "a8cd784e006feb32ac6f3d9ec7eb389a"),
)
NEWSTEST2013 = Corpus(
    name="newstest2013",
    archive="dev.tgz",
    mirrors=tuple(
        f"{scheme}://data.statmt.org/wmt17/translation-task" for scheme in ("https", "http")
    ),
    member="newstest2013.{language}",
    checksum=Checksum("sha256", "9d5ff04a28496b7796904ea65e50e3837bab14dbdca88b1e063105f17513dca9"),
)


@dataclass(frozen=True)
class Pair:
    """What is prepared for a pair of languages.

    Args:
        train: what it trains on.
        disk_bytes: space that the preparation takes at most, with the archives.
    """

    train: tuple[Corpus, ...]
    disk_bytes: int


PAIRS = {
    "en-de": Pair((EUROPARL, COMMON_CRAWL, NEWS_COMMENTARY), 12_000_000_000),
    "en-fr": Pair((EUROPARL, COMMON_CRAWL, UNITED_NATIONS, NEWS_COMMENTARY, GIGA), 75_000_000_000),
}
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

    Raises ValueError when the archive lacks a text or is damaged, or a text cannot be read.
    """
    target.mkdir()
    members = corpus.members(languages)
    digests, sentences = {}, {}

    def take(name: str, stream: BinaryIO) -> None:
        language = members[name]
        path = target / f"{corpus.name}.{language}"
        if name.endswith(".sgm"):
            sentences[language] = read_sgm(stream, f"{label}, {name}")
            lines = "".join(f"{sentence.text}\n" for sentence in sentences[language])
            path.write_text(lines, encoding="utf-8", newline="\n")
            digests[language] = hashlib.sha256(lines.encode()).hexdigest()
        else:
            packed = name.endswith(".gz")
            digests[language] = copy(stream, path.with_name(path.name + ".gz" * packed))

    read_members(archive, list(members), take, label, f"unpack {corpus.name}")
    if sentences:
        source, other = (sentences[language] for language in languages)
        check_same_sentences(source, other, f"{label}, {corpus.name}")
    return dict(sorted(digests.items()))


def find_archive(corpus: Corpus, options: argparse.Namespace, steps: Steps) -> tuple[Path, str]:
    """Checked archive of a corpus, and what it is called in messages.

    Raises ValueError when it cannot be had or is not what was published.
    """
    if options.source is None:
        # It is in the folder before any step is.
        steps.claim()
        folder = steps.output / "archives"
        folder.mkdir(exist_ok=True)
        mirrors = [*options.mirrors, *corpus.mirrors]
        path = download(corpus.archive, mirrors, folder, corpus.check)
        return path, short(path)
    path = options.source / corpus.archive
    label = f"--from {short(path)}"
    corpus.check(path, label)
    return path, label


def check_source(folder: Path, corpora: Sequence[Corpus]) -> None:
    """Check that the folder of --from has all archives.

    Raises ValueError when it lacks some.
    """
    lacking = [corpus.archive for corpus in corpora if not (folder / corpus.archive).is_file()]
    if lacking:
        raise ValueError(
            f"--from {short(folder)} lacks {', '.join(lacking)}: give a folder that has them, or "
            "leave the option out to download them"
        )


def prepare_pair(options: argparse.Namespace) -> None:
    """Do the work of the script and print what is in preparation.json.

    Raises ValueError when an option, an archive or the output cannot be used.
    """
    if options.pair not in PAIRS:
        raise ValueError(f"--pair {options.pair} is unknown: give {' or '.join(PAIRS)}")
    pair = PAIRS[options.pair]
    source, target = languages = tuple(options.pair.split("-"))
    check_options(options, languages)
    steps = Steps(options.output, f"WMT14 {options.pair}")
    # Each once, though newstest2013 validates and tests.
    corpora = list(dict.fromkeys((*pair.train, VALID, *TESTS)))
    names = {corpus: f"raw/{corpus.name}" for corpus in corpora}
    missing = [corpus for corpus in corpora if not steps.is_complete(names[corpus], {}, [])]
    if missing:
        here = sum(file_sizes(options.output).values())
        check_space(f"WMT14 {options.pair}", pair.disk_bytes - here, options.output)
        if options.source:
            check_source(options.source, missing)
    for corpus, name in names.items():
        path, label = find_archive(corpus, options, steps) if corpus in missing else (None, "")
        steps.run(name, {}, [], partial(extract, corpus, languages, path, label))
    prefixes = {corpus: steps.output / name / corpus.name for corpus, name in names.items()}
    parts = {
        "train": tuple(prefixes[corpus] for corpus in pair.train),
        "valid": (prefixes[VALID],),
        **test_parts([prefixes[corpus] for corpus in TESTS]),
    }
    codes = {"source-lang": source, "target-lang": target}
    bitext = Bitext(languages, parts)
    description = prepare(steps, bitext, options, codes, list(names.values()))
    remove(steps.output / "archives")
    print(json.dumps(description, indent=2))


def main() -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--pair", required=True, metavar="|".join(PAIRS), help="source and target language"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="folder that has the archives, instead of downloading them",
    )
    group.add_argument(
        "--mirror",
        dest="mirrors",
        action="append",
        default=[],
        metavar="URL",
        help="folder to download from, tried before the known ones; may be given several times",
    )
    add_options(parser)
    options = parser.parse_args()
    options.output = options.output.resolve()
    options.source = options.source and options.source.resolve()
    return run_script(
        lambda: prepare_pair(options),
        options.output,
        "complete steps and what was downloaded are kept",
    )


if __name__ == "__main__":
    sys.exit(main())
