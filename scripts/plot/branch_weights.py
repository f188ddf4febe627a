r"""Weights κ and α of attention branches over a training, from its log or its checkpoints.

    python -m scripts.plot.branch_weights --log CHECKPOINTS/train.log --layer encoder2 --smooth 5
    python -m scripts.plot.branch_weights --checkpoint CHECKPOINTS --output branch_weights

Figure 3 of the Weighted Transformer (Ahmed, Keskar, Socher 2017, arXiv:1711.02132). A log is a file
that --log-file of fairseq-train names, or what the command printed, with any --log-format but none:
each validation tells all weights, with 4 decimals. A checkpoint has them as they are, at its own
update only. Of an update that a log has twice, as one of a resumed training may, the later line
counts. Layers count from 1.

Writes branch_weights.json and branch_weights.png, and prints a table of the last weights. What
--smooth does is done to the plot alone.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts._shared.command_line import command_parser, exit_status, make_output_folder
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.results import check_plotting, markdown_table, save_plot
from scripts._shared.scoring import read_checkpoint
from scripts.plot._training_log import validation_values

SYMBOLS = {"kappa": "κ", "alpha": "α"}
# By layer and by "kappa" or "alpha": the weights of all branches.
Weights = dict[str, dict[str, list[float]]]

_FIGURE = re.compile(r"((?:encoder|decoder)\d+)_(kappa|alpha)(\d+)")
_PARAMETER = re.compile(
    r"(encoder|decoder)\.layers\.(\d+)\.\w+_attn\.feed_forward\.weights\.(kappa|alpha)(_logits)?"
)
# As many colours has matplotlib's cycle; more branches are told apart by their lines.
_COLORS = 10
_LINES = ("-", "--", ":", "-.")
# Fewer points than this are marked: a single one has no line.
_MARKED = 30


def layer_order(layer: str) -> tuple[bool, int]:
    """Key that sorts layers as sentences pass through them: those of the encoder first."""
    return layer.startswith("decoder"), int(layer[len("encoder") :])


def validation(line: str) -> tuple[int, Weights] | None:
    """Updates and weights that a line of a log tells; None for a line without them."""
    values = validation_values(line)
    if values is None:
        return None
    figures = sorted(
        (found[1], found[2], int(found[3]), float(value))
        for name, value in values.items()
        if (found := _FIGURE.fullmatch(name))
    )
    # a line that was cut short has no number of updates, which comes behind them
    if not figures or not values.get("num_updates"):
        return None
    weights: Weights = {}
    for layer, kind, _, value in figures:
        weights.setdefault(layer, {}).setdefault(kind, []).append(value)
    return int(values["num_updates"]), weights


def read_log(log: Path) -> Iterable[tuple[int, Weights]]:
    """Updates and weights of a training's validations.

    Raises ValueError when there is no such file, or no weights in it.
    """
    label = f"--log {short(log)}"
    if not log.is_file():
        raise ValueError(f"{label} is no file: name one that --log-file of fairseq-train wrote")
    with log.open(encoding="utf-8", errors="replace") as lines:
        points = [found for line in lines if (found := validation(line.rstrip()))]
    if not points:
        raise ValueError(
            f"{label} tells no kappa and alpha: name the log of a weighted_transformer that has "
            "validated, written with --log-format json or simple"
        )
    return points


def weights_of_checkpoint(checkpoint: Path) -> tuple[int, Weights]:
    """Updates and weights of a checkpoint.

    Raises ValueError when it cannot be read or has no branches.
    """
    state = read_checkpoint(checkpoint)
    model = state.get("model") if isinstance(state, dict) else None
    parameters = {
        match.groups(): value
        for name, value in (model or {}).items()
        if (match := _PARAMETER.fullmatch(name))
    }
    if not parameters:
        raise ValueError(
            f"--checkpoint {short(checkpoint)} has no kappa and alpha: name checkpoints of a "
            "weighted_transformer"
        )
    weights: Weights = {}
    for (part, number, kind, logits), value in parameters.items():
        learned = value.softmax(0) if logits else value
        weights.setdefault(f"{part}{int(number) + 1}", {})[kind] = learned.tolist()
    return state["optimizer_history"][-1]["num_updates"], weights


def read_checkpoints(paths: Sequence[Path]) -> Iterable[tuple[int, Weights]]:
    """Updates and weights of checkpoints, and of those in folders.

    Raises ValueError when a folder has none, or one cannot be read or has no branches.
    """
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


def in_order(points: Iterable[tuple[int, Weights]], label: str) -> dict[int, Weights]:
    """Weights by update, which rise, all of the same layers and branches.

    Raises ValueError when they are not, or a weight is no number.
    """
    by_update = dict(sorted(dict(points).items()))
    first, shape = None, None
    for update, weights in by_update.items():
        found = {
            (layer, kind): len(values)
            for layer, by in weights.items()
            for kind, values in by.items()
        }
        first, shape = (update, found) if shape is None else (first, shape)
        if found != shape:
            raise ValueError(
                f"{label}: after {update:,} updates there are other layers or branches than after "
                f"{first:,}: name what belongs to one training"
            )
        for layer, by in weights.items():
            if not all(math.isfinite(value) for values in by.values() for value in values):
                raise ValueError(
                    f"{label}: after {update:,} updates a weight of {layer} is no number: leave "
                    "out this training, which diverged"
                )
    return by_update


def choose_layers(asked: Sequence[str] | None, by_update: dict[int, Weights]) -> list[str]:
    """Layers to draw, all of them if none is asked for.

    Raises ValueError when one that is asked for is not there.
    """
    known = sorted(next(iter(by_update.values())), key=layer_order)
    for layer in asked or []:
        if layer not in known:
            raise ValueError(f"--layer is {layer!r}: there are {', '.join(known)}")
    return list(dict.fromkeys(asked or known))


def mean_filter(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbours, ``width`` (odd) in all, fewer at the ends."""
    half = width // 2
    return [fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


def format_table(weights: Weights, layers: Sequence[str]) -> str:
    """Table of the weights of layers in Markdown, a column a branch."""
    rows = [
        [f"{layer} {symbol}", *(f"{value:.4f}" for value in weights[layer][kind])]
        for layer in layers
        for kind, symbol in SYMBOLS.items()
    ]
    # encoder and decoder may have different numbers of heads
    columns = max(map(len, rows))
    filled = [row + [""] * (columns - len(row)) for row in rows]
    return markdown_table(["branch", *map(str, range(1, columns))], filled)


def draw(axes: Any, by_update: dict[int, Weights], layers: Sequence[str], width: int) -> None:
    """Draw κ and α of each layer against the updates, a panel each, in place of the axes."""
    figure = axes.figure
    figure.clear()
    columns = 4 if len(layers) > 1 else 2
    rows = math.ceil(2 * len(layers) / columns)
    figure.set_size_inches(3.4 * columns, 2.4 * rows + 0.6)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    names = [(layer, kind) for layer in layers for kind in SYMBOLS]
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
    """Read the weights and draw them; raises ValueError for what cannot be, before any output."""
    width = arguments.smooth
    if width < 1 or width % 2 == 0:
        raise ValueError(f"--smooth is {width}: it must be an odd number, 1 for no smoothing")
    if arguments.log:
        log = arguments.log.resolve()
        label, points = f"--log {short(log)}", read_log(log)
    else:
        paths = [path.resolve() for path in arguments.checkpoint]
        label = f"--checkpoint {' '.join(map(short, paths))}"
        points = read_checkpoints(paths)
    by_update = in_order(points, label)
    layers = choose_layers(arguments.layer, by_update)
    check_plotting()
    make_output_folder(arguments.output)
    last = max(by_update)
    result = {
        "source": label,
        "updates": list(by_update),
        "layers": {
            layer: {
                kind: [weights[layer][kind] for weights in by_update.values()] for kind in SYMBOLS
            }
            for layer in layers
        },
    }
    write_json(arguments.output / "branch_weights.json", result)
    print(f"{format_table(by_update[last], layers)}\n")
    print(f"after {last:,} updates, the last of {len(by_update):,} that are drawn")
    save_plot(
        arguments.output / "branch_weights.png",
        lambda axes: draw(axes, by_update, layers, width),
    )
    print(f"written to {short(arguments.output.resolve())}/branch_weights.json and .png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--log", type=Path, metavar="PATH", help="log of a training")
    source.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="checkpoints of a training, or folders: all checkpoint*.pt of them",
    )
    parser.add_argument(
        "--layer",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="layers to draw, such as encoder2 or decoder1 (all)",
    )
    parser.add_argument(
        "--smooth",
        type=int,
        default=1,
        metavar="N",
        help="draw the mean of N neighbouring points, N odd (1: as they are)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("branch_weights"), help="folder (branch_weights)"
    )
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_branch_weights(parsed), "run the same command again")


if __name__ == "__main__":
    sys.exit(main())
