"""Download published texts, verify their checksums, and unpack archives."""

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
from scripts.prepare._stages import DOWNLOAD, preparation_parser, readable_path

# One of the hosts answers "forbidden" to Python's own user agent.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds to wait for an answer or for further bytes.
TIMEOUT = 30.0
# Exceptions of the archive readers for truncated or damaged files.
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError)


def data_set_parser(description: str, archives: Sequence["Archive"]) -> argparse.ArgumentParser:
    """Return the parser of a published data set, given its module's docstring."""
    parser = preparation_parser(description)
    add_source_option(parser, ", ".join(archive.name for archive in archives))
    text = "dict.txt to binarize with, for a model trained elsewhere, instead of a new one"
    parser.add_argument("--srcdict", type=readable_path, metavar="FILE", help=text)
    return parser


def add_source_option(parser: argparse.ArgumentParser, files: str) -> None:
    """Add --from, which names the files to use instead of downloading them."""
    text = f"{files}, or a folder with them, instead of downloading"
    parser.add_argument("--from", dest="source", type=readable_path, metavar="FILE", help=text)


@dataclass(frozen=True)
class Archive:
    """A published file that holds texts.

    Args:
        address: its URL without the protocol.
        members: names of the texts, in any folder of it; the file's own name if it is a text.
        checksum: ALGORITHM:DIGITS of the file, None if unknown.
        text_checksum: checksum of its only text.
    """

    address: str
    members: Sequence[str]
    checksum: str | None = None
    text_checksum: str | None = None

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.address.rpartition("/")[2]

    def path(self, options: argparse.Namespace) -> Path:
        """Return the file that --from gives, or download it into the --output folder."""
        if not options.source:
            return download(self.address, self.checksum, options.output / DOWNLOAD)
        path = options.source / self.name if options.source.is_dir() else options.source
        if not path.is_file():
            raise ValueError(f"--from {short(path)} is not a file: give the published file")
        check(path, self.checksum, f"--from {short(path)}")
        return path

    def unpack(self, options: argparse.Namespace, folder: Path) -> list[Path]:
        """Write the texts to a folder; return their paths in the order of the archive."""
        path = self.path(options)
        try:
            texts = extract(path, self.members, folder)
            check(texts[0], self.text_checksum, f"{short(path)}: the text")
            return texts
        except ValueError:
            # without a checksum, a host may have sent anything
            if not options.source and not self.checksum:
                path.unlink()
            raise


def check(path: Path, checksum: str | None, label: str) -> None:
    """Raise ValueError, naming label, if the checksum is known and the file has another."""
    import pooch

    algorithm, _, known = (checksum or "").partition(":")
    if known and (digest := pooch.file_hash(str(path), algorithm)) != known:
        raise ValueError(
            f"{label} has {algorithm} {digest}, the published one is {known}: it is truncated, "
            "damaged or another edition, get it again"
        )


def download(address: str, checksum: str | None, folder: Path) -> Path:
    """Download a file to a folder, by https or else http; return its path."""
    import pooch
    import requests

    # this function prints the URLs itself
    pooch.get_logger().setLevel("WARNING")
    receive = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), headers={"User-Agent": USER_AGENT}, timeout=TIMEOUT
    )
    reasons, name = [], address.rpartition("/")[2]
    for url in (f"https://{address}", f"http://{address}"):
        print(f"download {url}", flush=True)
        try:
            return Path(pooch.retrieve(url, checksum, name, folder, downloader=receive))
        except (requests.RequestException, ValueError) as error:
            # pooch's message for a wrong checksum has several lines
            reasons.append(f"{url}: {' '.join(str(error).split())}")
    raise ValueError(
        f"{name} cannot be downloaded: {'; '.join(reasons)}: check the connection, or get the "
        "file yourself and give it with --from"
    )


def files_in(path: Path, names: Sequence[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file of a zip or tar with its name, or a plain file with the only name given."""
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
    """Write the named files of an archive to a folder; return their paths in archive order."""
    written = []
    try:
        for name, source in files_in(path, names):
            if name in names and folder / name not in written:
                with source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
                written.append(folder / name)
    except DAMAGE as error:
        raise ValueError(
            f"{short(path)} is a truncated or damaged archive ({error}): get it again"
        ) from error
    if missing := sorted(set(names).difference(path.name for path in written)):
        raise ValueError(
            f"{short(path)} lacks {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}: "
            "give the published file"
        )
    return written
