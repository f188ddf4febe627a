r"""Weights κ and α of attention branches over a training, from its log or its checkpoints.

    python -m scripts.plot.branch_weights --log CHECKPOINTS/train.log --layer encoder2 --smooth 5
    python -m scripts.plot.branch_weights --checkpoint CHECKPOINTS --output branch_weights

Figure 3 of the Weighted Transformer (Ahmed, Keskar, Socher 2017, arXiv:1711.02132). A log is a file
that --log-file of fairseq-train names, or what the command printed, with any --log-format but none:
each validation has all weights, with 4 decimals. A checkpoint has them as they are, at its own
update only. Of an update that a log has twice, as one of a resumed training may, the later line
counts. Layers count from 1; decoder1_self is self-attention where both attentions are branched.

Writes branch_weights.json and branch_weights.png, and prints a table of the last weights. --smooth
changes the plot alone.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts._shared.checkpoints import read_checkpoint
from scripts._shared.command_line import (
    add_output_options,
    check_at_least,
    command_parser,
    exit_status,
)
from scripts._shared.commands import short
from scripts._shared.results import markdown_table, prepare_results, save_results
from scripts.plot.losses import read_log, read_validation

SYMBOLS = {"kappa": "κ", "alpha": "α"}
# By layer and by "kappa" or "alpha": the weights of all branches.
Weights = dict[str, dict[str, list[float]]]

_FIGURE = re.compile(r"((?:encoder|decoder)\d+(?:_self)?)_(kappa|alpha)(\d+)")
# α may be in a feed-forward layer
_PARAMETER = re.compile(
    r"(encoder|decoder)\.layers\.(\d+)\.(\w+)\.(?:\w+\.)?weights\.(kappa|alpha)(_logits)?"
)
# Colors in matplotlib's cycle; further branches have other line styles.
_COLORS = 10
_LINES = ("-", "--", ":", "-.")
# Fewer points than this are marked: a single one has no line.
_MARKED = 30


def layer_order(layer: str) -> tuple[bool, int, str]:
    """Key that sorts layers as sentences pass through them: those of the encoder first."""
    number, _, attention = layer[len("encoder") :].partition("_")
    return layer.startswith("decoder"), int(number), attention


def validation(line: str) -> tuple[int, Weights] | None:
    """Updates and weights that a line of a log has; None for a line without them."""
    if (found := read_validation(line)) is None:
        return None
    updates, values = found
    figures = sorted(
        (found[1], found[2], int(found[3]), float(value))
        for name, value in values.items()
        if (found := _FIGURE.fullmatch(name))
    )
    weights: Weights = {}
    for layer, kind, _, value in figures:
        weights.setdefault(layer, {}).setdefault(kind, []).append(value)
    return (updates, weights) if weights else None


def read_validations(log: Path) -> list[tuple[int, Weights]]:
    """Updates and weights of a training's validations."""
    points = list(filter(None, map(validation, read_log(log))))
    if not points:
        raise ValueError(
            f"--log {short(log)} has no kappa and alpha: name the log of a weighted_transformer "
            "that has validated, written with --log-format json or simple"
        )
    return points


def weights_of_checkpoint(checkpoint: Path) -> tuple[int, Weights]:
    """Updates and weights of a checkpoint."""
    state = read_checkpoint(checkpoint)
    parameters = {
        match.groups(): value
        for name, value in (state.get("model") or {}).items()
        if (match := _PARAMETER.fullmatch(name))
    }
    if not parameters:
        raise ValueError(
            f"--checkpoint {short(checkpoint)} has no kappa and alpha: name checkpoints of a "
            "weighted_transformer"
        )
    with_kappa = {found[:3] for found in parameters if found[3] == "kappa"}
    weights: Weights = {}
    for (part, number, module, kind, logits), value in parameters.items():
        learned = value.softmax(0) if logits else value
        # of a layer that has two
        other = module == "self_attn" and (part, number, "encoder_attn") in with_kappa
        layer = f"{part}{int(number) + 1}" + ("_self" if other else "")
        weights.setdefault(layer, {})[kind] = learned.tolist()
    return state["optimizer_history"][-1]["num_updates"], weights


def read_checkpoints(paths: Sequence[Path]) -> Iterable[tuple[int, Weights]]:
    """Updates and weights of checkpoints, and of those in folders."""
    points = []
    for path in paths:
        files = sorted(path.glob("checkpoint*.pt")) if path.is_dir() else [path]
        if not files:
            raise ValueError(
                f"--checkpoint {short(path)} has no checkpoint*.pt: name the folder that "
                "--save-dir of fairseq-train named"
            )
        points += map(weights_of_checkpoint, files)
    return points


def _shape(weights: Weights) -> dict[str, dict[str, int]]:
    return {layer: {kind: len(by[kind]) for kind in by} for layer, by in weights.items()}


def in_order(points: Iterable[tuple[int, Weights]], source: str) -> dict[int, Weights]:
    """Weights by update, which rise, all of the same layers and branches."""
    by_update = dict(sorted(dict(points).items()))
    first = min(by_update)
    for update, weights in by_update.items():
        if _shape(weights) != _shape(by_update[first]):
            raise ValueError(
                f"{source}: after {update:,} updates there are other layers or branches than after "
                f"{first:,}: name what belongs to one training"
            )
        for layer, by in weights.items():
            if not all(map(math.isfinite, chain(*by.values()))):
                raise ValueError(
                    f"{source}: after {update:,} updates a weight of {layer} is no number: leave "
                    "out this training, which diverged"
                )
    return by_update


def choose_layers(asked: Sequence[str] | None, by_update: dict[int, Weights]) -> list[str]:
    """Layers to draw, all of them if none is asked for."""
    known = sorted(next(iter(by_update.values())), key=layer_order)
    for layer in asked or []:
        if layer not in known:
            raise ValueError(f"--layer is {layer!r}: there are {', '.join(known)}")
    return list(dict.fromkeys(asked or known))


def mean_filter(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbours, ``width`` in all, or one more; fewer at the ends."""
    half = width // 2
    return [fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


def format_table(weights: Weights, layers: Sequence[str]) -> str:
    """Table of the weights of layers in Markdown, a column a branch."""
    rows = [
        [f"{layer} {symbol}", *(f"{value:.4f}" for value in weights[layer][kind])]
        for layer in layers
        for kind, symbol in SYMBOLS.items()
        if kind in weights[layer]
    ]
    # encoder and decoder may have different numbers of heads
    return markdown_table(["branch", *map(str, range(1, max(map(len, rows))))], rows)


def draw(axes: Any, by_update: dict[int, Weights], layers: Sequence[str], width: int) -> None:
    """Draw κ and α of each layer against the updates, a panel each, in place of the axes."""
    figure = axes.figure
    figure.clear()
    columns = 4 if len(layers) > 1 else 2
    first = next(iter(by_update.values()))
    # the weights of self-attention may be κ alone
    names = [(layer, kind) for layer in layers for kind in SYMBOLS if kind in first[layer]]
    rows = math.ceil(len(names) / columns)
    figure.set_size_inches(3.4 * columns, 2.4 * rows + 0.6)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    updates = list(by_update)
    lines: dict[str, Any] = {}
    for panel, (layer, kind) in zip(panels, names, strict=False):
        paths = list(zip(*(weights[layer][kind] for weights in by_update.values()), strict=True))
        for number, path in enumerate(paths):
            (lines[f"branch {number + 1}"],) = panel.plot(
                updates,
                mean_filter(path, width),
                color=f"C{number % _COLORS}",
                linestyle=_LINES[number // _COLORS % len(_LINES)],
                linewidth=1,
                marker="." if len(updates) < _MARKED else None,
            )
        lines["1/M"] = panel.axhline(1 / len(paths), color="black", linestyle=":", linewidth=1)
        panel.set_title(f"{layer} {SYMBOLS[kind]}", fontsize="medium")
        panel.grid(alpha=0.3)
        # which may be the last of its column
        panel.tick_params(labelbottom=True)
    for panel in panels[len(names) :]:
        panel.remove()
    figure.supxlabel("updates", fontsize="medium")
    # one legend for all; 1/M goes behind the branches, of which the decoder may have more
    lines["1/M"] = lines.pop("1/M")
    figure.legend(
        lines.values(), lines, loc="outside upper center", ncols=2 * columns + 1, fontsize="small"
    )


def plot_branch_weights(arguments: argparse.Namespace) -> None:
    """Read the weights and draw them."""
    width = arguments.smooth
    check_at_least(1, smooth=width)
    if arguments.log:
        log = arguments.log.resolve()
        source, points = f"--log {short(log)}", read_validations(log)
    else:
        paths = [path.resolve() for path in arguments.checkpoint]
        source = f"--checkpoint {' '.join(map(short, paths))}"
        points = read_checkpoints(paths)
    by_update = in_order(points, source)
    layers = choose_layers(arguments.layer, by_update)
    prepare_results(arguments.output)
    last = max(by_update)
    courses = {
        layer: {
            kind: [weights[layer][kind] for weights in by_update.values()]
            for kind in SYMBOLS
            if kind in by_update[last][layer]
        }
        for layer in layers
    }
    content = {"source": source, "updates": list(by_update), "layers": courses}
    text = f"after {last:,} updates, the last of {len(by_update):,} that are drawn"
    text = f"{format_table(by_update[last], layers)}\n\n{text}"
    plot = partial(draw, by_update=by_update, layers=layers, width=width)
    save_results(arguments.output, "branch_weights", content, text, plot)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    paths = {"type": Path, "metavar": "PATH"}
    source.add_argument("--log", **paths, help="log of a training")
    help_text = "checkpoints of a training, or folders: all checkpoint*.pt of them"
    source.add_argument("--checkpoint", nargs="+", action="extend", **paths, help=help_text)
    help_text = "layers to draw, such as encoder2 or decoder1 (all)"
    parser.add_argument("--layer", nargs="+", action="extend", metavar="NAME", help=help_text)
    help_text = "draw the mean of N neighbouring points, one more if N is even (1: as they are)"
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help=help_text)
    add_output_options(parser, "branch_weights", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_branch_weights(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
