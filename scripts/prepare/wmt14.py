"""WMT14 English-German or English-French in joint BPE units for fairseq's translation.

    python -m scripts.prepare.wmt14 --pair en-de --output data/wmt14_en_de

The command downloads the archives of the workshop, or takes them from the --from folder, and
prepares their texts as scripts.prepare.translation does, with the same other options. The training
part is all that the workshop gave for the pair, the validation part is newstest2013, and the test
parts are newstest2014 (test) and newstest2013 (test1), both complete.

OUTPUT/download       archives, removed at the end; an interrupted download starts over
OUTPUT/raw            the raw texts of each archive
and the files of scripts.prepare.translation.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts._shared.command_line import exit_status
from scripts.prepare._downloads import Archive, add_source_option
from scripts.prepare._stages import Stages, preparation_parser
from scripts.prepare.translation import add_options, check_options, find_files, prepare_pair

# {other} is the language other than English; the part before .{language} is a prefix of texts.
EUROPARL = Archive(
    "www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    ["europarl-v7.{other}-en.{language}"],
    "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
)
COMMON_CRAWL = Archive(
    "www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    ["commoncrawl.{other}-en.{language}"],
    "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
)
NEWS_COMMENTARY = Archive(
    "www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    ["news-commentary-v9.{other}-en.{language}"],
    "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
)
# No checksum of the next two archives is known; unpacking them reveals damage.
UNITED_NATIONS = Archive(
    "www.statmt.org/wmt13/training-parallel-un.tgz", ["undoc.2000.{other}-en.{language}"]
)
GIGA = Archive(
    "www.statmt.org/wmt10/training-giga-fren.tar", ["giga-fren.release2.fixed.{language}.gz"]
)
NEWSTEST2013 = Archive(
    "data.statmt.org/wmt17/translation-task/dev.tgz",
    ["newstest2013.{language}"],
    "sha256:9d5ff04a28496b7796904ea65e50e3837bab14dbdca88b1e063105f17513dca9",
)
# sacrebleu's archive of the test set, so that scores are comparable.
NEWSTEST2014 = Archive(
    "www.statmt.org/wmt14/test-full.tgz",
    ["newstest2014.{language}"],
    "md5:a8cd784e006feb32ac6f3d9ec7eb389a",
)
TRAIN = {
    "en-de": (EUROPARL, COMMON_CRAWL, NEWS_COMMENTARY),
    "en-fr": (EUROPARL, COMMON_CRAWL, UNITED_NATIONS, NEWS_COMMENTARY, GIGA),
}
TESTS = (NEWSTEST2014, NEWSTEST2013)


def write_newstest2014(archive: Path, languages: Sequence[str], target: Path) -> None:
    """Write the sentences of the test set to a folder."""
    from sacrebleu.dataset import DATASETS
    from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

    pair = "-".join(languages)
    with TemporaryDirectory() as folder:
        # with an absolute name and a file URL, sacrebleu uses this folder and no network
        langpairs = {pair: DATASETS["wmt14/full"].langpairs[pair]}
        test_set = FakeSGMLDataset(folder, data=[archive.as_uri()], langpairs=langpairs)
        files = [test_set.get_source_file(pair), *test_set.get_reference_files(pair)]
        for language, file in zip(languages, files, strict=True):
            shutil.copyfile(file, target / f"newstest2014.{language}")


def unpack_archives(
    archives: Sequence[Archive],
    languages: Sequence[str],
    options: argparse.Namespace,
    target: Path,
) -> None:
    """Write the raw texts of all archives to a folder; download archives if necessary."""
    for archive in archives:
        print(f"unpack {archive.name}", flush=True)
        if archive.name == NEWSTEST2014.name:
            write_newstest2014(archive.path(options), languages, target)
            continue
        (member,) = archive.members
        names = [member.format(other=languages[1], language=language) for language in languages]
        replace(archive, members=names).unpack(options, target)


def prefixes(archives: Sequence[Archive], other: str, folder: Path) -> list[Path]:
    """Return the prefixes of the archives' texts in a folder."""
    names = (archive.members[0].partition(".{language}")[0] for archive in archives)
    return [folder / name.format(other=other) for name in names]


def prepare(options: argparse.Namespace) -> None:
    """Do the work of the command."""
    source, target = languages = tuple(options.pair.split("-"))
    check_options(options, languages)
    stages = Stages(options.output, {"source-lang": source, "target-lang": target})
    archives = *TRAIN[options.pair], *TESTS
    stages.run("raw", unpack_archives, archives, languages, options)
    train, tests = (
        prefixes(part, target, options.output / "raw") for part in (TRAIN[options.pair], TESTS)
    )
    # newstest2013 is the second test part, too
    prepare_pair(stages, find_files(languages, train, tests[1], tests), options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    parser.add_argument("--pair", required=True, choices=TRAIN, help="source and target language")
    add_source_option(parser, "the archives")
    add_options(parser)
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
