"""What the preparation of every published data set shares: options, checks, a folder or nothing.

OUTPUT/bin/             dict.txt and {train,valid,test}.{bin,idx}, as fairseq-preprocess writes them
OUTPUT/corpus.json      where the corpus comes from, with which options, and its sizes
OUTPUT.partial/         while the corpus is built; of a failed or interrupted run only the download
                        is kept there, which the next run goes on with
"""

import argparse
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from scripts._shared.command_line import command_parser
from scripts._shared.commands import short
from scripts.prepare._data_set import DataSet
from scripts.prepare._download import download


@dataclass(frozen=True)
class Request:
    """What the user asked for: options that every script has, by their names.

    Args:
        output: --output.
        source: --from, None to download.
        mirrors: --mirror, tried before those of the data set.
        srcdict: --srcdict, None for a new dictionary.
    """

    output: Path
    source: Path | None = None
    mirrors: tuple[str, ...] = ()
    srcdict: Path | None = None


# Writes FOLDER/bin from a checked source and returns what is to be told of the corpus.
Build = Callable[[Path, Path], dict]


def argument_parser(description: str, example: str) -> argparse.ArgumentParser:
    """Parser of the options that every script has; example is what --from names."""
    parser = command_parser(description)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder of the corpus"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help=f"take the data from here instead of downloading it: {example}",
    )
    source.add_argument(
        "--mirror",
        dest="mirrors",
        action="append",
        default=[],
        metavar="URL",
        help="folder to download from, tried before the known ones; may be given several times",
    )
    parser.add_argument(
        "--srcdict",
        type=Path,
        metavar="FILE",
        help="dict.txt to binarize with, for a model trained elsewhere, instead of a new one",
    )
    return parser


def request_of(arguments: argparse.Namespace) -> Request:
    """Request that parsed options make."""
    return Request(
        output=arguments.output.resolve(),
        source=arguments.source and arguments.source.resolve(),
        mirrors=tuple(arguments.mirrors),
        srcdict=arguments.srcdict and arguments.srcdict.resolve(),
    )


def check_space(name: str, needed: int, output: Path) -> None:
    """Check that the disk of output has the bytes that a preparation needs.

    Raises ValueError when there is too little.
    """
    existing = next(folder for folder in output.parents if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"--output {short(output)}: {name} takes up to {needed / 1e9:.2f}"
            f" GB while it is prepared, {free / 1e9:.2f} GB are free: make room or give a folder "
            "on another disk"
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a dictionary file.

    Raises ValueError when it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(
            f"--srcdict {short(path)} cannot be read ({error.strerror}): "
            "give the dict.txt of the model"
        ) from error


def is_complete(output: Path, settings: Mapping[str, str | None]) -> bool:
    """Whether output holds the corpus already.

    Raises ValueError when it holds something else, or the corpus with other options.
    """
    if not output.exists():
        return False
    try:
        found = json.loads((output / "corpus.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    if not isinstance(found, dict) or found.get("data_set") != settings["data_set"]:
        raise ValueError(
            f"--output {short(output)} exists and does not hold {settings['data_set']}: "
            "remove it or give another folder"
        )
    for option, value in settings.items():
        if found.get(option) != value:
            raise ValueError(
                f"--output {short(output)} was prepared with another --{option} "
                f"({found.get(option)}, now {value}): remove it or give another folder"
            )
    return True


def find_source(data_set: DataSet, request: Request, folder: Path) -> Path:
    """Checked archive, file or folder: the one of --from, or downloaded into folder.

    Raises ValueError when there is none, or it is not what was published.
    """
    if request.source is None:
        mirrors = (*request.mirrors, *data_set.mirrors)
        for name in data_set.files:

            def check(path: Path, label: str, name: str = name) -> None:
                data_set.check_download(name, path, label)

            path = download(name, mirrors, folder, check)
        return folder if data_set.files == data_set.members else path
    label = f"--from {short(request.source)}"
    if not request.source.exists():
        raise ValueError(f"{label} does not exist: give the path of {', '.join(data_set.files)}")
    data_set.check(request.source, label)
    return request.source


@contextmanager
def partial_folder(output: Path, files: tuple[str, ...]) -> Iterator[Path]:
    """Folder to work in beside output; files are the downloads that outlive a failure there.

    Raises ValueError when it cannot be made.
    """
    partial = output.with_name(output.name + ".partial")
    corpus = partial / "corpus"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if corpus.exists():
            shutil.rmtree(corpus)
    except OSError as error:
        raise ValueError(
            f"--output {short(output)} cannot be written ({error.strerror}): "
            "give a folder in a place where you may write"
        ) from error
    try:
        yield partial
        for name in files:
            (partial / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(corpus, ignore_errors=True)
        # It stays while it holds a download, or the log of a command that failed.
        with suppress(OSError):
            partial.rmdir()


def report(output: Path, description: dict, next_command: list[str]) -> None:
    """Print what a corpus holds and a command that trains on it."""
    for key, value in description.items():
        if not isinstance(value, dict) and value is not None:
            print(f"{key}: {value}")
    for split, sizes in description["splits"].items():
        counts = ", ".join(f"{number:,} {unit}" for unit, number in sizes.items())
        print(f"{split:5} {counts}")
    print(f"next: {shlex.join(next_command)}", flush=True)


def prepare(data_set: DataSet, request: Request, build: Build, **options: str) -> None:
    """Make the corpus in the folder of --output, or do nothing if it is there.

    Args:
        data_set: what it is made from.
        request: where, from what and with which dictionary.
        build: makes it from the checked source.
        options: those of this data set only, as they are given.

    Raises ValueError when something is in the way, missing or not what was published.
    """
    output = request.output
    recipe = f"examples/{data_set.recipe}.sh"
    next_command = ["bash", recipe, "train", short(output), "CHECKPOINTS"]
    digest = request.srcdict and file_digest(request.srcdict)
    settings = {"data_set": data_set.name, **options, "srcdict": digest}
    if is_complete(output, settings):
        print(f"{short(output)} is complete, nothing to do:")
        description = json.loads((output / "corpus.json").read_text(encoding="utf-8"))
        report(output, description, next_command)
        return
    check_space(data_set.name, data_set.disk_bytes, output)
    with partial_folder(output, data_set.files) as partial:
        source = find_source(data_set, request, partial)
        corpus = partial / "corpus"
        (corpus / "bin").mkdir(parents=True)
        published = {
            name: f"{checksum.algorithm} {checksum.digest}"
            for name, checksum in data_set.checksums.items()
        }
        description = {**settings, "checksums": published, **build(source, corpus)}
        text = json.dumps(description, indent=2) + "\n"
        (corpus / "corpus.json").write_text(text, encoding="utf-8")
        corpus.rename(output)
    report(output, description, next_command)


def run(arguments: argparse.Namespace, work: Callable[[Request], None]) -> int:
    """Do the work of a script for its parsed options and return its exit status."""
    request = request_of(arguments)
    try:
        work(request)
    except KeyboardInterrupt:
        partial = request.output.with_name(request.output.name + ".partial")
        kept = f"{short(partial)} keeps the download" if partial.exists() else "nothing is left"
        print(f"\ninterrupted; {kept}, run the same command again", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: --output {short(request.output)}: {error}: "
            "make room, or give a folder where you may write",
            file=sys.stderr,
        )
        return 1
    return 0
