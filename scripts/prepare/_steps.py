"""Files and folders that are made whole or not at all, and preparations that are steps of them.

OUTPUT/steps.json         options and sources of each complete step, and what it found
OUTPUT/NAME               file or folder of the step of that name
OUTPUT/NAME.partial-PID   while it is made; removed when that fails

A step that was made with other options is refused. One whose file was removed, or whose sources
were made again from something else, is made again.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scripts._shared.commands import short
from scripts._shared.files import write_json

RECORDS = "steps.json"
# What Ctrl-C leaves of them.
INTERRUPTED = "complete steps are kept, run the same command again"


def resolved(path: str) -> Path:
    """Absolute path that an option names."""
    return Path(path).resolve()


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_sizes(path: Path) -> dict[str, int]:
    """Sizes in bytes of a file, or of the files of a folder, by name; empty if it is not there."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}
    return {path.name: path.stat().st_size} if path.exists() else {}


def fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Digest of what files are called and of their sizes and modification times."""
    digest = hashlib.sha256()
    for name, path in files:
        status = path.stat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def check_space(name: str, needed: int, output: Path) -> None:
    """Raise ValueError when the disk of --output lacks the bytes that a preparation needs."""
    existing = next(folder for folder in output.parents if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"--output {short(output)}: {name} takes up to {needed / 1e9:.2f} GB while it is "
            f"prepared, {free / 1e9:.2f} GB are free: make room or give a folder on another disk"
        )


def read_record(output: Path, file: str, key: str, kind: Any, name: str) -> dict | None:
    """What a preparation wrote to a JSON file in output; None if there is no output.

    Raises ValueError, with the name of what it should hold, when the file lacks or has another key.
    """
    if not output.exists():
        return None
    try:
        found = json.loads((output / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get(key) != kind:
        raise ValueError(
            f"--output {short(output)} exists and does not hold {name}: remove it or give another "
            "folder"
        )
    return found


@contextmanager
def made_whole(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """Where to make the file or folder that takes the place of path; nothing is left of a failure.

    It is made in a folder on the same disk, by default that of path.
    """
    # A process that was killed may have left children, which go on writing: each its own place.
    partial = (folder or path.parent) / f"{path.name}.partial-{os.getpid()}"

    def remove_stale() -> None:
        for stale in partial.parent.glob(f"{glob.escape(path.name)}.partial*"):
            with suppress(OSError):
                remove(stale)

    remove_stale()
    try:
        yield partial
        remove(path)
        partial.rename(path)
        # once more: what such a child has written since
        remove_stale()
    except BaseException:
        with suppress(OSError):
            remove(partial)
        raise


class Steps:
    """Steps of a preparation, such as news, that the folder --output holds or will hold.

    Raises ValueError when the folder holds something else.
    """

    def __init__(self, output: Path, preparation: str) -> None:
        self.output = output
        self.preparation = preparation
        name = f"prepared {preparation}"
        found = (
            None
            if self._is_unclaimed(output)
            else read_record(output, RECORDS, "preparation", preparation, name)
        )
        self.records: dict[str, dict] = found["steps"] if found else {}

    @staticmethod
    def _is_unclaimed(output: Path) -> bool:
        """Whether a folder is there and empty, but for records that a killed run was writing."""
        begun = re.compile(rf"{re.escape(RECORDS)}\.partial-\d+")
        return output.is_dir() and all(begun.fullmatch(path.name) for path in output.iterdir())

    def claim(self) -> None:
        """Make the folder, with records: the next run knows it, whenever this one is killed."""
        self.output.mkdir(parents=True, exist_ok=True)
        if not (self.output / RECORDS).exists():
            self._save()

    def _give_up(self, path: Path) -> None:
        """Remove the folders above what failed, as far as they hold nothing, up to the output."""
        with suppress(OSError):
            folder = path.parent
            while folder != self.output:
                folder.rmdir()
                folder = folder.parent
            if not self.records and {x.name for x in self.output.iterdir()} <= {RECORDS}:
                (self.output / RECORDS).unlink(missing_ok=True)
                self.output.rmdir()

    def _save(self) -> None:
        """Write the records."""
        content = {"preparation": self.preparation, "steps": self.records}
        write_json(self.output / RECORDS, content)

    def _identity(self, name: str) -> str:
        """What a complete step was made from and with, its sources' identities included."""
        record = {key: self.records[name][key] for key in ("options", "sources", "result")}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def _check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise ValueError, naming what to remove, when a step was made with other options."""
        made = self.records[name]["options"]
        for option, value in options.items():
            if made.get(option) == value:
                continue
            # All that has to go, not only what is met first.
            others = [
                other
                for other, record in self.records.items()
                if record["options"].get(option, value) != value and (self.output / other).exists()
            ]
            raise ValueError(
                f"--output {short(self.output)}: {name} was made with another --{option} "
                f"({made.get(option)}, now {value}): give another folder, or remove "
                f"{', '.join(short(self.output / other) for other in others)} to have this and "
                "what depends on it made again"
            )

    def is_complete(self, name: str, options: Mapping[str, Any], sources: Sequence[str]) -> bool:
        """Whether a step is done with these options from its sources as they are; raises as run."""
        path = self.output / name
        if name not in self.records or not path.exists():
            return False
        self._check_options(name, options)
        record = self.records[name]
        made_from = {source: self._identity(source) for source in sources}
        return record["sources"] == made_from and record["bytes"] == file_sizes(path)

    def run(
        self,
        name: str,
        options: Mapping[str, Any],
        sources: Sequence[str],
        work: Callable[[Path], Any],
    ) -> Any:
        """Result of a step: as recorded if it is complete, else of doing its work.

        Args:
            name: of its file or folder within the output.
            options: those that change its result, by their names; values as JSON has them.
            sources: names of the complete steps that it reads.
            work: makes the file or folder at the path that it gets, which does not exist, and
                returns what is to be recorded, as JSON has it; always the same for the same.

        Raises ValueError when its file was made with other options.
        """
        if self.is_complete(name, options, sources):
            print(f"{name}: complete", flush=True)
            return self.records[name]["result"]
        path = self.output / name
        print(f"{name}: at work", flush=True)
        started = time.monotonic()
        try:
            self.claim()
            path.parent.mkdir(parents=True, exist_ok=True)
            # A run that is killed from here on must not find the old record.
            if self.records.pop(name, None):
                self._save()
            with made_whole(path) as partial:
                result = work(partial)
        except BaseException:
            self._give_up(path)
            raise
        seconds = time.monotonic() - started
        self.records[name] = {
            "options": dict(options),
            "sources": {source: self._identity(source) for source in sources},
            "bytes": file_sizes(path),
            "seconds": round(seconds, 1),
            "result": result,
        }
        self._save()
        print(f"{name}: {seconds:.1f} s", flush=True)
        return result
