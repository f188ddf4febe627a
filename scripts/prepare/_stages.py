"""Stages of a preparation, each a folder that is either complete or absent.

OUTPUT/NAME               a finished stage; stage.json in it has the options and the result
OUTPUT/NAME.partial-PID   a stage in progress; the next run removes what a killed run left
OUTPUT/download           archives, removed at the end
OUTPUT/preparation.json   options and sizes, written last
"""

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import write_json

SPLITS = ("train", "valid", "test")
RECORD, DOWNLOAD = "stage.json", "download"


def absolute_path(path: str) -> Path:
    """Return the absolute path that an option names."""
    return Path(path).resolve()


def readable_path(path: str) -> Path:
    """Return the absolute path of a readable file or folder; argparse names the option."""
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be read: give a file or folder that can")
    return absolute_path(path)


def run_preparation(
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None],
    prepare: Callable[[argparse.Namespace], None],
    arguments: list[str] | None = None,
) -> int:
    """Run the command of a preparation, given its module's docstring; return the exit status."""
    parser = command_parser(description)
    text = "folder of the result; fairseq reads DIR/bin"
    parser.add_argument("--output", type=absolute_path, required=True, metavar="DIR", help=text)
    add_options(parser)
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


def fingerprint(files: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and modification times of files."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def file_digest(path: Path | None) -> str | None:
    """Return the SHA-256 of a file; None if no file is given."""
    return path and hashlib.sha256(path.read_bytes()).hexdigest()


class Stages:
    """The stages of a preparation in the --output folder.

    Args:
        output: the folder.
        settings: options and inputs of all stages, by option name.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self.settings = dict(settings)

    def recorded(self, name: str) -> Any:
        """Return the result of a finished stage; raise ValueError if it had other settings."""

        def made(folder: Path) -> dict[str, Any]:
            return json.loads((folder / RECORD).read_text(encoding="utf-8"))

        record = made(self.output / name)
        for option, value in json.loads(json.dumps(self.settings)).items():
            if record["settings"].get(option) != value:
                stale = [
                    short(path.parent)
                    for path in sorted(self.output.glob(f"*/{RECORD}"))
                    if made(path.parent)["settings"].get(option, value) != value
                ]
                raise ValueError(
                    f"--output {short(self.output)}: {name} was made with another --{option} "
                    f"({record['settings'].get(option)}, now {value}): give another folder, or "
                    f"remove {', '.join(stale)} to make it again"
                )
        return record["result"]

    def run(self, name: str, work: Callable[[Path], Any], settings: Mapping[str, Any] = {}) -> Any:
        """Return the recorded result of a stage, or make the stage if it is not complete.

        Args:
            name: name of the folder.
            work: fills the new folder passed to it; returns the result to record as JSON.
            settings: options that change this stage and those after it.
        """
        self.settings |= settings
        folder = self.output / name
        if (folder / RECORD).exists():
            result = self.recorded(name)
            print(f"{name}: complete", flush=True)
            return result
        if folder.exists():
            raise ValueError(
                f"--output {short(self.output)}: {name} in it was not made by this command: remove "
                "it or give another folder"
            )
        print(f"{name}: at work", flush=True)
        # with the process id: a child of a killed run may still write to that run's folder
        partial = self.output / f"{name}.partial-{os.getpid()}"
        try:
            for left in self.output.glob(f"{name}.partial-*"):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            result = work(partial)
            write_json(partial / RECORD, {"settings": self.settings, "result": result})
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            for empty in (self.output / DOWNLOAD, self.output):
                with suppress(OSError):
                    empty.rmdir()
            raise
        return result

    def finish(self, description: Mapping[str, Any]) -> None:
        """Write and print preparation.json, and remove the archives."""
        shutil.rmtree(self.output / DOWNLOAD, ignore_errors=True)
        content = {**self.settings, **description}
        write_json(self.output / "preparation.json", content)
        print(json.dumps(content, indent=2, ensure_ascii=False), flush=True)
