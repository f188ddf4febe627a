r"""Plot weights κ and α of attention branches over a training, from its log or its checkpoints.

    python -m scripts.plot.branch_weights --log CHECKPOINTS/train.log --layer encoder2 --smooth 5
    python -m scripts.plot.branch_weights --checkpoint CHECKPOINTS --output branch_weights

Figure 3 of the Weighted Transformer (Ahmed, Keskar, Socher 2017, arXiv:1711.02132). A log is the
--log-file or printed output of fairseq-train, with any --log-format except none: each validation
has all weights, with 4 decimals. A checkpoint has the exact weights, but only at its own update. If
a log has an update twice, as after a resumed training, the later line counts. Layers are numbered
from 1; decoder1_self is the self-attention of a layer in which both attentions are branched.

Writes branch_weights.json and branch_weights.png, and prints a table of the last weights. --smooth
changes only the plot.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
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
from scripts.plot._logs import read_log, validations

SYMBOLS = {"kappa": "κ", "alpha": "α"}
# The weights of all branches, by layer and "kappa" or "alpha".
Weights = dict[tuple[str, str], list[float]]

_FIGURE = re.compile(r"valid_((?:encoder|decoder)\d+(?:_self)?)_(kappa|alpha)(\d+)")
# α may be in a feed-forward layer
_PARAMETER = re.compile(
    r"(encoder|decoder)\.layers\.(\d+)\.(\w+)\.(?:\w+\.)?weights\.(kappa|alpha)(_logits)?"
)
# Branches beyond matplotlib's ten colors have other line styles.
_STYLES = [(f"C{color}", line) for line in ("-", "--", ":", "-.") for color in range(10)]
# Fewer points than this are marked, because a line of one point is invisible.
_MARKED = 30


def read_validations(log: Path) -> dict[int, Weights]:
    """Return the weights in a training's validations by update."""
    by_update = {}
    for update, figures in validations(read_log(log)[1]).items():
        named = (_FIGURE.fullmatch(name) for name in figures)
        weights: Weights = {}
        for found in sorted(filter(None, named), key=lambda found: int(found[3])):
            weights.setdefault((found[1], found[2]), []).append(float(figures[found[0]]))
        if weights:
            by_update[update] = weights
    if not by_update:
        raise ValueError(
            f"--log {short(log)} has no kappa and alpha: name the log of a weighted_transformer "
            "that has validated, written with --log-format json or simple"
        )
    return by_update


def weights_of_checkpoint(checkpoint: Path) -> tuple[int, Weights]:
    """Return the number of updates and the weights of a checkpoint."""
    state = read_checkpoint(checkpoint)
    parameters = {
        found.groups(): value
        for name, value in (state.get("model") or {}).items()
        if (found := _PARAMETER.fullmatch(name))
    }
    if not parameters:
        raise ValueError(
            f"--checkpoint {short(checkpoint)} has no kappa and alpha: name checkpoints of a "
            "weighted_transformer"
        )
    with_kappa = {found[:3] for found in parameters if found[3] == "kappa"}
    weights: Weights = {}
    for (part, number, module, kind, logits), value in parameters.items():
        # whether this is the self-attention of a layer with two branched attentions
        other = module == "self_attn" and (part, number, "encoder_attn") in with_kappa
        layer = f"{part}{int(number) + 1}" + ("_self" if other else "")
        weights[layer, kind] = (value.softmax(0) if logits else value).tolist()
    return state["optimizer_history"][-1]["num_updates"], weights


def read_checkpoints(paths: Sequence[Path]) -> dict[int, Weights]:
    """Return the weights of checkpoints, and of all checkpoints in folders, by update."""
    by_update = {}
    for path in paths:
        files = sorted(path.glob("checkpoint*.pt")) if path.is_dir() else [path]
        if not files:
            raise ValueError(
                f"--checkpoint {short(path)} has no checkpoint*.pt: name the folder that "
                "--save-dir of fairseq-train named"
            )
        by_update |= map(weights_of_checkpoint, files)
    return dict(sorted(by_update.items()))


def check(by_update: dict[int, Weights], source: str) -> None:
    """Raise ValueError if updates have different branches, or a weight is not finite."""
    first = min(by_update)
    sizes = {name: len(values) for name, values in by_update[first].items()}
    for update, weights in by_update.items():
        if {name: len(values) for name, values in weights.items()} != sizes:
            raise ValueError(
                f"{source}: after {update:,} updates there are other layers or branches than after "
                f"{first:,}: name what belongs to one training"
            )
        for (layer, _), values in weights.items():
            if not all(map(math.isfinite, values)):
                raise ValueError(
                    f"{source}: after {update:,} updates a weight of {layer} is not finite: leave "
                    "out this training, which diverged"
                )


def choose_layers(asked: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Return the layers to draw; by default all of them, in the order of computation."""

    def order(layer: str) -> tuple[bool, int, str]:
        number, _, attention = layer[len("encoder") :].partition("_")
        return layer.startswith("decoder"), int(number), attention

    known = sorted(set(known), key=order)
    for layer in asked or []:
        if layer not in known:
            raise ValueError(f"--layer is {layer!r}: there are {', '.join(known)}")
    return list(dict.fromkeys(asked or known))


def draw(axes: Any, updates: list[int], series: dict[tuple, list], width: int) -> None:
    """Replace the axes by panels, one for κ and one for α of each layer, against the updates."""
    import numpy as np

    figure = axes.figure
    figure.clear()
    columns = 4 if len(series) > 2 else 2
    rows = math.ceil(len(series) / columns)
    figure.set_size_inches(3.4 * columns, 2.4 * rows + 0.6)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    lines: dict[str, Any] = {}
    for panel, ((layer, kind), values) in zip(panels, series.items(), strict=False):
        # the mean of each point and its neighbours, fewer at the ends
        starts = [max(0, at - width // 2) for at in range(len(updates))]
        ends = range(width // 2 + 1, len(updates) + width // 2 + 1)
        means = [np.mean(values[start:end], 0) for start, end in zip(starts, ends, strict=True)]
        marker = "." if len(updates) < _MARKED else None
        branches = zip(np.transpose(means), cycle(_STYLES), strict=False)
        for number, (path, (color, style)) in enumerate(branches, start=1):
            look = {"color": color, "linestyle": style, "linewidth": 1, "marker": marker}
            (lines[f"branch {number}"],) = panel.plot(updates, path, **look)
        equal = panel.axhline(1 / len(means[0]), color="black", linestyle=":", linewidth=1)
        panel.set_title(f"{layer} {SYMBOLS[kind]}", fontsize="medium")
        panel.grid(alpha=0.3)
        # any panel may be the last of its column
        panel.tick_params(labelbottom=True)
    for panel in panels[len(series) :]:
        panel.remove()
    figure.supxlabel("updates", fontsize="medium")
    lines["1/M"] = equal
    figure.legend(
        lines.values(), lines, loc="outside upper center", ncols=2 * columns + 1, fontsize="small"
    )


def plot_branch_weights(arguments: argparse.Namespace) -> None:
    """Read the weights and draw them."""
    check_at_least(1, smooth=arguments.smooth)
    if arguments.log:
        log = arguments.log.resolve()
        source, by_update = f"--log {short(log)}", read_validations(log)
    else:
        paths = [path.resolve() for path in arguments.checkpoint]
        source = f"--checkpoint {' '.join(map(short, paths))}"
        by_update = read_checkpoints(paths)
    check(by_update, source)
    last = max(by_update)
    layers = choose_layers(arguments.layer, (layer for layer, _ in by_update[last]))
    prepare_results(arguments.output)
    # self-attention may have κ only
    series = {
        (layer, kind): [weights[layer, kind] for weights in by_update.values()]
        for layer in layers
        for kind in SYMBOLS
        if (layer, kind) in by_update[last]
    }
    content = {"source": source, "updates": list(by_update), "layers": {}}
    rows = []
    for (layer, kind), values in series.items():
        content["layers"].setdefault(layer, {})[kind] = values
        rows.append([f"{layer} {SYMBOLS[kind]}", *(f"{value:.4f}" for value in values[-1])])
    # encoder and decoder may have different numbers of heads
    table = markdown_table(["branch", *map(str, range(1, max(map(len, rows))))], rows)
    text = f"{table}\n\nafter {last:,} updates, the last of {len(by_update):,} that are drawn"
    plot = partial(draw, updates=list(by_update), series=series, width=arguments.smooth)
    save_results(arguments.output, "branch_weights", content, text, plot)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    paths = {"type": Path, "metavar": "PATH"}
    source.add_argument("--log", **paths, help="log of a training")
    help_text = "checkpoints of a training, or folders with checkpoint*.pt"
    source.add_argument("--checkpoint", nargs="+", action="extend", **paths, help=help_text)
    help_text = "layers to draw, such as encoder2 or decoder1 (all)"
    parser.add_argument("--layer", nargs="+", action="extend", metavar="NAME", help=help_text)
    help_text = "draw the mean of N neighbouring points, one more if N is even (1: unchanged)"
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help=help_text)
    add_output_options(parser, "branch_weights", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_branch_weights(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
