"""Learning curves from fairseq-train's logs: its --log-file or printed output, json or simple."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fairseq_plugins.units import PERPLEXITY
from scripts._shared.command_line import NamedFile
from scripts._shared.commands import short

TRAINING = "training"
# Hydra has its own prefix of a line
_JSON = re.compile(r'(?:^|\| |\] - )(\{".*\})$')
_VALIDATION = re.compile(r"(?:^|\| )epoch \d+ \| valid on 'valid' subset \| (.*)$")
_TRAINING = re.compile(r"\b(\w+)=([\d.]+)")
# the mean and the largest learned span, of all layers and of each
_SPANS = re.compile(r"valid_(span_(mean|max)(?:_\d+)?)")


def read_figures(line: str) -> dict[str, str]:
    """Return the values in a line by their names in JSON, such as valid_loss for a validation."""
    if match := _JSON.search(line):
        # several workers may write into the same line
        with suppress(ValueError):
            return json.loads(match[1])
    if match := _VALIDATION.search(line):
        fields = (field.partition(" ") for field in match[1].split(" | "))
        return {f"valid_{name}": value for name, _, value in fields}
    return dict(_TRAINING.findall(line))


def learning_curves(logs: Sequence[NamedFile], unit: str) -> dict[str, dict[str, Any]]:
    """Return the charts of trainings by their titles: losses in the data's unit, and spans."""
    trainings = [(log.label, *read_log(log)) for log in logs]
    several = len(trainings) > 1
    # wide if it is alone
    loss: dict[str, Any] = {
        "title": "loss",
        "yLabel": unit,
        "yLog": unit == PERPLEXITY,
        "series": [],
    }
    charts = {"loss": loss}
    for colour, (label, losses, spans) in enumerate(trainings):
        for part, series in losses.items():
            y = [2**bits if unit == PERPLEXITY else bits for bits in series["y"]]
            look = {"name": label if several else part, "colour": colour, "faint": part == TRAINING}
            loss["series"].append({**series, **look, "y": y})
        for (title, name), series in spans.items():
            chart = {"title": title, "yLabel": "tokens", "series": []}
            lines = charts.setdefault(title, chart)["series"]
            name = f"{label}, {name}" if several else name
            lines.append({**series, "name": name, "colour": len(lines)})
    return charts


def read_log(log: NamedFile) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """Return the losses of a training in bits a token, and its learned spans, by update.

    If a log has an update twice, as after a resumed training, the later line counts. Time is that
    of the updates, without validation and saving.
    """
    if not log.path.is_file():
        raise ValueError(
            f"--log {short(log.path)} is not a file: name one that --log-file of fairseq-train "
            "wrote"
        )
    with log.path.open(encoding="utf-8", errors="replace") as lines:
        figures = [read_figures(line.rstrip()) for line in lines]
    # a line that was cut short lacks the number of updates, which follows the other values
    valid = {int(x["valid_num_updates"]): x for x in figures if x.get("valid_num_updates")}
    train = {int(x["num_updates"]): x for x in figures if x.keys() >= {"num_updates", "train_wall"}}
    valid, train = dict(sorted(valid.items())), dict(sorted(train.items()))
    losses = {"validation": _losses("valid_", valid), TRAINING: _losses("", train)}
    if not losses["validation"]:
        raise ValueError(
            f"--log {short(log.path)} has no validation loss: name the log of a training that has "
            "validated, written with --log-format json or simple"
        )
    ends = [0, *train]
    minutes = np.cumsum([0.0, *(float(x["train_wall"]) / 60 for x in train.values())])

    def series(points: dict[int, float]) -> dict[str, list]:
        # interpolated if the update has no line, as at the end of an epoch
        at = np.interp(list(points), ends, minutes).round(3).tolist()
        return {"updates": list(points), "minutes": at, "y": list(points.values())}

    return (
        {part: series(points) for part, points in losses.items()},
        {name: series(points) for name, points in _learned_spans(valid).items()},
    )


def _losses(prefix: str, lines: dict[int, dict[str, str]]) -> dict[int, float]:
    """Return the finite losses by update; with label smoothing, fairseq's nll_loss."""
    losses = {}
    for update, values in lines.items():
        loss = values.get(f"{prefix}nll_loss", values.get(f"{prefix}loss", "nan"))
        if math.isfinite(float(loss)):
            losses[update] = float(loss)
    return losses


def _learned_spans(valid: dict[int, dict[str, str]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return learned spans in tokens, by title and name, and by update."""
    spans: dict[tuple[str, str], dict[int, float]] = {}
    for update, values in valid.items():
        for name, value in values.items():
            if match := _SPANS.fullmatch(name):
                title = {"mean": "mean span", "max": "largest span"}[match[2]]
                spans.setdefault((title, match[1]), {})[update] = float(value)
    return spans
