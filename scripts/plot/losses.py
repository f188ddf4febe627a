r"""Validation loss of trainings against updates, time or training loss, from fairseq-train's logs.

    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --output losses
    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --against time
    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --against training-loss

A log is a file that --log-file of fairseq-train names, or what the command printed, with any
--log-format but none. Of an update that a log has twice, as one of a resumed training may, the
later loss counts. Losses are means a token in base 2, as fairseq prints them; with smoothed labels
those are what it calls nll_loss. Time is that of the updates, validation and saving left out; where
no line tells it for the update of a validation, it is interpolated between those that do. The
training loss, with dropout, is the mean of what the log tells since the validation before.

Writes losses.json and losses.png, and prints a table: the last loss and the smallest one.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from scripts._shared.command_line import (
    NamedFile,
    add_named_files,
    add_output_options,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.results import markdown_table, prepare_results, save_results
from scripts.plot._training_log import open_log, read_validation

UNIT = "bits a token"
UPDATES, TIME, TRAINING_LOSS = "updates", "time", "training-loss"
# updates, and the seconds of those since the last such line: as JSON, and as simple text
_TRAINED = re.compile(
    r'(?:"num_updates": "|\bnum_updates=)(\d+)\b.*(?:"train_wall": "|\btrain_wall=)([\d.]+)'
)
# in such a line, the one without smoothed labels first
_TRAINING_LOSSES = [
    re.compile(rf'(?:"{name}": "|\b{name}=)([\d.]+)') for name in ("nll_loss", "loss")
]


class Validation(NamedTuple):
    """A validation's loss; seconds of training and training loss before it, None where not told."""

    loss: float
    seconds: float | None
    training_loss: float | None


def validation(line: str) -> tuple[int, float] | None:
    """Updates and validation loss that a line of a log tells; None for all other lines."""
    if (told := read_validation(line)) is None:
        return None
    updates, values = told
    return updates, float(values.get("nll_loss", values["loss"]))


def validations(lines: Iterable[str]) -> dict[int, Validation]:
    """Validations that lines tell, by update; the later one where an update has several."""
    losses: dict[int, float] = {}
    # by the update at which each stretch of training ends; fairseq repeats lines in its --log-file
    stretches: dict[int, float] = {}
    training: dict[int, float] = {}
    for line in lines:
        if told := _TRAINED.search(line):
            stretches[int(told[1])] = float(told[2])
            if loss := next(filter(None, (name.search(line) for name in _TRAINING_LOSSES)), None):
                training[int(told[1])] = float(loss[1])
        elif told := validation(line):
            losses[told[0]] = told[1]
    ends = sorted(stretches)
    seconds = np.cumsum([stretches[end] for end in ends])
    # a validation between two such lines, as one at the end of an epoch, is between their times
    found, before = {}, 0
    for update, loss in sorted(losses.items()):
        time = round(np.interp(update, [0, *ends], [0.0, *seconds]).item(), 1) if ends else None
        found[update] = Validation(loss, time, _mean_loss(training, before, update))
        before = update
    return found


def _mean_loss(training: dict[int, float], before: int, update: int) -> float | None:
    """Mean of the training losses told since another update; the last one where there is none."""
    told = [loss for end, loss in sorted(training.items()) if end <= update]
    since = [loss for end, loss in training.items() if before < end <= update]
    return round(fmean(since or told[-1:]), 4) if told else None


def read_validations(log: NamedFile, against: str = UPDATES) -> dict[int, Validation]:
    """Validations of a log by update, which rise.

    Raises ValueError when there is no such file, or no loss in it, or one that is no number, or
    none of the times or training losses that they are to be drawn against.
    """
    label = f"--log {short(log.path)}"
    with open_log(log.path) as lines:
        found = validations(lines)
    if not found:
        raise ValueError(
            f"{label} tells no validation loss: name the log of a training that has validated, "
            "written with --log-format json or simple"
        )
    for update, (loss, seconds, training_loss) in found.items():
        if not math.isfinite(loss):
            raise ValueError(
                f"{label}: the validation loss after {update:,} updates is {loss}: leave out this "
                "log of a training that diverged"
            )
        missing = {TIME: seconds is None, TRAINING_LOSS: training_loss is None}
        if missing.get(against):
            what = "when" if against == TIME else "the training loss at which"
            raise ValueError(
                f"{label} does not tell {what} {update:,} updates were done: train with a "
                "--log-interval below that of validation"
            )
    return found


def summary(log: NamedFile, found: dict[int, Validation]) -> dict[str, Any]:
    """All losses of a log, the last one and the smallest one with their updates."""
    last, best = max(found), min(found, key=lambda update: found[update].loss)
    return {
        "training": log.label,
        "log": short(log.path),
        "updates": list(found),
        "losses": [validated.loss for validated in found.values()],
        "seconds": [validated.seconds for validated in found.values()],
        "training_losses": [validated.training_loss for validated in found.values()],
        "last": {"update": last, "loss": found[last].loss},
        "smallest": {"update": best, "loss": found[best].loss},
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """Table of the last and smallest losses in Markdown."""
    cells = [
        [
            row["training"],
            *(f"{row['last']['update']:,}", f"{row['last']['loss']:.3f}"),
            *(f"{row['smallest']['update']:,}", f"{row['smallest']['loss']:.3f}"),
        ]
        for row in rows
    ]
    headers = ["training", "last update", f"loss, {UNIT}", "update of the smallest", "loss"]
    return markdown_table(headers, cells)


def draw(axes: Any, rows: list[dict[str, Any]], against: str) -> None:
    """Draw each training's validation loss against updates, minutes or training loss."""
    xlabels = {UPDATES: UPDATES, TIME: "minutes", TRAINING_LOSS: f"training loss, {UNIT}"}
    for row in rows:
        x = {
            UPDATES: row["updates"],
            TIME: [now and now / 60 for now in row["seconds"]],
            TRAINING_LOSS: row["training_losses"],
        }[against]
        axes.plot(x, row["losses"], marker=".", label=row["training"])
    axes.set_xlabel(xlabels[against])
    axes.set_ylabel(f"validation loss, {UNIT}")
    axes.grid(alpha=0.3)
    axes.legend()


def plot_losses(arguments: argparse.Namespace) -> None:
    """Read the logs and draw them; raises ValueError for what cannot be, before any output."""
    against = arguments.against
    logs = parse_named_files("--log", arguments.log)
    rows = [summary(log, read_validations(log, against)) for log in logs]
    prepare_results(arguments.output)
    content, told = {"unit": UNIT, "rows": rows}, f"{format_table(rows)}\n"
    save_results(arguments.output, "losses", content, told, lambda ax: draw(ax, rows, against))


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add_named_files(parser, "--log", "logs")
    help_text = "what is drawn across (updates)"
    parser.add_argument(
        "--against", choices=(UPDATES, TIME, TRAINING_LOSS), default=UPDATES, help=help_text
    )
    add_output_options(parser, "losses", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_losses(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
