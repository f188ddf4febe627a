"""A prepared folder and its stages, each a folder that is made whole or is not there.

OUTPUT/NAME               a finished stage; its stage.json has the options that made it, its sizes
OUTPUT/NAME.partial-PID   a stage at work; the next run removes what a killed one left
OUTPUT/download           archives, until all is done
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


def resolved(path: str) -> Path:
    """Absolute path that an option names."""
    return Path(path).resolve()


def existing(path: str) -> Path:
    """Absolute path of the file or folder that an option names; argparse names the option."""
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be read: give a file or folder that can")
    return resolved(path)


def run_preparation(
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None],
    prepare: Callable[[argparse.Namespace], None],
    arguments: list[str] | None = None,
) -> int:
    """Command line of a preparation, with the docstring of its module; returns its exit status."""
    parser = command_parser(description)
    text = "folder of the result; fairseq reads DIR/bin"
    parser.add_argument("--output", type=resolved, required=True, metavar="DIR", help=text)
    add_options(parser)
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


def fingerprint(files: Iterable[Path]) -> str:
    """Digest of the names, sizes and modification times of files."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def file_digest(path: Path | None) -> str | None:
    """SHA-256 of a file, if one is given."""
    return path and hashlib.sha256(path.read_bytes()).hexdigest()


class Stages:
    """The stages of a preparation in the folder --output.

    Args:
        output: the folder.
        settings: options and inputs of all stages, by the options' names.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self.settings = dict(settings)

    def recorded(self, name: str) -> Any:
        """Result of a finished stage; raises ValueError if it was made with other settings."""

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
                    f"remove {', '.join(stale)} to have this made again"
                )
        return record["result"]

    def run(self, name: str, work: Callable[[Path], Any], settings: Mapping[str, Any] = {}) -> Any:
        """Result of a stage: as recorded if it is complete, else made now.

        Args:
            name: of the folder.
            work: fills the new folder that it gets; returns what to record, as JSON has it.
            settings: that change this stage and those after it.
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
        # a killed run's child may still write to its own
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
        """Write and print what was made, and remove the archives."""
        shutil.rmtree(self.output / DOWNLOAD, ignore_errors=True)
        content = {**self.settings, **description}
        write_json(self.output / "preparation.json", content)
        print(json.dumps(content, indent=2, ensure_ascii=False), flush=True)
