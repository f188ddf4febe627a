"""Logs of fairseq-train: files of --log-file, or what it printed, as json or simple text."""

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
    """Figures of a line by the names that they have in JSON: valid_loss is a validation's loss."""
    if found := _JSON.search(line):
        # workers may write into one another's lines
        with suppress(ValueError):
            return json.loads(found[1])
    if found := _VALIDATION.search(line):
        fields = (field.partition(" ") for field in found[1].split(" | "))
        return {f"valid_{name}": value for name, _, value in fields}
    return dict(_TRAINING.findall(line))


def read_log(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Lines of a log, and the figures of each."""
    if not path.is_file():
        raise ValueError(
            f"--log {short(path)} is no file: name one that --log-file of fairseq-train wrote"
        )
    # nothing but a newline ends a line
    lines = [line.rstrip() for line in path.open(encoding="utf-8", errors="replace")]
    return lines, [read_figures(line) for line in lines]


def validations(lines: Iterable[dict[str, str]]) -> dict[int, dict[str, str]]:
    """Figures of validations by update, which rise; the later line where an update has several."""
    # a line that was cut short has no number of updates, which comes behind the figures
    found = {int(figures[_UPDATES]): figures for figures in lines if figures.get(_UPDATES)}
    return dict(sorted(found.items()))
