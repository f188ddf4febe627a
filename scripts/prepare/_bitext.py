"""Parallel texts: two files with the same prefix, whose lines are each other's translation.

Both files of a text are written at once, so that their lines stay each other's translation.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

from tqdm import tqdm

from scripts._shared.command_line import check_at_least
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts.prepare._lines import open_text, progress, read_lines
from scripts.prepare._steps import fingerprint
from scripts.prepare._subwords import VISIBLE

# Why pairs are removed; each is counted for the first that holds.
REASONS = ("empty", "too_long", "too_unequal")


def option_of(part: str) -> str:
    """Option that names a part: test, test1 and test2 are all of --test."""
    return f"--{part.rstrip('0123456789')}"


def text_file(prefix: Path, language: str, option: str) -> Path:
    """File PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz; raises ValueError when not one is there."""
    plain = prefix.with_name(f"{prefix.name}.{language}")
    found = [path for path in (plain, Path(f"{plain}.gz")) if path.is_file()]
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
        files: dict[str, list[tuple[str, Path]]] = {}
        for part in self.parts:
            named = files.setdefault(option_of(part)[2:], [])
            for language in self.languages:
                named += [(path.name, path) for path in self.files(part, language)]
        return {option: fingerprint(named) for option, named in files.items()}


def _count(path: Path, option: str, bar: tqdm) -> int:
    """Number of lines of a raw text; raises ValueError when it has no text."""
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
    with progress(desc="read", unit=" lines") as bar:
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
            if (lines := sum(1 for _ in read_lines(copy))) != pairs[part]:
                raise ValueError(
                    f"references/{copy.name} has {lines:,} lines, {short(path)} had "
                    f"{pairs[part]:,}: leave the input as it is while it is prepared, and run the "
                    "same command again"
                )


@dataclass(frozen=True)
class Limits:
    """Pairs that are kept: units of either side, and how many times the shorter side's the longer.

    No side is empty. Raises ValueError when no pair could be kept.
    """

    max_length: int = 250
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        check_at_least(1, max_length=self.max_length)
        if not 1 <= self.max_ratio < math.inf:
            raise ValueError(
                f"--max-ratio {self.max_ratio} is not how many times the longer side is as long "
                "as the shorter: give 1 or more"
            )


def clean(
    sources: Mapping[str, Path], targets: Mapping[str, Path], pairs: int, limits: Limits, part: str
) -> dict:
    """Write the pairs that are kept to targets; return numbers of pairs and of the units kept.

    Files and units are by language, part is what messages call them. Raises ValueError when the
    sources have another number of lines than pairs, or nothing is kept.
    """
    # 1.15 is a little less than 23/20 as a float: pairs of 23 and 20 units would be lost.
    ratio = Fraction(str(limits.max_ratio))
    times, parts = ratio.numerator, ratio.denominator
    counts = dict.fromkeys(("kept", *REASONS), 0)
    units = [0, 0]
    lines = 0
    first, second = (read_lines(path) for path in sources.values())
    one, two = (path.open("w", encoding="utf-8", newline="\n") for path in targets.values())
    with one, two, progress(total=pairs, desc=f"clean {part}", unit=" pairs") as bar:
        for left, right in zip_longest(first, second):
            lines += 1
            if left is None or right is None:
                break
            bar.update()
            lengths = left.count(" ") + 1, right.count(" ") + 1
            if not left or not right:
                counts["empty"] += 1
            elif max(lengths) > limits.max_length:
                counts["too_long"] += 1
            elif max(lengths) * parts > min(lengths) * times:
                counts["too_unequal"] += 1
            else:
                counts["kept"] += 1
                units[0] += lengths[0]
                units[1] += lengths[1]
                one.write(f"{left}\n")
                two.write(f"{right}\n")
    if lines != pairs or left is None or right is None:
        raise ValueError(
            f"{' and '.join(map(short, sources.values()))} have not {pairs:,} lines each: remove "
            "them to have them made again, and run the same command again"
        )
    if not counts["kept"]:
        raise ValueError(
            f"--max-length {limits.max_length} and --max-ratio {limits.max_ratio} keep none of the "
            f"{pairs:,} pairs of {part} ({counts['empty']:,} are empty on a side, "
            f"{counts['too_long']:,} too long, {counts['too_unequal']:,} of too different "
            "lengths): give larger ones, or other texts"
        )
    return {**counts, "units": dict(zip(sources, units, strict=True))}
