"""Where published data comes from: downloads with checksums, and the files of archives."""

import argparse
import hashlib
import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from scripts.prepare._stages import resolved

# One of the hosts answers "forbidden" to Python's own name.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds without an answer or a byte after which a mirror is given up.
TIMEOUT = 30.0
# What the readers of zip, tar, gzip, bzip2 and xz raise where an archive ends or is changed.
# RuntimeError: of a zip file that is encrypted, or packed in a way that Python cannot read.
DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError),
    RuntimeError,
)


def add_source_options(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add --from, with its help text, and --mirror, which exclude each other."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--from", dest="source", type=resolved, metavar=metavar, help=text)
    group.add_argument(
        "--mirror",
        dest="mirrors",
        action="append",
        default=[],
        metavar="URL",
        help="folder to download from, tried before the known ones; may be given several times",
    )


def _check(checksum: str, found: str, label: str) -> None:
    """Raise ValueError, naming label, when the digits found are not those of ALGORITHM:DIGITS."""
    algorithm, known = checksum.split(":")
    if found != known:
        raise ValueError(
            f"{label} has {algorithm} {found}, the published one is {known}: it is truncated, "
            "damaged or another edition, get it anew"
        )


def check_bytes(content: bytes, checksum: str, label: str) -> None:
    """Raise ValueError, naming label, when some bytes have another checksum."""
    found = hashlib.new(checksum.split(":")[0], content, usedforsecurity=False)
    _check(checksum, found.hexdigest(), label)


def check_file(path: Path, checksum: str | None, label: str) -> None:
    """Raise ValueError, naming label, when a file has another checksum than one that is known."""
    import pooch

    if checksum:
        _check(checksum, pooch.file_hash(str(path), checksum.split(":")[0]), label)


def download(name: str, mirrors: Sequence[str], checksum: str | None, folder: Path) -> Path:
    """Path of a file in a folder, downloaded from the first of the URLs of folders that has it."""
    import pooch
    import requests

    # what it logs is printed here
    pooch.get_logger().setLevel("WARNING")
    receive = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), headers={"User-Agent": USER_AGENT}, timeout=TIMEOUT
    )
    reasons = []
    for mirror in mirrors:
        if not mirror.startswith(("http://", "https://")):
            raise ValueError(
                f"--mirror {mirror} is no http:// or https:// URL: give the URL of the folder that "
                f"has {name}"
            )
        url = f"{mirror.rstrip('/')}/{name}"
        print(f"download {url}", flush=True)
        try:
            return Path(pooch.retrieve(url, checksum, name, folder, downloader=receive))
        except (requests.RequestException, ValueError) as error:
            # pooch's message of another checksum has several lines
            reasons.append(f"{url}: {' '.join(str(error).split())}")
            print(f"  {reasons[-1]}", flush=True)
    raise ValueError(
        f"{name} cannot be downloaded: {'; '.join(reasons)}: look after the connection, name "
        "another place with --mirror URL, or get the file yourself and give it with --from"
    )


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or a tar, which may be compressed."""
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def _files(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Names and contents of the files of an archive or a folder, in the order that it has."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file():
                with file.open("rb") as stream:
                    yield file.name, stream
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    yield entry.filename, stream
    else:
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.isfile():
                    yield entry.name, archive.extractfile(entry)


@contextmanager
def undamaged(label: str) -> Iterator[None]:
    """Turn what readers of archives raise in the block into a ValueError that names label."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(
            f"{label} is a truncated or damaged archive ({error}): get it anew"
        ) from error


def members(path: Path, names: Sequence[str], label: str) -> Iterator[tuple[str, BinaryIO]]:
    """Each of the named files, with its content, in the order of an archive or a folder.

    In an archive they may lie in any folder. Raises ValueError, naming label, when one is missing
    or there twice; read them in a block of undamaged.
    """
    seen = set()
    for file, stream in _files(path):
        name = PurePosixPath(file).name
        if name not in names:
            continue
        if name in seen:
            raise ValueError(f"{label} has two files {name}: give one that has it once")
        seen.add(name)
        yield name, stream
    missing = [name for name in names if name not in seen]
    if missing:
        raise ValueError(
            f"{label} lacks {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}: "
            "give it as it was published"
        )
