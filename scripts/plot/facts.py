r"""How much of random facts trainings have learned by heart, from fairseq-train's logs.

    python -m scripts.plot.facts --facts 65536 --log memory-1=CHECKPOINTS/memory-1/train.log …

A log is that of a training by examples/product_key_memory/capacity.sh, with --log-format json. Its
label is that of the model, and of the seed where there are several: -1, -2, … at its end.

A line of N facts takes log2(N) bits for subject and relation and 8 for the object (see
scripts.prepare.facts). What the validation loss of the whole line is below that, a model knows by
heart: from 0 to 8 bits a fact. Minutes are those of the updates; usage is the share of the memory's
slots that the last validation read.

Writes facts.json and facts.png, and prints a table with all trainings.
"""

import argparse
import math
import re
import statistics
import sys
from typing import Any

from scripts._shared.command_line import (
    NamedFile,
    add_named_files,
    add_output_options,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.results import markdown_table, prepare_results, save_results
from scripts.plot._training_log import open_log
from scripts.plot.losses import TIME, read_validations
from scripts.prepare.facts import OBJECTS, SYMBOLS, names_of

BITS = math.log2(OBJECTS)
_SEED = re.compile(r"-\d+$")
_PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
_USAGE = re.compile(r'"valid_memory\d+_usage": "([\d.]+)"')
_SPEED = re.compile(r'"wps": "([\d.]+)".*"num_updates"')


def known_bits(loss: float, facts: int) -> float:
    """Bits a fact that a model knows whose loss is ``loss``, in bits a symbol with </s>."""
    return math.log2(facts) + BITS - (SYMBOLS + 1) * loss


def read_training(log: NamedFile, facts: int) -> dict[str, Any]:
    """What a log tells of a training with so many facts; raises as read_validations."""
    found = read_validations(log, TIME)
    with open_log(log.path) as lines:
        told = list(lines)
    parameters = next(filter(None, map(_PARAMETERS.search, told)), None)
    usages = [float(line[1]) for line in map(_USAGE.search, told) if line]
    speeds = [float(line[1]) for line in map(_SPEED.search, told) if line]
    return {
        "training": log.label,
        "parameters": parameters and int(parameters[1].replace(",", "")),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "usage_percent": usages[-1] if usages else None,
        "updates": list(found),
        "minutes": [validated.seconds / 60 for validated in found.values()],
        "bits": [known_bits(validated.loss, facts) for validated in found.values()],
    }


def format_table(rows: list[dict[str, Any]], facts: int) -> str:
    """Table of the last scores in Markdown."""
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


def draw(against_time: Any, against_updates: Any, rows: list[dict[str, Any]], facts: int) -> None:
    """Draw bits a fact against minutes and updates; the seeds of a model have its color."""
    models = list(dict.fromkeys(_SEED.sub("", row["training"]) for row in rows))
    for axes, x in ((against_time, "minutes"), (against_updates, "updates")):
        labelled = set()
        for row in rows:
            model = _SEED.sub("", row["training"])
            label = None if model in labelled else model
            labelled.add(model)
            axes.plot(row[x], row["bits"], color=f"C{models.index(model)}", label=label)
        axes.set_xlabel(x)
        # before subjects and relations are known to be random, the sum is below 0
        axes.set_ylim(0, BITS)
        axes.grid(alpha=0.3)
    against_time.set_ylabel(f"bits of each of {facts:,} facts")
    against_updates.legend()


def plot_facts(arguments: argparse.Namespace) -> None:
    """Read the logs and draw them; raises ValueError for what cannot be, before any output."""
    facts = arguments.facts
    names_of(facts)
    rows = [read_training(log, facts) for log in parse_named_files("--log", arguments.log)]
    prepare_results(arguments.output)
    content, told = {"facts": facts, "rows": rows}, f"{format_table(rows, facts)}\n"

    def draw_rows(*axes: Any) -> None:
        draw(*axes, rows, facts)

    save_results(arguments.output, "facts", content, told, draw_rows, columns=2)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add_named_files(parser, "--log", "logs")
    parser.add_argument("--facts", type=int, required=True, help="how many were learned")
    add_output_options(parser, "facts", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_facts(parsed))


if __name__ == "__main__":
    sys.exit(main())
