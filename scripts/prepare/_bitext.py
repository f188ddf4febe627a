"""Parallel texts: two files with the same prefix, whose lines are each other's translation."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare._lines import count_lines, open_text, read_lines
from scripts.prepare._moses import VISIBLE

UNCHANGED = "leave the input as it is while it is prepared, and run the same command again"


def option_of(part: str) -> str:
    """Option that names a part: test, test1 and test2 are all of --test."""
    return f"--{part.rstrip('0123456789')}"


def text_file(prefix: Path, language: str, option: str) -> Path:
    """File PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz.

    Raises ValueError when there is neither or both.
    """
    plain = prefix.with_name(f"{prefix.name}.{language}")
    files = [plain, plain.with_name(f"{plain.name}.gz")]
    found = [path for path in files if path.is_file()]
    if not found:
        raise ValueError(
            f"{option} {short(prefix)}: there is no file {plain.name} or {plain.name}.gz: give "
            f"what the names of both files have before .{language}"
        )
    if len(found) > 1:
        raise ValueError(
            f"{option} {short(prefix)}: there are {plain.name} and {plain.name}.gz: remove one of "
            "them"
        )
    return found[0]


@dataclass(frozen=True)
class Bitext:
    """Raw parallel texts of a preparation.

    Args:
        languages: codes of source and target.
        parts: prefixes of train, which may be several, of valid, and of test, test1 and so on.

    Raises ValueError when the languages are the same, a file is missing or one that trains is to
    validate or test as well.
    """

    languages: tuple[str, str]
    parts: Mapping[str, tuple[Path, ...]]

    def __post_init__(self) -> None:
        source, target = self.languages
        if source == target:
            raise ValueError(
                f"--target-lang {target} is --source-lang as well: give two different languages"
            )
        for part, prefixes in self.parts.items():
            for prefix in prefixes:
                if part != "train" and prefix in self.parts["train"]:
                    raise ValueError(
                        f"{option_of(part)} {short(prefix)} is --train as well, and a model would "
                        "be scored on what it learned: give another text"
                    )
            for language in self.languages:
                self.files(part, language)

    @property
    def tests(self) -> list[str]:
        """Names of the parts that test."""
        return [part for part in self.parts if option_of(part) == "--test"]

    def files(self, part: str, language: str) -> list[Path]:
        """Files of a part in a language; raises as text_file."""
        return [text_file(prefix, language, option_of(part)) for prefix in self.parts[part]]

    def lines(self, part: str, language: str) -> Iterator[str]:
        """Lines of a part in a language; raises as read_lines."""
        for path in self.files(part, language):
            yield from read_lines(path)

    def fingerprints(self) -> dict[str, str]:
        """Digest of the names, sizes and modification times of the files, by what names them."""
        digests = {}
        for part in self.parts:
            digest = digests.setdefault(option_of(part)[2:], hashlib.sha256())
            for language in self.languages:
                for path in self.files(part, language):
                    status = path.stat()
                    digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return {option: digest.hexdigest()[:16] for option, digest in digests.items()}


def _count(path: Path, option: str, bar: tqdm) -> int:
    """Number of lines of a raw text.

    Raises ValueError when it has no text.
    """
    lines, visible = 0, False
    for line in read_lines(path):
        lines += 1
        visible = visible or VISIBLE.search(line) is not None
        bar.update()
    if not visible:
        raise ValueError(f"{option}: {short(path)} has no text: give one that has")
    return lines


def survey(bitext: Bitext, target: Path) -> dict[str, int]:
    """Read all, write the pairs of each prefix to a JSON file, return those of each part.

    Raises ValueError when a text is empty or not UTF-8, or its two files do not pair up.
    """
    found: dict[str, dict[str, int]] = {}
    with tqdm(desc="read", unit=" lines", unit_scale=True, disable=None) as bar:
        for part, prefixes in bitext.parts.items():
            found[part] = {}
            option = option_of(part)
            for prefix in prefixes:
                files = [text_file(prefix, language, option) for language in bitext.languages]
                first, second = (_count(path, option, bar) for path in files)
                if first != second:
                    raise ValueError(
                        f"{option} {short(prefix)}: {files[0].name} has {first:,} lines, "
                        f"{files[1].name} has {second:,}: give files whose lines are each other's "
                        "translation"
                    )
                found[part][prefix.name] = found[part].get(prefix.name, 0) + first
    write_json(target, found)
    return {part: sum(pairs.values()) for part, pairs in found.items()}


def copy_references(bitext: Bitext, pairs: Mapping[str, int], target: Path) -> None:
    """Write the raw texts of the parts that test to a new folder, byte by byte but unpacked.

    Raises ValueError when one has another number of lines than there were pairs.
    """
    target.mkdir()
    for part in bitext.tests:
        for language in bitext.languages:
            copy = target / f"{part}.{language}"
            (path,) = bitext.files(part, language)
            with open_text(path) as source, copy.open("wb") as file:
                shutil.copyfileobj(source, file)
            if (lines := count_lines(copy)) != pairs[part]:
                raise ValueError(
                    f"references/{copy.name} has {lines:,} lines, {short(path)} had "
                    f"{pairs[part]:,}: {UNCHANGED}"
                )
