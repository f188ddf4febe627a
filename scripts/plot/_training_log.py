"""Lines of the logs that fairseq-train writes."""

import json
import re

_JSON = re.compile(r'(?:^|\| )(\{"epoch".*"valid_loss".*\})$')
_SIMPLE = re.compile(r"(?:^|\| )epoch \d+ \| valid on 'valid' subset \| (.*)$")


def validation_values(line: str) -> dict[str, str] | None:
    """What a line of a log tells of the validation part, by name; None for all other lines."""
    if found := _JSON.search(line):
        return {name.removeprefix("valid_"): value for name, value in json.loads(found[1]).items()}
    if found := _SIMPLE.search(line):
        return dict(field.partition(" ")[::2] for field in found[1].split(" | "))
    return None
