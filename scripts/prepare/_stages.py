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

from scripts._shared.command_line import command_parser
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


def preparation_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of a preparation, given its module's docstring, with --output."""
    parser = command_parser(description)
    text = "folder of the result; fairseq reads DIR/bin"
    parser.add_argument("--output", type=absolute_path, required=True, metavar="DIR", help=text)
    return parser


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


def read_record(folder: Path) -> dict[str, Any]:
    """Return the settings and the result of a finished stage."""
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


class Stages:
    """The stages of a preparation in the --output folder.

    Args:
        output: the folder.
        settings: options and inputs of all stages, by option name.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self.settings = dict(settings)

    def run(
        self,
        name: str,
        work: Callable[..., Any],
        *arguments: Any,
        settings: Mapping[str, Any] = {},
    ) -> Any:
        """Make a stage, unless it is complete; return its result.

        Args:
            name: name of the folder.
            work: function of the arguments and a new folder, which it fills; its result is
                recorded as JSON.
            arguments: what ``work`` gets before the folder.
            settings: options that change this stage and those after it.
        """
        self.settings |= settings
        folder = self.output / name
        if (folder / RECORD).exists():
            self._check_settings(name)
            print(f"{name}: complete", flush=True)
            return read_record(folder)["result"]
        if folder.exists():
            raise ValueError(
                f"--output {short(self.output)}: {name} in it was not made by this command: remove "
                "it or give another folder"
            )
        print(f"{name}: at work", flush=True)
        # with the process id: a child of a killed run may still write to that run's folder
        partial = self.output / f"{name}.partial-{os.getpid()}"
        try:
            for abandoned in self.output.glob(f"{name}.partial-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            partial.mkdir(parents=True)
            result = work(*arguments, partial)
            write_json(partial / RECORD, {"settings": self.settings, "result": result})
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            for empty in (self.output / DOWNLOAD, self.output):
                with suppress(OSError):
                    empty.rmdir()
            raise
        return result

    def _check_settings(self, name: str) -> None:
        """Raise ValueError if a finished stage was made with other settings."""
        made_with = read_record(self.output / name)["settings"]
        for option, value in json.loads(json.dumps(self.settings)).items():
            if made_with.get(option) != value:
                folders = [path.parent for path in sorted(self.output.glob(f"*/{RECORD}"))]
                stale = [
                    f for f in folders if read_record(f)["settings"].get(option, value) != value
                ]
                raise ValueError(
                    f"--output {short(self.output)}: {name} was made with another --{option} "
                    f"({made_with.get(option)}, now {value}): give another folder, or remove "
                    f"{', '.join(map(short, stale))} to make it again"
                )

    def finish(self, description: Mapping[str, Any]) -> None:
        """Write and print preparation.json, and remove the archives."""
        shutil.rmtree(self.output / DOWNLOAD, ignore_errors=True)
        content = {**self.settings, **description}
        write_json(self.output / "preparation.json", content)
        print(json.dumps(content, indent=2, ensure_ascii=False), flush=True)
