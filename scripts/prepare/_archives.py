"""Files of an archive, a folder, or a file that stands for itself, one after the other."""

import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tqdm import tqdm

ZIP_BEGINS = b"PK"
# What the readers of zip, tar, gzip, bzip2 and xz raise where an archive ends or is changed.
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError)

Handler = Callable[[str, BinaryIO], None]


class _Forward(io.RawIOBase):
    """A stream that cannot seek and says so; that of a tar archive fails when it is asked."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


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
        is_zip = file.read(len(ZIP_BEGINS)) == ZIP_BEGINS
    if is_zip:
        with open_with_progress(path, work) as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    yield entry.filename, stream
    elif tarfile.is_tarfile(path):
        # As a stream: a compressed archive is read once, whatever its order.
        with (
            open_with_progress(path, work) as file,
            tarfile.open(fileobj=file, mode="r|*") as archive,
        ):
            for entry in archive:
                if entry.isfile():
                    yield entry.name, io.BufferedReader(_Forward(archive.extractfile(entry)))
    elif len(names) == 1:
        with path.open("rb") as stream:
            yield names[0], stream


def read_members(
    path: Path, names: Sequence[str], handle: Handler, label: str, work: str = "read"
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
