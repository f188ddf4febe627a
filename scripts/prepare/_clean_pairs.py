"""Pairs of sentences that are too long, empty on a side, or of too different lengths to train on.

Both files of a text are written at once, so that their lines stay each other's translation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

from tqdm import tqdm

from scripts._shared.commands import short
from scripts.prepare._lines import read_lines

# Why pairs are removed; each is counted for the first that holds.
REASONS = ("empty", "too_long", "too_unequal")


@dataclass(frozen=True)
class Limits:
    """Lengths in units of the pairs that are kept.

    Args:
        max_length: of either side; none is empty.
        max_ratio: of the longer side to the shorter.

    Raises ValueError when no pair could be kept.
    """

    max_length: int = 250
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(
                f"--max-length {self.max_length} is no number of units: give 1 or more"
            )
        if not 1 <= self.max_ratio < math.inf:
            raise ValueError(
                f"--max-ratio {self.max_ratio} is not how many times the longer side is as long "
                "as the shorter: give 1 or more"
            )


def clean(
    sources: Mapping[str, Path], targets: Mapping[str, Path], pairs: int, limits: Limits, part: str
) -> dict:
    """Write the pairs that are kept; return their numbers and the units kept, by language.

    Args:
        sources: texts of units with one space between two, by language.
        targets: new files, by language.
        pairs: how many there are.
        limits: what is kept.
        part: name of the text in messages.

    Raises ValueError when there is another number of lines, or nothing is kept.
    """
    # 1.15 is a little less than 23/20 as a float: pairs of 23 and 20 units would be lost.
    ratio = Fraction(str(limits.max_ratio))
    times, parts = ratio.numerator, ratio.denominator
    counts = dict.fromkeys(("kept", *REASONS), 0)
    units = [0, 0]
    lines = 0
    first, second = (read_lines(path) for path in sources.values())
    one, two = (path.open("w", encoding="utf-8", newline="\n") for path in targets.values())
    with (
        one,
        two,
        tqdm(
            total=pairs, desc=f"clean {part}", unit=" pairs", unit_scale=True, disable=None
        ) as bar,
    ):
        for left, right in zip_longest(first, second):
            lines += 1
            if left is None or right is None:
                break
            bar.update()
            if not left or not right:
                counts["empty"] += 1
                continue
            lengths = left.count(" ") + 1, right.count(" ") + 1
            if max(lengths) > limits.max_length:
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
            "lengths): give larger ones, or other "
            "texts"
        )
    return {**counts, "units": dict(zip(sources, units, strict=True))}
