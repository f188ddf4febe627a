r"""Plot validation losses against updates, time or training loss, from fairseq-train's logs.

    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --output losses
    python -m scripts.plot.losses --log all=all.log feed-forward=ffn.log --against time
    python -m scripts.plot.losses --facts 65536 --log memory-1=1.log memory-2=2.log plain-1=3.log

A log is the --log-file or printed output of fairseq-train, with any --log-format except none. If a
log has an update twice, as after a resumed training, the later loss counts. Losses are means per
token in base 2, as fairseq prints them; with label smoothing, its nll_loss is used. Time is the
time of the updates, without validation and saving; if no line has it for a validation's update, it
is interpolated between lines that have it. The training loss, with dropout, is the mean of the
log's values since the previous validation.

With --facts N the trainings memorized N random facts (scripts.prepare.facts). A fact has log2(N)
bits for subject and relation and 8 for the object. A model knows the difference between this sum
and the validation loss of the whole line: from 0 to 8 bits a fact. Trainings whose labels differ
only in a number at the end, -1, -2, …, are seeds of one model. Usage is the share of the memory's
slots that the last validation read.

Writes losses.json and losses.png, and prints a table: the last and the smallest loss, or the facts
that are known at the end.
"""

import argparse
import math
import re
import sys
from statistics import fmean, median
from typing import Any

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
from scripts.plot._logs import read_log, validations
from scripts.prepare.facts import OBJECTS, SYMBOLS, names_per_position

UNIT = "bits a token"
UPDATES, TIME, TRAINING_LOSS = "updates", "time", "training-loss"
# the x axis for each: its list in a row, and its label
_AXES = {
    UPDATES: ("updates", "updates"),
    TIME: ("seconds", "minutes"),
    TRAINING_LOSS: ("training_losses", f"training loss, {UNIT}"),
}
_PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
_SEED = re.compile(r"-\d+$")


def read_series(figures: list[dict[str, str]]) -> dict[str, list]:
    """Return the validation losses, with their updates and with what was trained before each.

    "seconds" are the training time before, "training_losses" the training loss; None if unknown.
    """
    import numpy as np

    def loss(prefix: str, values: dict[str, str]) -> float:
        return float(values.get(f"{prefix}nll_loss", values[f"{prefix}loss"]))

    losses = {at: loss("valid_", values) for at, values in validations(figures).items()}
    # by the update that ends each stretch of training: fairseq repeats lines in its --log-file
    trained = (values for values in figures if values.keys() >= {"num_updates", "train_wall"})
    stretches = {int(values["num_updates"]): values for values in trained}
    ends = sorted(stretches)
    seconds = np.cumsum([float(stretches[end]["train_wall"]) for end in ends])
    training = {end: loss("", stretches[end]) for end in ends if "loss" in stretches[end]}
    training = {end: value for end, value in training.items() if math.isfinite(value)}
    series = {"updates": list(losses), "losses": list(losses.values())}
    series |= {"seconds": [], "training_losses": []}
    before = 0
    for update in losses:
        # interpolate if the update has no line, as at the end of an epoch
        time = round(np.interp(update, [0, *ends], [0.0, *seconds]).item(), 1) if ends else None
        series["seconds"].append(time)
        earlier = [loss for end, loss in training.items() if end <= update]
        since = [loss for end, loss in training.items() if before < end <= update]
        mean = round(fmean(since or earlier[-1:]), 4) if earlier else None
        series["training_losses"].append(mean)
        before = update
    return series


def known_bits(loss: float, facts: int) -> float:
    """Return the bits per fact that a model knows; ``loss`` is in bits per symbol, with </s>."""
    return math.log2(facts) + math.log2(OBJECTS) - (SYMBOLS + 1) * loss


def read_training(log: NamedFile, against: str, facts: int | None) -> dict[str, Any]:
    """Return all results for a log."""
    label = f"--log {short(log.path)}"
    lines, figures = read_log(log.path)
    series = read_series(figures)
    updates, losses = series["updates"], series["losses"]
    if not losses:
        raise ValueError(
            f"{label} has no validation loss: name the log of a training that has validated, "
            "written with --log-format json or simple"
        )
    for update, loss, x in zip(updates, losses, series[_AXES[against][0]], strict=True):
        if not math.isfinite(loss):
            raise ValueError(
                f"{label}: the validation loss after {update:,} updates is {loss}: leave out this "
                "log of a training that diverged"
            )
        if x is None:
            raise ValueError(
                f"--against {against}: {label} has no such figure before the validation after "
                f"{update:,} updates; train with a --log-interval below that of validation"
            )
    smallest = min(losses)
    row = {
        "training": log.label,
        "log": short(log.path),
        **series,
        "last": {"update": updates[-1], "loss": losses[-1]},
        "smallest": {"update": updates[losses.index(smallest)], "loss": smallest},
    }
    if facts is None:
        return row
    parameters = next(filter(None, map(_PARAMETERS.search, lines)), None)
    speeds = [float(x["wps"]) for x in figures if x.keys() >= {"wps", "num_updates"}]
    return {
        **row,
        "parameters": parameters and int(parameters[1].replace(",", "")),
        "tokens_per_second": median(speeds) if speeds else None,
        "minutes": [seconds / 60 for seconds in row["seconds"]],
        "bits": [known_bits(loss, facts) for loss in losses],
    }


def format_losses(rows: list[dict[str, Any]]) -> str:
    """Return the last and smallest losses as a Markdown table."""
    cells = []
    for row in rows:
        cells.append([row["training"]])
        for found in (row["last"], row["smallest"]):
            cells[-1] += [f"{found['update']:,}", f"{found['loss']:.3f}"]
    headers = ["training", "last update", f"loss, {UNIT}", "update of the smallest", "loss"]
    return markdown_table(headers, cells)


def format_facts(rows: list[dict[str, Any]], facts: int) -> str:
    """Return what is known at the end as a Markdown table."""
    cells = [
        [
            row["training"],
            f"{row['parameters']:,}" if row["parameters"] else "",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['updates'][-1]:,}",
            f"{row['minutes'][-1]:.1f}",
            f"{row['bits'][-1]:.2f}",
            f"{row['bits'][-1] * facts:,.0f}",
        ]
        for row in rows
    ]
    heads = "training|parameters|tokens/s|updates|minutes|bits a fact|bits"
    return markdown_table(heads.split("|"), cells)


def draw(axes: Any, rows: list[dict[str, Any]], against: str, facts: int | None = None) -> None:
    """Draw each training's loss, or bits per fact, against updates, minutes or training loss."""
    key, label = _AXES[against]
    # all seeds of a model have one color
    models = [_SEED.sub("", row["training"]) if facts else row["training"] for row in rows]
    colors = {model: f"C{number}" for number, model in enumerate(dict.fromkeys(models))}
    for number, (row, model) in enumerate(zip(rows, models, strict=True)):
        x = [value / 60 for value in row[key]] if against == TIME else row[key]
        look = {"color": colors[model], "marker": None if facts else "."}
        look["label"] = model if number == models.index(model) else None
        axes.plot(x, row["bits" if facts else "losses"], **look)
    axes.set_xlabel(label)
    axes.set_ylabel(f"bits of each of {facts:,} facts" if facts else f"validation loss, {UNIT}")
    if facts:
        # early in training, subjects and relations cost more than log2(facts): bits are below 0
        axes.set_ylim(0, math.log2(OBJECTS))
    axes.grid(alpha=0.3)
    axes.legend()


def plot_losses(arguments: argparse.Namespace) -> None:
    """Read the logs and draw them."""
    facts, against = arguments.facts, [arguments.against]
    if facts is not None:
        names_per_position(facts)
        against = [TIME, UPDATES]
    logs = parse_named_files("--log", arguments.log)
    rows = [read_training(log, against[0], facts) for log in logs]
    table = format_losses(rows) if facts is None else format_facts(rows, facts)
    prepare_results(arguments.output)

    def draw_all(*panels: Any) -> None:
        for axes, x in zip(panels, against, strict=True):
            draw(axes, rows, x, facts)

    content = {"unit": UNIT, **({"facts": facts} if facts else {}), "rows": rows}
    save_results(arguments.output, "losses", content, f"{table}\n", draw_all, columns=len(against))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add_named_files(parser, "--log", "logs")
    help_text = "x axis (updates)"
    parser.add_argument(
        "--against", choices=(UPDATES, TIME, TRAINING_LOSS), default=UPDATES, help=help_text
    )
    help_text = "number of facts that were learned: draw the known bits per fact"
    parser.add_argument("--facts", type=int, metavar="N", help=help_text)
    add_output_options(parser, "losses", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_losses(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
