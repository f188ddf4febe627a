"""Learning curves from fairseq-train's logs: its --log-file or printed output, json or simple."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fairseq_plugins.segment_language_model.evaluation import PERPLEXITY
from scripts._shared.command_line import NamedFile
from scripts._shared.commands import short

TRAINING = "training"
_JSON = re.compile(r'(?:^|\| )(\{".*\})$')
_VALIDATION = re.compile(r"(?:^|\| )epoch \d+ \| valid on 'valid' subset \| (.*)$")
_TRAINING = re.compile(r"\b(\w+)=([\d.]+)")
_BRANCH = re.compile(r"valid_((?:encoder|decoder)\d+(?:_self)?)_(kappa|alpha)(\d+)")
# the figures of a validation that are drawn over time, with the title of their plot
_FIGURES = {
    "usage of memories, %": re.compile(r"valid_(\w*memory\d+_usage)"),
    "KL of memories, nats": re.compile(r"valid_(\w*memory\d+_kl)"),
    "mean span, tokens": re.compile(r"valid_(span_mean(?:_\d+)?)"),
    "largest span, tokens": re.compile(r"valid_(span_max(?:_\d+)?)"),
}


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
    """Return the charts of trainings by their titles: losses in the data's unit, other figures."""
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
    for colour, (label, losses, figures) in enumerate(trainings):
        for part, series in losses.items():
            y = [2**bits if unit == PERPLEXITY else bits for bits in series["y"]]
            look = {"name": label if several else part, "colour": colour, "faint": part == TRAINING}
            loss["series"].append({**series, **look, "y": y})
        for (title, name), series in figures.items():
            heading, _, y_label = title.partition(", ")
            chart = {"title": heading, "yLabel": y_label or "weight", "series": []}
            lines = charts.setdefault(title, chart)["series"]
            name = f"{label}, {name}" if several else name
            lines.append({**series, "name": name, "colour": len(lines)})
    return charts


def read_log(log: NamedFile) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """Return the losses of a training in bits a token, and its other figures, by update.

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
        {name: series(points) for name, points in _other_figures(valid).items()},
    )


def _losses(prefix: str, lines: dict[int, dict[str, str]]) -> dict[int, float]:
    """Return the finite losses by update; with label smoothing, fairseq's nll_loss."""
    losses = {}
    for update, values in lines.items():
        loss = values.get(f"{prefix}nll_loss", values.get(f"{prefix}loss", "nan"))
        if math.isfinite(float(loss)):
            losses[update] = float(loss)
    return losses


def _other_figures(valid: dict[int, dict[str, str]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return κ, α, spans and usage by title and name, and by update."""
    figures: dict[tuple[str, str], dict[int, float]] = {}
    for update, values in valid.items():
        for name, value in values.items():
            if match := _BRANCH.fullmatch(name):
                layer, kind = match[1].replace("_", " "), {"kappa": "κ", "alpha": "α"}[match[2]]
                key = f"{kind} of {layer}", f"branch {match[3]}"
            else:
                found = ((title, pattern.fullmatch(name)) for title, pattern in _FIGURES.items())
                key = next(((title, match[1]) for title, match in found if match), None)
            if key is not None:
                figures.setdefault(key, {})[update] = float(value)
    return figures
