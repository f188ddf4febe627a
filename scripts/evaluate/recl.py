r"""Relative effective context length of a group of models (Transformer-XL, 4.3, appendix C).

    python -m scripts.evaluate.recl --data FOLDER --output recl \
        --checkpoint XL=xl/checkpoint_best.pt vanilla=vanilla/checkpoint_best.pt

How much context makes a difference to each model, measured against the best of the group with a
shorter one: table 8 of the paper. effective_context.py has the definition and how it is read.

Each model computes its context from scratch, without a memory (mem_len 0), in windows of c - 1 + S
tokens that predict their last S tokens, S being --stride. So what counts as a context of c tokens
is between c and c + S - 1 of them; --stride 1 is exact and the slowest. The distance clamp stays as
it was trained. Positions with less than --max-context tokens before them are scored and not
counted: all contexts are compared on the same positions. Models with absolute positions read no
more than they were trained with.

Losses of a model and a context are kept in OUTPUT/losses: an interrupted measurement goes on where
it stopped, and one with other ratios, thresholds or steps uses them again. Writes recl.json and
recl.png, and prints a table.
"""

import argparse
import sys
from typing import Any

import numpy as np

from scripts._shared.command_line import (
    add_text_options,
    check_at_least,
    command_parser,
    exit_status,
    make_output_folder,
    parse_named_files,
    parse_numbers,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import check_plotting, markdown_table, save_plot
from scripts._shared.scoring import choose_device, load_task, load_tokens
from scripts.evaluate._context_losses import ContextLosses, Windows
from scripts.evaluate._effective_context import (
    Contexts,
    EffectiveContext,
    check_contexts,
    effective_context,
)


def format_tokens(found: dict[str, Any]) -> str:
    """RECL with its sign where it is a bound only."""
    return {"exact": "", "at most": "≤ ", "at least": "≥ "}[found["bound"]] + str(found["tokens"])


def format_table(models: dict[str, dict[str, Any]], ratios: list[float]) -> str:
    """Table of the RECL of each model and ratio, in Markdown."""
    rows = [
        [label, *(format_tokens(model["recl"][str(ratio)]) for ratio in ratios)]
        for label, model in models.items()
    ]
    return markdown_table(["model", *(f"r = {ratio}" for ratio in ratios)], rows)


def draw(axes: Any, models: dict[str, dict[str, Any]], ratios: list[float]) -> None:
    """Draw the RECL as bars, a group a ratio, a colour a model."""
    width = 0.8 / len(models)
    for number, (label, model) in enumerate(models.items()):
        places = np.arange(len(ratios)) + (number - (len(models) - 1) / 2) * width
        found = [model["recl"][str(ratio)] for ratio in ratios]
        bars = axes.bar(places, [each["tokens"] for each in found], width, label=label)
        axes.bar_label(bars, [format_tokens(each) for each in found])
    axes.set_xticks(np.arange(len(ratios)), [f"r = {ratio}" for ratio in ratios])
    axes.set_ylabel("relative effective context length (tokens)")
    axes.margins(y=0.15)
    axes.legend()


def describe(found: EffectiveContext) -> dict[str, Any]:
    """RECL as recl.json has it."""
    return {**found._asdict(), "gains": [gain._asdict() for gain in found.gains]}


def check_options(arguments: argparse.Namespace, contexts: Contexts) -> list[float]:
    """Shares r that the options ask for, rising; raises ValueError for impossible values."""
    check_at_least("--stride", arguments.stride, 1)
    check_at_least("--batch-size", arguments.batch_size, 1)
    check_contexts(contexts)
    if not 0 < arguments.threshold < 1:
        raise ValueError(f"--threshold is {arguments.threshold}: it must be between 0 and 1")
    ratios = parse_numbers("--ratios", arguments.ratios, float, 0, 1)
    if ratios[0] == 0:
        raise ValueError(f"--ratios is {arguments.ratios!r}: a share of 0 leaves no positions")
    return ratios


def measure_recl(arguments: argparse.Namespace) -> None:
    """Measure each model's RECL; raises ValueError for what cannot be, before any work."""
    first = arguments.step if arguments.first_context is None else arguments.first_context
    contexts = Contexts(first, arguments.step, arguments.max_context)
    ratios = check_options(arguments, contexts)
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    task = load_task(arguments.data, arguments.stride)
    positions = len(load_tokens(task, arguments.split, arguments.max_tokens))
    if positions <= arguments.max_context:
        raise ValueError(
            f"--max-context is {arguments.max_context} and the text has {positions:,} tokens, of "
            "which none has that many before it: score more tokens, or give a smaller one"
        )
    stride = arguments.stride
    windows = Windows(arguments.data, arguments.split, positions, stride, arguments.batch_size)
    device = choose_device(arguments.cpu)
    kept = ContextLosses(checkpoints, windows, arguments.output / "losses", device)
    check_plotting()
    make_output_folder(kept.folder)
    counted = positions - arguments.max_context
    meaning = "exactly c" if stride == 1 else f"c to c + {stride - 1}"
    print(
        f"{arguments.split} of {short(arguments.data.resolve())}: {counted:,} positions of "
        f"{positions:,} tokens scored; stride {stride}: a context of c tokens is {meaning}"
    )

    def losses(model: int, context: int) -> np.ndarray:
        # the same positions for all contexts: those that have the longest one before them
        return kept(model, context)[arguments.max_context :]

    models: dict[str, dict[str, Any]] = {}
    for number, checkpoint in enumerate(checkpoints):
        recl = {}
        for ratio in ratios:
            found = effective_context(
                losses,
                len(checkpoints),
                number,
                contexts,
                ratio,
                arguments.threshold,
                kept.limits[number],
            )
            recl[str(ratio)] = describe(found)
        models[checkpoint.label] = {"checkpoint": short(checkpoint.path), "recl": recl}
    for number, model in enumerate(models.values()):
        # the normal perplexity, not calibrated by the baseline (the paper's figure 4)
        model["perplexity"] = {
            str(context): float(np.exp(losses(number, context).mean(dtype=np.float64)))
            for context in kept.contexts(number)
        }
    result = {
        "split": arguments.split,
        "positions": counted,
        "tokens": positions,
        "contexts": contexts._asdict(),
        "stride": stride,
        "context_of_c_tokens": meaning,
        "threshold": arguments.threshold,
        "hardware": hardware_line(device),
        "models": models,
    }
    write_json(arguments.output / "recl.json", result)
    print(f"\n{format_table(models, ratios)}\n")
    save_plot(arguments.output / "recl.png", lambda axes: draw(axes, models, ratios))
    print(f"written to {short(arguments.output.resolve())}/recl.json and .png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add_text_options(parser, "recl")
    parser.add_argument("--ratios", default="0.1,0.5,1", help="shares r (0.1,0.5,1)")
    parser.add_argument("--step", type=int, default=100, help="tokens to lengthen by, Δ (100)")
    parser.add_argument("--first-context", type=int, help="shortest context (as --step)")
    parser.add_argument("--max-context", type=int, default=1500, help="longest context (1500)")
    parser.add_argument(
        "--threshold", type=float, default=0.01, help="gain that ends the lengthening (0.01)"
    )
    parser.add_argument(
        "--stride", type=int, default=10, help="tokens predicted of each window (10); 1 is exact"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once (8)")
    parsed = parser.parse_args(arguments)
    return exit_status(
        lambda: measure_recl(parsed),
        f"{short(parsed.output.resolve())}/losses keeps what was measured; the same command goes "
        "on from there",
    )


if __name__ == "__main__":
    sys.exit(main())
