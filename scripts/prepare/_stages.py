"""A prepared folder and its stages, each a folder that is made whole or is not there.

OUTPUT/NAME               a finished stage; stage.json in it has the options that made it, its sizes
OUTPUT/NAME.partial-PID   a stage at work; what a killed run left of one is removed by the next run
OUTPUT/download           archives, until all is done
OUTPUT/preparation.json   options and sizes, written last
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts._shared.commands import short
from scripts._shared.files import write_json

SPLITS = ("train", "valid", "test")
RECORD = "stage.json"
DOWNLOAD, LOG, SUMMARY = "download", "preprocess.log", "preparation.json"


def resolved(path: str) -> Path:
    """Absolute path that an option names."""
    return Path(path).resolve()


def add_output_option(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    text = "folder of the result; fairseq reads DIR/bin"
    parser.add_argument("--output", type=resolved, required=True, metavar="DIR", help=text)


def fingerprint(files: Iterable[Path]) -> str:
    """Digest of what files are called and of their sizes and modification times."""
    digest = hashlib.sha256()
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ValueError(
                f"{short(path)} cannot be read ({error.strerror}): give a file that is there and "
                "may be read"
            ) from error
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def file_digest(path: Path | None, option: str) -> str | None:
    """SHA-256 of the file that an option names, if any."""
    try:
        return path and hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(
            f"{option} {short(path)} cannot be read ({error.strerror}): give a file that is there "
            "and may be read"
        ) from error


class Stages:
    """The stages of a preparation in the folder --output.

    Args:
        output: the folder, which is not there, empty, or of an earlier run.
        settings: options and inputs of all stages, by the options' names.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self.settings = dict(settings)
        own = {DOWNLOAD, LOG, SUMMARY}
        there = list(output.iterdir()) if output.is_dir() else [output] * output.exists()
        known = [
            path
            for path in there
            if path.name in own or ".partial-" in path.name or (path / RECORD).exists()
        ]
        if there and not known:
            raise ValueError(
                f"--output {short(output)} exists and holds something else: remove it or give "
                "another folder"
            )

    def _record(self, name: str) -> dict | None:
        """Settings and result of a stage, None if it is not there."""
        path = self.output / name / RECORD
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not path.parent.exists():
                return None
            error = "it lacks"
        except ValueError:
            error = "damaged is"
        raise ValueError(
            f"--output {short(self.output)}: {name} is no finished stage ({error} {RECORD}): "
            "remove it, or give another folder"
        )

    def is_complete(self, name: str, settings: Mapping[str, Any] = {}) -> bool:
        """Whether a stage was made, with all settings until now and these."""
        record = self._record(name)
        if record is None:
            return False
        made = record["settings"]
        for option, value in json.loads(json.dumps({**self.settings, **settings})).items():
            if option in made and made[option] == value:
                continue
            others = [
                short(path.parent)
                for path in sorted(self.output.glob(f"*/{RECORD}"))
                if self._record(path.parent.name)["settings"].get(option, value) != value
            ]
            raise ValueError(
                f"--output {short(self.output)}: {name} was made with another --{option} "
                f"({made.get(option)}, now {value}): give another folder, or remove "
                f"{', '.join(others or [short(self.output)])} to have this made again"
            )
        return True

    def run(self, name: str, work: Callable[[Path], Any], settings: Mapping[str, Any] = {}) -> Any:
        """Result of a stage: as recorded if it is complete, else of making its folder.

        Args:
            name: of the folder.
            work: fills the new folder that it gets; returns what is to be recorded, as JSON has it.
            settings: that change this stage and those after it.
        """
        complete = self.is_complete(name, settings)
        self.settings |= settings
        if complete:
            print(f"{name}: complete", flush=True)
            return self._record(name)["result"]
        print(f"{name}: at work", flush=True)
        started = time.monotonic()
        # a killed run's child may still write to its own
        partial = self.output / f"{name}.partial-{os.getpid()}"
        try:
            for left in self.output.glob(f"{name}.partial-*"):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            result = work(partial)
            write_json(partial / RECORD, {"settings": self.settings, "result": result})
            partial.rename(self.output / name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in (self.output / DOWNLOAD, self.output):
                # where nothing is in it
                with suppress(OSError):
                    folder.rmdir()
            raise
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        return result

    def finish(self, description: Mapping[str, Any]) -> None:
        """Write and print what was made, and remove the archives."""
        shutil.rmtree(self.output / DOWNLOAD, ignore_errors=True)
        content = {**self.settings, **description}
        write_json(self.output / SUMMARY, content)
        print(json.dumps(content, indent=2, ensure_ascii=False), flush=True)


def check_space(name: str, needed: int, output: Path) -> None:
    """Raise ValueError when the disk of --output lacks the bytes that a preparation needs."""
    existing = next(folder for folder in (output, *output.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"--output {short(output)}: {name} takes up to {needed / 1e9:.2f} GB while it is "
            f"prepared, {free / 1e9:.2f} GB are free: make room or give a folder on another disk"
        )
