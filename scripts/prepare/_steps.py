"""Steps of a preparation: each leaves a whole file or folder with a record, and is done once.

OUTPUT/steps.json     options and sources of each complete step, and what it found
OUTPUT/NAME           file or folder of the step of that name
OUTPUT/NAME.partial   while it is made; removed when that fails

A step that was made with other options is refused. One whose file was removed, or whose sources
were made again from something else, is made again.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts._shared.commands import short
from scripts._shared.files import write_json

RECORDS = "steps.json"


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


class Steps:
    """Steps of the preparation that a folder holds, or will hold.

    Args:
        output: --output, which is made by the first step.
        preparation: what is prepared, such as news.

    Raises ValueError when the folder holds something else.
    """

    def __init__(self, output: Path, preparation: str) -> None:
        self.output = output
        self.preparation = preparation
        self.records: dict[str, dict] = {}
        try:
            occupied = output.exists() and (not output.is_dir() or any(output.iterdir()))
            found = json.loads((output / RECORDS).read_text(encoding="utf-8")) if occupied else {}
        except (OSError, ValueError):
            found = {}
        if occupied:
            steps = found.get("steps") if isinstance(found, dict) else None
            if not isinstance(steps, dict) or found.get("preparation") != preparation:
                raise ValueError(
                    f"--output {short(output)} exists and does not hold prepared {preparation}: "
                    "remove it or give another folder"
                )
            self.records = steps

    def claim(self) -> None:
        """Make the folder, to be known again where it gets something beside the steps first."""
        self.output.mkdir(parents=True, exist_ok=True)
        self._save()

    def _save(self) -> None:
        content = {"preparation": self.preparation, "steps": self.records}
        write_json(self.output / RECORDS, content)

    def _identity(self, name: str) -> str:
        """What a complete step was made from and with, its sources' identities included."""
        record = {key: self.records[name][key] for key in ("options", "sources", "result")}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def _check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Check the options that a step was made with.

        Raises ValueError when one of them is another now.
        """
        made = self.records[name]["options"]
        for option, value in options.items():
            if made.get(option) == value:
                continue
            # All that has to go, not only what is met first.
            others = [
                other
                for other, record in self.records.items()
                if option in record["options"]
                and record["options"][option] != value
                and (self.output / other).exists()
            ]
            raise ValueError(
                f"--output {short(self.output)}: {name} was made with another --{option} "
                f"({made.get(option)}, now {value}): give another folder, or remove "
                f"{', '.join(short(self.output / other) for other in others)} to have this and "
                "what depends on it made again"
            )

    def is_complete(self, name: str, options: Mapping[str, Any], sources: Sequence[str]) -> bool:
        """Whether a step is done, with these options, from its sources as they are.

        Raises ValueError when its file was made with other options.
        """
        path = self.output / name
        if name not in self.records or not path.exists():
            return False
        self._check_options(name, options)
        record = self.records[name]
        return record["sources"] == {
            source: self._identity(source) for source in sources
        } and record["bytes"] == file_sizes(path)

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
        partial = path.with_name(path.name + ".partial")
        print(f"{name}: at work", flush=True)
        started = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A run that is killed from here on must not find the old record.
            if self.records.pop(name, None):
                self._save()
            remove(partial)
            result = work(partial)
            remove(path)
            partial.rename(path)
        except BaseException:
            with suppress(OSError):
                remove(partial)
            self._remove_empty_folders(path.parent)
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

    def _remove_empty_folders(self, folder: Path) -> None:
        """Remove a folder within the output and the output, as far as they are empty."""
        with suppress(OSError):
            while folder.is_relative_to(self.output):
                folder.rmdir()
                folder = folder.parent


def run_script(
    work: Callable[[], Any], output: Path, interrupted: str = "complete steps are kept"
) -> int:
    """Do the work of a script, tell what went wrong, and return its exit status.

    Args:
        work: raises ValueError when something is in the way.
        output: --output.
        interrupted: what Ctrl-C leaves.
    """
    try:
        work()
    except KeyboardInterrupt:
        print(f"\ninterrupted; {interrupted}, run the same command again", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: --output {short(output)}: {error}: make room, or give a folder where you may "
            "write",
            file=sys.stderr,
        )
        return 1
    return 0
