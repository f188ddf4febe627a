"""Published data sets: what is known of each, and its preparation, a whole folder or nothing.

OUTPUT/bin/             dict.txt and {train,valid,test}.{bin,idx}, as fairseq-preprocess writes them
OUTPUT/corpus.json      where the corpus comes from, with which options, and its sizes
OUTPUT.partial/         while the corpus is built; of a failed or interrupted run only the download
                        is kept there, which the next run goes on with
"""

import argparse
import hashlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare._sources import (
    Checksum,
    add_source_options,
    download,
    open_with_progress,
    read_members,
)
from scripts.prepare._steps import check_space, made_whole, read_record, resolved

SPLITS = ("train", "valid", "test")
# What Ctrl-C leaves where nothing is downloaded.
INTERRUPTED = "nothing is left, run the same command again"


@dataclass(frozen=True)
class DataSet(ABC):
    """A published data set: where it is, how it is checked and what is known of it.

    Args:
        name: what it is called.
        mirrors: URLs of folders that hold it.
        files: names of what a mirror holds: one archive, or the members.
        checksums: of the archive or of each member, by name.
        vocabulary: number of symbols, as published.
        disk_bytes: space that the preparation takes at most, with the download.
        recipe: command file in examples that trains on it, without its suffix.
        example: what --from names.
    """

    name: str
    mirrors: tuple[str, ...]
    files: tuple[str, ...]
    checksums: Mapping[str, Checksum]
    vocabulary: int
    disk_bytes: int
    recipe: str
    example: str

    @property
    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """Names of the files that are read."""

    @abstractmethod
    def build(self, source: Path, folder: Path, options: argparse.Namespace) -> dict:
        """Write folder/bin, an empty folder, from a checked source; return what is to be told.

        Raises ValueError when the text or --srcdict is not what was expected.
        """

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this kind of data set."""

    @abstractmethod
    def own_settings(self, options: argparse.Namespace) -> dict[str, str]:
        """Options of this kind that change the corpus; raises ValueError for impossible ones."""

    def recipe_of(self, description: Mapping) -> str:
        """Recipe for a corpus, of which corpus.json tells this."""
        return self.recipe

    def check(self, path: Path, label: str, file: str | None = None) -> None:
        """Check an archive, a folder or a text, or with its name one file of a mirror.

        Raises ValueError, naming label, when a checksum differs or a member is missing.
        """
        members = [file] if file in self.members else self.members
        if members[0] in self.checksums:

            def check_member(name: str, stream: BinaryIO) -> None:
                self.checksums[name].check(stream, f"{label}, {name},")

            read_members(path, members, check_member, label, "check")
            return
        if path.is_dir():
            raise ValueError(
                f"{label} is a folder, whose content cannot be checked: give {self.files[0]}"
            )
        with open_with_progress(path, "check") as stream:
            self.checksums[self.files[0]].check(stream, label)

    def check_vocabulary(self, found: int, remedy: str = "get the data anew") -> None:
        """Raise ValueError when the number of symbols of a text is not the published one."""
        if found != self.vocabulary:
            raise ValueError(
                f"{self.name}: the text has a vocabulary of {found:,} symbols, the published one "
                f"has {self.vocabulary:,}: figures would not compare with published ones, {remedy}"
            )

    def find_source(self, source: Path | None, mirrors: list[str], folder: Path) -> Path:
        """Checked archive, file or folder: the one of --from, or downloaded into folder.

        Raises ValueError when there is none, or it is not what was published.
        """
        if source:
            label = f"--from {short(source)}"
            if not source.exists():
                raise ValueError(
                    f"{label} does not exist: give the path of {', '.join(self.files)}"
                )
            self.check(source, label)
            return source
        for file in self.files:
            check = partial(self.check, file=file)
            path = download(file, [*mirrors, *self.mirrors], folder, check)
        return folder if self.files == self.members else path


def file_digest(path: Path | None) -> str | None:
    """SHA-256 of the file of --srcdict, if any; raises ValueError when it cannot be read."""
    try:
        return path and hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(
            f"--srcdict {short(path)} cannot be read ({error.strerror}): "
            "give the dict.txt of the model"
        ) from error


def read_complete(output: Path, name: str, settings: Mapping[str, str | int | None]) -> dict | None:
    """What corpus.json tells of the corpus of that name in output; None if nothing is there.

    Raises ValueError when output holds something else, or the corpus with other settings.
    """
    found = read_record(output, "corpus.json", "data_set", settings["data_set"], name)
    for option, value in settings.items() if found else ():
        if found.get(option) != value:
            raise ValueError(
                f"--output {short(output)} was prepared with another --{option} "
                f"({found.get(option)}, now {value}): remove it or give another folder"
            )
    return found


def partial_folder(output: Path) -> Path:
    """Folder beside output for what is kept of a failed or interrupted run."""
    return output.with_name(output.name + ".partial")


@contextmanager
def corpus_folder(output: Path, downloads: Sequence[str] = ()) -> Iterator[Path]:
    """New folder that becomes output; a failure leaves only downloads, in partial_folder."""
    place = partial_folder(output)
    place.mkdir(parents=True, exist_ok=True)
    try:
        with made_whole(output, place) as folder:
            folder.mkdir()
            yield folder
        for name in downloads:
            (place / name).unlink(missing_ok=True)
    finally:
        # It stays while it holds a download, or the log of a command that failed.
        with suppress(OSError):
            place.rmdir()


def report(output: Path, description: dict, recipe: str) -> None:
    """Print what a corpus holds and a command that trains on it."""
    for key, value in description.items():
        if not isinstance(value, dict) and value is not None:
            print(f"{key}: {value}")
    for split, sizes in description["splits"].items():
        counts = ", ".join(f"{number:,} {unit}" for unit, number in sizes.items())
        print(f"{split:5} {counts}")
    words = ["bash", f"examples/{recipe}.sh", "train", short(output), "CHECKPOINTS"]
    print(f"next: {shlex.join(words)}", flush=True)


def prepare(data_set: DataSet, options: argparse.Namespace) -> None:
    """Make the corpus in the folder of --output, or do nothing if it is there.

    Raises ValueError when something is in the way, missing or not what was published.
    """
    output, name = options.output, data_set.name
    own = data_set.own_settings(options)
    settings = {"data_set": name, **own, "srcdict": file_digest(options.srcdict)}
    description = read_complete(output, name, settings)
    if description:
        print(f"{short(output)} is complete, nothing to do:")
    else:
        check_space(name, data_set.disk_bytes, output)
        with corpus_folder(output, data_set.files) as folder:
            source = data_set.find_source(options.source, options.mirrors, partial_folder(output))
            (folder / "bin").mkdir()
            published = {
                file: f"{known.algorithm} {known.digest}"
                for file, known in data_set.checksums.items()
            }
            built = data_set.build(source, folder, options)
            description = {**settings, "checksums": published, **built}
            write_json(folder / "corpus.json", description)
    report(output, description, data_set.recipe_of(description))


def run(data_set: DataSet, description: str) -> int:
    """Command line of a data set, with the docstring of its module; returns its exit status."""
    parser = command_parser(description)
    parser.add_argument(
        "--output", type=resolved, required=True, metavar="DIR", help="folder of the corpus"
    )
    text = f"take the data from here instead of downloading it: {data_set.example}"
    add_source_options(parser, "FILE", text)
    parser.add_argument(
        "--srcdict",
        type=resolved,
        metavar="FILE",
        help="dict.txt to binarize with, for a model trained elsewhere, instead of a new one",
    )
    data_set.add_options(parser)
    options = parser.parse_args()
    kept = f"what was downloaded is kept in {short(partial_folder(options.output))}"
    left = INTERRUPTED if options.source else f"{kept}, run the same command again"
    return exit_status(lambda: prepare(data_set, options), left, options.output)
