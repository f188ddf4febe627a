"""Read logs of fairseq-train: its --log-file or printed output, as json or simple text."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scripts._shared.commands import short

_JSON = re.compile(r'(?:^|\| )(\{".*\})$')
_VALIDATION = re.compile(r"(?:^|\| )epoch \d+ \| valid on 'valid' subset \| (.*)$")
_TRAINING = re.compile(r"\b(\w+)=([\d.]+)")
_UPDATES = "valid_num_updates"


def read_figures(line: str) -> dict[str, str]:
    """Return the values in a line by their names in JSON, such as valid_loss for a validation."""
    if found := _JSON.search(line):
        # several workers may write into the same line
        with suppress(ValueError):
            return json.loads(found[1])
    if found := _VALIDATION.search(line):
        fields = (field.partition(" ") for field in found[1].split(" | "))
        return {f"valid_{name}": value for name, _, value in fields}
    return dict(_TRAINING.findall(line))


def read_log(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the lines of a log, and the values in each."""
    if not path.is_file():
        raise ValueError(
            f"--log {short(path)} is not a file: name one that --log-file of fairseq-train wrote"
        )
    # splitlines() would also split at other characters
    lines = [line.rstrip() for line in path.open(encoding="utf-8", errors="replace")]
    return lines, [read_figures(line) for line in lines]


def validations(lines: Iterable[dict[str, str]]) -> dict[int, dict[str, str]]:
    """Return the values of validations by update, sorted; of an update's lines, the last counts."""
    # a line that was cut short lacks the number of updates, which follows the other values
    found = {int(figures[_UPDATES]): figures for figures in lines if figures.get(_UPDATES)}
    return dict(sorted(found.items()))
