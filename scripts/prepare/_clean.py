"""Remove pairs of sentences that are empty, too long or of too unequal length, after step 4."""

import argparse
from pathlib import Path

from scripts.prepare._lines import progress, read_lines

# Parts that are cleaned; a test part has to keep every sentence.
CLEANED = ("train", "valid")


def verdict(pair: tuple[str, str], max_length: int, max_ratio: float) -> str:
    """Return why a pair of lines is removed, or "kept" if it is not."""
    if not all(pair):
        return "empty"
    shorter, longer = sorted(line.count(" ") + 1 for line in pair)
    if longer > max_length:
        return "too_long"
    return "too_unequal" if longer > max_ratio * shorter else "kept"


def clean(
    units: Path, languages: list[str], options: argparse.Namespace, folder: Path
) -> dict[str, dict[str, int]]:
    """Write the pairs of training and validation that fit; count the pairs by verdict."""
    folder.mkdir()
    counts, limits = {}, (options.max_length, options.max_ratio)
    for part in CLEANED:
        count = counts[part] = dict.fromkeys(("kept", "empty", "too_long", "too_unequal"), 0)
        names = [f"{part}.{language}" for language in languages]
        sides = [read_lines(units / name) for name in names]
        one, two = ((folder / name).open("w", encoding="utf-8", newline="\n") for name in names)
        with one, two:
            for pair in progress(zip(*sides, strict=True), desc=f"clean {part}", unit=" pairs"):
                answer = verdict(pair, *limits)
                count[answer] += 1
                if answer == "kept":
                    one.write(f"{pair[0]}\n")
                    two.write(f"{pair[1]}\n")
        if not count["kept"]:
            raise ValueError(
                f"--max-length {limits[0]} and --max-ratio {limits[1]} keep no pair of {part} "
                f"({count}): give larger limits, or other texts"
            )
    return counts
