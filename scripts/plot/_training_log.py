"""Logs that fairseq-train writes."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts._shared.commands import short

_JSON = re.compile(r'(?:^|\| )(\{"epoch".*"valid_loss".*\})$')
_SIMPLE = re.compile(r"(?:^|\| )epoch \d+ \| valid on 'valid' subset \| (.*)$")


@contextmanager
def open_log(path: Path) -> Iterator[Iterator[str]]:
    """Lines of a log; raises ValueError when there is no such file."""
    if not path.is_file():
        raise ValueError(
            f"--log {short(path)} is no file: name one that --log-file of fairseq-train wrote"
        )
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield map(str.rstrip, lines)


def read_validation(line: str) -> tuple[int, dict[str, str]] | None:
    """Updates, and what a line of a log tells of the validation part by name; None for others."""
    values = {}
    if found := _JSON.search(line):
        told = json.loads(found[1]).items()
        values = {name.removeprefix("valid_"): value for name, value in told}
    elif found := _SIMPLE.search(line):
        values = dict(field.partition(" ")[::2] for field in found[1].split(" | "))
    # a line that was cut short has no number of updates, which comes behind the figures
    return (int(values["num_updates"]), values) if values.get("num_updates") else None
