"""Where published texts come from: downloads with checksums, and the files in archives."""

import argparse
import lzma
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from scripts._shared.commands import short
from scripts.prepare._stages import DOWNLOAD, existing

# One of the hosts answers "forbidden" to Python's own name.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds without an answer or a byte after which a mirror is given up.
TIMEOUT = 30.0
# What the readers of archives raise where one ends or is changed.
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError)


def add_source_options(parser: argparse.ArgumentParser, files: str) -> None:
    """Add --from and --mirror, which exclude each other, for the files that are downloaded."""
    group = parser.add_mutually_exclusive_group()
    text = f"{files}, or a folder that has them, in place of downloads"
    group.add_argument("--from", dest="source", type=existing, metavar="FILE", help=text)
    group.add_argument(
        "--mirror",
        dest="mirrors",
        action="append",
        default=[],
        metavar="URL",
        help="folder to download from, tried before the known ones; may be given several times",
    )


@dataclass(frozen=True)
class Archive:
    """A published file that holds texts.

    Args:
        place: its URL without the protocol.
        members: names of the texts, which may lie in any folder of it; its own if it is a text.
        checksum: ALGORITHM:DIGITS of the file, None where none is known.
        text_checksum: that of its only text.
    """

    place: str
    members: Sequence[str]
    checksum: str | None = None
    text_checksum: str | None = None

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.place.rpartition("/")[2]

    def path(self, options: argparse.Namespace) -> Path:
        """The file of --from, or downloaded into the folder --output."""
        if not options.source:
            folder = self.place.rpartition("/")[0]
            mirrors = [*options.mirrors, f"https://{folder}", f"http://{folder}"]
            return download(self.name, mirrors, self.checksum, options.output / DOWNLOAD)
        path = options.source / self.name if options.source.is_dir() else options.source
        if not path.is_file():
            raise ValueError(f"--from {short(path)} is no file: give what was published")
        check(path, self.checksum, f"--from {short(path)}")
        return path

    def unpack(self, options: argparse.Namespace, folder: Path) -> list[Path]:
        """Write its texts to a folder; return them in its order."""
        path = self.path(options)
        try:
            texts = extract(path, self.members, folder)
            check(texts[0], self.text_checksum, f"{short(path)}: the text")
            return texts
        except ValueError:
            # a mirror may have sent anything
            if not options.source and not self.checksum:
                path.unlink()
            raise


def check(path: Path, checksum: str | None, label: str) -> None:
    """Raise ValueError, naming label, when a file has another checksum than a known one."""
    import pooch

    algorithm, _, known = (checksum or "").partition(":")
    if known and (found := pooch.file_hash(str(path), algorithm)) != known:
        raise ValueError(
            f"{label} has {algorithm} {found}, the published one is {known}: it is truncated, "
            "damaged or another edition, get it anew"
        )


def download(name: str, mirrors: Sequence[str], checksum: str | None, folder: Path) -> Path:
    """Path of a file in a folder, downloaded from the first of the mirrors that has it."""
    import pooch
    import requests

    # what it logs is printed here
    pooch.get_logger().setLevel("WARNING")
    receive = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), headers={"User-Agent": USER_AGENT}, timeout=TIMEOUT
    )
    reasons = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}"
        print(f"download {url}", flush=True)
        try:
            return Path(pooch.retrieve(url, checksum, name, folder, downloader=receive))
        except (requests.RequestException, ValueError) as error:
            # pooch's message of another checksum has several lines
            reasons.append(f"{url}: {' '.join(str(error).split())}")
    raise ValueError(
        f"{name} cannot be downloaded: {'; '.join(reasons)}: look after the connection, name "
        "another place with --mirror URL, or get the file yourself and give it with --from"
    )


def files_in(path: Path, names: Sequence[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Each file of a zip or tar by its name; where there is one name, it may be the file's own."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                yield member.rpartition("/")[2], archive.open(member)
    elif len(names) == 1 and not tarfile.is_tarfile(path):
        yield names[0], path.open("rb")
    else:
        with tarfile.open(path) as archive:
            for entry in filter(tarfile.TarInfo.isfile, archive):
                yield entry.name.rpartition("/")[2], archive.extractfile(entry)


def extract(path: Path, names: Sequence[str], folder: Path) -> list[Path]:
    """Write the named files of an archive to a folder; return them in its order."""
    found = []
    try:
        for name, source in files_in(path, names):
            if name in names and folder / name not in found:
                with source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
                found.append(folder / name)
    except DAMAGE as error:
        raise ValueError(
            f"{short(path)} is a truncated or damaged archive ({error}): get it anew"
        ) from error
    if missing := sorted(set(names).difference(path.name for path in found)):
        raise ValueError(
            f"{short(path)} lacks {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}: "
            "give it as it was published"
        )
    return found
