"""WMT14 English-German or English-French in joint BPE units for fairseq's translation.

    python -m scripts.prepare.wmt14 --pair en-de --output data/wmt14_en_de

Downloads the archives of the workshop, or takes them from the folder of --from, and prepares their
texts as scripts.prepare.translation does, with the same further options. It trains on all that the
workshop gave for the pair, validates on newstest2013 and tests on newstest2014 (test) and
newstest2013 (test1), both whole.

OUTPUT/download       archives, until all is done; one that was interrupted is begun anew
OUTPUT/raw            the raw texts of each corpus
and the rest as scripts.prepare.translation writes it.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts.prepare._downloads import add_source_options, check, download, members, undamaged
from scripts.prepare._stages import DOWNLOAD, Stages
from scripts.prepare.translation import Bitext, add_options, check_options, prepare, test_parts


class Corpus(NamedTuple):
    """Parallel text in an archive of the workshop.

    Args:
        name: the prefix of its files in OUTPUT/raw.
        folder: that has the archive at its host.
        archive: file that has it.
        checksum: of the archive, None where none is known: damage shows as it is unpacked.
        member: file in the archive, with {other} for the language beside English and {language};
            None for the test set, whose sentences sacrebleu takes from it: scores compare.
        host: without the protocol.
    """

    name: str
    folder: str
    archive: str
    checksum: str | None
    member: str | None
    host: str = "www.statmt.org"


EUROPARL = Corpus(
    "europarl",
    "wmt13",
    "training-parallel-europarl-v7.tgz",
    "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    "europarl-v7.{other}-en.{language}",
)
COMMON_CRAWL = Corpus(
    "commoncrawl",
    "wmt13",
    "training-parallel-commoncrawl.tgz",
    "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    "commoncrawl.{other}-en.{language}",
)
NEWS_COMMENTARY = Corpus(
    "news-commentary",
    "wmt14",
    "training-parallel-nc-v9.tgz",
    "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
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
    "newstest2014", "wmt14", "test-full.tgz", "md5:a8cd784e006feb32ac6f3d9ec7eb389a", None
)
NEWSTEST2013 = Corpus(
    "newstest2013",
    "wmt17/translation-task",
    "dev.tgz",
    "sha256:9d5ff04a28496b7796904ea65e50e3837bab14dbdca88b1e063105f17513dca9",
    "newstest2013.{language}",
    "data.statmt.org",
)
TRAIN = {
    "en-de": (EUROPARL, COMMON_CRAWL, NEWS_COMMENTARY),
    "en-fr": (EUROPARL, COMMON_CRAWL, UNITED_NATIONS, NEWS_COMMENTARY, GIGA),
}
VALID = NEWSTEST2013
TESTS = (NEWSTEST2014, NEWSTEST2013)


def extract(corpus: Corpus, languages: Sequence[str], archive: Path, target: Path) -> None:
    """Write the raw texts of a corpus in two languages from its archive to a folder."""
    if corpus.member is None:
        from sacrebleu.dataset import DATASETS
        from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

        pair = "-".join(languages)
        with TemporaryDirectory() as folder:
            # An absolute name and a file's URL: it works in this folder and without a network.
            langpairs = {pair: DATASETS["wmt14/full"].langpairs[pair]}
            test_set = FakeSGMLDataset(folder, data=[archive.as_uri()], langpairs=langpairs)
            files = [test_set.get_source_file(pair), *test_set.get_reference_files(pair)]
            for language, file in zip(languages, files, strict=True):
                shutil.copyfile(file, target / f"{corpus.name}.{language}")
        return
    names = {corpus.member.format(other=languages[1], language=one): one for one in languages}
    with undamaged(short(archive)):
        for name, stream in members(archive, list(names), short(archive)):
            suffix = ".gz" if name.endswith(".gz") else ""
            with (target / f"{corpus.name}.{names[name]}{suffix}").open("wb") as file:
                shutil.copyfileobj(stream, file)


def make_raw(
    corpora: Sequence[Corpus], languages: Sequence[str], options: argparse.Namespace, target: Path
) -> None:
    """Fill a folder with the raw texts of all corpora, of archives that are here or downloaded."""
    archives = {}
    for corpus in corpora:
        if options.source:
            path = options.source / corpus.archive
            check(path, corpus.checksum, f"--from {short(path)}")
        else:
            known = [f"{kind}://{corpus.host}/{corpus.folder}" for kind in ("https", "http")]
            folder = options.output / DOWNLOAD
            path = download(corpus.archive, options.mirrors + known, corpus.checksum, folder)
        archives[corpus] = path
    for corpus, path in archives.items():
        print(f"unpack {corpus.archive}", flush=True)
        try:
            extract(corpus, languages, path, target)
        except ValueError:
            # a mirror may have sent anything
            if not options.source and not corpus.checksum:
                path.unlink()
            raise


def prepare_pair(options: argparse.Namespace) -> None:
    """Do the work of the command."""
    source, target = languages = tuple(options.pair.split("-"))
    check_options(options, languages)
    train = TRAIN[options.pair]
    # Each once, though newstest2013 validates and tests.
    corpora = list(dict.fromkeys((*train, VALID, *TESTS)))
    stages = Stages(options.output, {"source-lang": source, "target-lang": target})
    stages.run("raw", partial(make_raw, corpora, languages, options))
    raw = options.output / "raw"
    parts = {
        "train": tuple(raw / corpus.name for corpus in train),
        "valid": (raw / VALID.name,),
        **test_parts([raw / corpus.name for corpus in TESTS]),
    }
    prepare(stages, Bitext(languages, parts), options)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--pair", required=True, choices=TRAIN, help="source and target language")
    add_source_options(parser, "DIR", "folder that has the archives, instead of downloading them")
    add_options(parser)
    options = parser.parse_args(arguments)
    return exit_status(partial(prepare_pair, options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
