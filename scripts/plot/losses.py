r"""Validation loss of trainings against updates, time or training loss, from fairseq-train's logs.

    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --output losses
    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --against time
    python -m scripts.plot.losses --facts 65536 --log memory-1=1.log memory-2=2.log plain-1=3.log

A log is a file that --log-file of fairseq-train names, or what the command printed, with any
--log-format but none. Of an update that a log has twice, as one of a resumed training may, the
later loss counts. Losses are means a token in base 2, as fairseq prints them; with smoothed labels
those are what it calls nll_loss. Time is that of the updates, validation and saving left out; where
no line has it for the update of a validation, it is interpolated between those that do. The
training loss, with dropout, is the mean of what the log has since the validation before.

With --facts N the trainings learned N random facts by heart (scripts.prepare.facts). A line of them
takes log2(N) bits for subject and relation and 8 for the object. What the validation loss of the
whole line is below that, a model knows: from 0 to 8 bits a fact. Trainings whose labels differ in
the number at their end, -1, -2, …, are seeds of one model. Usage is the share of the memory's slots
that the last validation read.

Writes losses.json and losses.png, and prints a table: the last loss and the smallest one, or the
facts that are known at the end.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

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
from scripts.prepare.facts import OBJECTS, SYMBOLS, names_of

UNIT = "bits a token"
UPDATES, TIME, TRAINING_LOSS = "updates", "time", "training-loss"
_JSON = re.compile(r'(?:^|\| )(\{"epoch".*"valid_loss".*\})$')
_SIMPLE = re.compile(r"(?:^|\| )epoch \d+ \| valid on 'valid' subset \| (.*)$")
# updates, and the seconds of those since the last such line: as JSON, and as simple text
_TRAINED = re.compile(
    r'(?:"num_updates": "|\bnum_updates=)(\d+)\b.*(?:"train_wall": "|\btrain_wall=)([\d.]+)'
)
# in such a line, the one without smoothed labels first
_TRAINING_LOSSES = [
    re.compile(rf'(?:"{name}": "|\b{name}=)([\d.]+)') for name in ("nll_loss", "loss")
]
_PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
_USAGE = re.compile(r'"valid_memory\d+_usage": "([\d.]+)"')
_SPEED = re.compile(r'"wps": "([\d.]+)".*"num_updates"')
_SEED = re.compile(r"-\d+$")


class Validation(NamedTuple):
    """A validation's loss; seconds of training and training loss before it, None if unknown."""

    loss: float
    seconds: float | None
    training_loss: float | None


def read_log(path: Path) -> list[str]:
    """Lines of a log."""
    if not path.is_file():
        raise ValueError(
            f"--log {short(path)} is no file: name one that --log-file of fairseq-train wrote"
        )
    # nothing but a newline ends a line
    return [line.rstrip() for line in path.open(encoding="utf-8", errors="replace")]


def read_validation(line: str) -> tuple[int, dict[str, str]] | None:
    """Updates, and the figures of the validation part that a line has, by name; None for others."""
    values = {}
    if found := _JSON.search(line):
        values = {key.removeprefix("valid_"): value for key, value in json.loads(found[1]).items()}
    elif found := _SIMPLE.search(line):
        values = dict(field.partition(" ")[::2] for field in found[1].split(" | "))
    # a line that was cut short has no number of updates, which comes behind the figures
    return (int(values["num_updates"]), values) if values.get("num_updates") else None


def validations(lines: Iterable[str]) -> dict[int, Validation]:
    """Validations that lines have, by update; the later one where an update has several."""
    import numpy as np

    losses: dict[int, float] = {}
    # by the update at which each stretch of training ends; fairseq repeats lines in its --log-file
    stretches: dict[int, float] = {}
    training: dict[int, float] = {}
    for line in lines:
        if found := _TRAINED.search(line):
            stretches[int(found[1])] = float(found[2])
            if loss := next(filter(None, (name.search(line) for name in _TRAINING_LOSSES)), None):
                training[int(found[1])] = float(loss[1])
        elif validated := read_validation(line):
            update, values = validated
            losses[update] = float(values.get("nll_loss", values["loss"]))
    ends = sorted(stretches)
    seconds = np.cumsum([stretches[end] for end in ends])
    # a validation between two such lines, as one at the end of an epoch, is between their times
    by_update, before = {}, 0
    for update, loss in sorted(losses.items()):
        time = round(np.interp(update, [0, *ends], [0.0, *seconds]).item(), 1) if ends else None
        earlier = [loss for end, loss in sorted(training.items()) if end <= update]
        since = [loss for end, loss in training.items() if before < end <= update]
        mean = round(fmean(since or earlier[-1:]), 4) if earlier else None
        by_update[update] = Validation(loss, time, mean)
        before = update
    return by_update


def read_validations(log: NamedFile, against: str = UPDATES) -> dict[int, Validation]:
    """Validations of a log by update, which rise, with what they are to be drawn against."""
    label = f"--log {short(log.path)}"
    found = validations(read_log(log.path))
    if not found:
        raise ValueError(
            f"{label} has no validation loss: name the log of a training that has validated, "
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
                f"{label} does not say {what} {update:,} updates were done: train with a "
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


def format_losses(rows: list[dict[str, Any]]) -> str:
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


def known_bits(loss: float, facts: int) -> float:
    """Bits a fact that a model knows whose loss is ``loss``, in bits a symbol with </s>."""
    return math.log2(facts) + math.log2(OBJECTS) - (SYMBOLS + 1) * loss


def add_facts(row: dict[str, Any], log: NamedFile, facts: int) -> dict[str, Any]:
    """The summary of a log with what it has about so many facts."""
    lines = read_log(log.path)
    parameters = next(filter(None, map(_PARAMETERS.search, lines)), None)
    usages = [float(found[1]) for found in map(_USAGE.search, lines) if found]
    speeds = [float(found[1]) for found in map(_SPEED.search, lines) if found]
    return {
        **row,
        "parameters": parameters and int(parameters[1].replace(",", "")),
        "tokens_per_second": median(speeds) if speeds else None,
        "usage_percent": usages[-1] if usages else None,
        "minutes": [seconds / 60 for seconds in row["seconds"]],
        "bits": [known_bits(loss, facts) for loss in row["losses"]],
    }


def format_facts(rows: list[dict[str, Any]], facts: int) -> str:
    """Table of what is known at the end in Markdown."""
    cells = [
        [
            row["training"],
            f"{row['parameters']:,}" if row["parameters"] else "",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['updates'][-1]:,}",
            f"{row['minutes'][-1]:.1f}",
            f"{row['bits'][-1]:.2f}",
            f"{row['bits'][-1] * facts:,.0f}",
            f"{row['usage_percent']:.1f}%" if row["usage_percent"] else "",
        ]
        for row in rows
    ]
    heads = "training|parameters|tokens/s|updates|minutes|bits a fact|bits|usage"
    return markdown_table(heads.split("|"), cells)


def draw(axes: Any, rows: list[dict[str, Any]], against: str, facts: int | None = None) -> None:
    """Draw each training's loss, or bits a fact, against updates, minutes or training loss."""
    labels = {UPDATES: UPDATES, TIME: "minutes", TRAINING_LOSS: f"training loss, {UNIT}"}
    # the seeds of a model have its color
    models = [_SEED.sub("", row["training"]) if facts else row["training"] for row in rows]
    colors = {model: f"C{number}" for number, model in enumerate(dict.fromkeys(models))}
    for row, model in zip(rows, models, strict=True):
        x = {
            UPDATES: row["updates"],
            TIME: [now and now / 60 for now in row["seconds"]],
            TRAINING_LOSS: row["training_losses"],
        }[against]
        label = model if row is rows[models.index(model)] else None
        y = row["bits" if facts else "losses"]
        axes.plot(x, y, marker=None if facts else ".", color=colors[model], label=label)
    axes.set_xlabel(labels[against])
    axes.set_ylabel(f"bits of each of {facts:,} facts" if facts else f"validation loss, {UNIT}")
    if facts:
        # before subjects and relations are known to be random, the sum is below 0
        axes.set_ylim(0, math.log2(OBJECTS))
    axes.grid(alpha=0.3)
    axes.legend()


def plot_losses(arguments: argparse.Namespace) -> None:
    """Read the logs and draw them."""
    facts, against = arguments.facts, [arguments.against]
    if facts is not None:
        names_of(facts)
        against = [TIME, UPDATES]
    logs = parse_named_files("--log", arguments.log)
    rows = [summary(log, read_validations(log, against[0])) for log in logs]
    table = format_losses(rows)
    if facts is not None:
        rows = [add_facts(row, log, facts) for row, log in zip(rows, logs, strict=True)]
        table = format_facts(rows, facts)
    prepare_results(arguments.output)

    def draw_all(*panels: Any) -> None:
        for axes, x in zip(panels, against, strict=True):
            draw(axes, rows, x, facts)

    content = {"unit": UNIT, **({"facts": facts} if facts else {}), "rows": rows}
    save_results(arguments.output, "losses", content, f"{table}\n", draw_all, columns=len(against))


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add_named_files(parser, "--log", "logs")
    help_text = "what is drawn across (updates)"
    parser.add_argument(
        "--against", choices=(UPDATES, TIME, TRAINING_LOSS), default=UPDATES, help=help_text
    )
    help_text = "how many facts were learned: draw the bits of each that are known"
    parser.add_argument("--facts", type=int, metavar="N", help=help_text)
    add_output_options(parser, "losses", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_losses(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
