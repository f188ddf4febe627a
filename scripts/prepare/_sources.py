"""Where data comes from: downloads that resume, published checksums, and files of archives.

Downloads are our own since requests, pooch, torch.hub and sacrebleu begin them anew, and
huggingface_hub resumes those from its own hub only.
"""

import argparse
import hashlib
import http
import http.client
import lzma
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tqdm import tqdm

from scripts._shared.commands import short
from scripts.prepare._steps import resolved

# One of the hosts answers "forbidden" to Python's own name.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds without an answer or a byte after which a mirror is given up.
TIMEOUT = 30.0
RECEIVED = 2**16
BLOCK = 2**20
# What the readers of zip, tar, gzip, bzip2 and xz raise where an archive ends or is changed.
# RuntimeError: of a zip file that is encrypted, or packed in a way that Python cannot read.
DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError),
    RuntimeError,
)


class TransferError(Exception):
    """A mirror refuses, cannot be reached or stopped before the end."""


@dataclass(frozen=True)
class Checksum:
    """Published checksum of a file: hashlib's name of the algorithm and hexadecimal digits."""

    algorithm: str
    digest: str

    def check(self, stream: BinaryIO, label: str) -> None:
        """Read a stream to its end; raises ValueError, naming label, when it has another one."""
        found = hashlib.new(self.algorithm, usedforsecurity=False)
        while block := stream.read(BLOCK):
            found.update(block)
        if found.hexdigest() != self.digest:
            raise ValueError(
                f"{label} has {self.algorithm} {found.hexdigest()}, the published one is "
                f"{self.digest}: it is truncated, damaged or another edition, get it anew"
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


def _url(mirror: str, name: str) -> str:
    """URL of a file at a mirror; raises ValueError when --mirror is no web address."""
    if not mirror.startswith(("http://", "https://")):
        raise ValueError(
            f"--mirror {mirror} is no http:// or https:// URL: "
            f"give the URL of the folder that has {name}"
        )
    return mirror if mirror.endswith("/" + name) else f"{mirror.rstrip('/')}/{name}"


def _size(path: Path) -> int:
    """Bytes of a file, 0 if it is not there."""
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _network() -> Iterator[None]:
    """Turn what fails within the block into TransferError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise TransferError(f"HTTP status {error.code} ({error.reason})") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransferError(getattr(error, "reason", error)) from error


def _receive(url: str, path: Path) -> None:
    """Append what path lacks of a URL's content, or write all of it where that is not offered.

    Raises TransferError when it is not all there afterwards.
    """
    start = _size(path)
    headers = {"User-Agent": USER_AGENT, **({"Range": f"bytes={start}-"} if start else {})}
    try:
        with _network():
            request = urllib.request.Request(url, headers=headers)
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except TransferError as error:
        refusal = error.__cause__
        code = getattr(refusal, "code", None)
        if not start or code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if refusal.headers.get("Content-Range") != f"bytes */{start}":
            # What is here is longer than the file, hence of something else.
            path.unlink()
            _receive(url, path)
        return
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0
        elif not (sent := response.headers.get("Content-Range", "")).startswith(f"bytes {start}-"):
            raise TransferError(f"sent {sent or 'some bytes'}, not those asked for")
        with _network():
            length = response.headers.get("Content-Length")
            total = None if length is None else start + int(length)
        shown = {"desc": "download", "unit": "B", "unit_scale": True, "disable": None}
        with (
            path.open("ab" if start else "wb") as file,
            tqdm(total=total, initial=start, **shown) as bar,
        ):
            block = b"begin"
            while block:
                with _network():
                    block = response.read1(RECEIVED)
                file.write(block)
                bar.update(len(block))
    if total is not None and _size(path) != total:
        raise TransferError(f"the connection ended after {_size(path):,} of {total:,} bytes")


def _transfer(url: str, path: Path) -> None:
    """Bring the content of a URL to path, which may hold its beginning, while bytes arrive."""
    while True:
        before = _size(path)
        try:
            return _receive(url, path)
        except TransferError as error:
            if _size(path) <= before:
                raise
            print(f"  {error}; resuming", flush=True)


def download(
    name: str, mirrors: Sequence[str], folder: Path, check: Callable[[Path, str], None]
) -> Path:
    """Path of a file in an existing folder, downloaded from the first mirror that has it.

    Mirrors are URLs of folders, or of the file itself. An unfinished download is kept beside it as
    ``NAME.partial`` and resumed by the next call; a finished one is deleted if check refuses it,
    which gets a path and what it is and raises ValueError. A file that is there is only checked.

    Raises ValueError when no mirror has the file.
    """
    urls = [_url(mirror, name) for mirror in mirrors]
    path, partial = folder / name, folder / f"{name}.partial"
    if path.exists():
        try:
            check(path, short(path))
            return path
        except ValueError:
            path.unlink()
    reasons = []
    for url in urls:
        print(f"download {url}", flush=True)
        try:
            _transfer(url, partial)
            check(partial, url)
            return partial.rename(path)
        except TransferError as error:
            reasons.append(f"{url}: {error}")
        except ValueError as error:
            # the next mirror, or the next run, begins anew
            partial.unlink(missing_ok=True)
            reasons.append(str(error))
        print(f"  {reasons[-1].removeprefix(f'{url}: ')}", flush=True)
    kept = f" (the part in {short(partial)} is kept and resumed)" if partial.exists() else ""
    raise ValueError(
        f"{name} cannot be downloaded{kept}: {'; '.join(reasons)}: look after the connection, "
        "name another place with --mirror URL, or get the file yourself and give it with --from"
    )


@contextmanager
def open_with_progress(path: Path, description: str) -> Iterator[BinaryIO]:
    """Open a file under a progress bar over its bytes."""
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm.wrapattr(file, "read", total=size, desc=description, disable=None) as stream,
    ):
        yield stream


def _files(path: Path, names: Sequence[str], work: str) -> Iterator[tuple[str, BinaryIO]]:
    """Names and contents of the files of an archive or a folder, in the order that it has."""
    if path.is_dir():
        for name in names:
            if (path / name).is_file():
                with (path / name).open("rb") as stream:
                    yield name, stream
        return
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    if is_zip:
        with open_with_progress(path, work) as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    yield entry.filename, stream
    elif tarfile.is_tarfile(path):
        with open_with_progress(path, work) as file, tarfile.open(fileobj=file) as archive:
            for entry in archive:
                if entry.isfile():
                    yield entry.name, archive.extractfile(entry)
    elif len(names) == 1:
        with path.open("rb") as stream:
            yield names[0], stream


def read_members(
    path: Path,
    names: Sequence[str],
    handle: Callable[[str, BinaryIO], None],
    label: str,
    work: str = "read",
) -> None:
    """Call handle with the name and the content of each of the named files, in archive order.

    In an archive (zip; tar, compressed or not) they may lie in any folder; a file that is no
    archive counts as the only one of names. label says in messages what path is, work what the
    progress bar is for.

    Raises ValueError when a name is missing or there twice, or the archive is damaged.
    """
    seen = set()
    try:
        for file, stream in _files(path, names, work):
            name = PurePosixPath(file).name
            if name not in names:
                continue
            if name in seen:
                raise ValueError(f"{label} has two files {name}: give one that has it once")
            seen.add(name)
            handle(name, stream)
    except DAMAGE as error:
        raise ValueError(
            f"{label} is a truncated or damaged archive ({error}): get it anew"
        ) from error
    missing = [name for name in names if name not in seen]
    if missing:
        raise ValueError(
            f"{label} lacks {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}: "
            "give it as it was published"
        )
