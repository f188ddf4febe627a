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
from pathlib import Path
from typing import BinaryIO

from scripts.prepare._stages import existing

# One of the hosts answers "forbidden" to Python's own name.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds without an answer or a byte after which a mirror is given up.
TIMEOUT = 30.0
# What the readers of archives raise where one ends or is changed.
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError)


def add_source_options(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add --from, with its help text, and --mirror, which exclude each other."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--from", dest="source", type=existing, metavar=metavar, help=text)
    group.add_argument(
        "--mirror",
        dest="mirrors",
        action="append",
        default=[],
        metavar="URL",
        help="folder to download from, tried before the known ones; may be given several times",
    )


def check(content: bytes | Path, checksum: str | None, label: str) -> None:
    """Raise ValueError, naming label, when a text or file lacks its checksum, ALGORITHM:DIGITS."""
    if isinstance(content, Path) and not content.is_file():
        raise ValueError(f"{label} is no file: give the archive as it was published")
    if checksum is None:
        return
    algorithm, known = checksum.split(":")
    if isinstance(content, Path):
        import pooch

        found = pooch.file_hash(str(content), algorithm)
    else:
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != known:
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
    """Each of the named files, with its content, in the order of a zip, a tar or a folder.

    In an archive they may lie in any folder; one file may be given as it is. Raises ValueError,
    naming label, when one is missing; read them in a block of undamaged.
    """
    missing = set(names)

    def wanted(file: str) -> str | None:
        name = file.rpartition("/")[2]
        if name in missing:
            missing.remove(name)
            return name
        return None

    if path.is_dir():
        for file in sorted(path.iterdir()):
            if name := wanted(file.name):
                with file.open("rb") as stream:
                    yield name, stream
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for file in archive.namelist():
                if name := wanted(file):
                    with archive.open(file) as stream:
                        yield name, stream
    elif len(names) == 1 and not tarfile.is_tarfile(path):
        # the member itself
        missing.clear()
        with path.open("rb") as stream:
            yield names[0], stream
    else:
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.isfile() and (name := wanted(entry.name)):
                    yield name, archive.extractfile(entry)
    if missing:
        raise ValueError(
            f"{label} lacks {', '.join(sorted(missing)[:3])}{' and more' * (len(missing) > 3)}: "
            "give it as it was published"
        )
