r"""Measure models' relative effective context length, RECL (Transformer-XL, 4.3, appendix C).

    python -m scripts.evaluate.recl --data FOLDER --output recl \
        --checkpoint XL=xl/checkpoint_best.pt vanilla=vanilla/checkpoint_best.pt

The RECL tells how much context helps each model of a group, compared with the group's best loss for
a shorter context: table 8 of the paper. Let l_i(c, t) be the loss in nats of model i at position t
with a context of c tokens. Then:

    b(c, t)    = min over i of l_i(c, t)                     the best short-context model's loss
    T          = the share r of positions with the largest b(c, t): the hardest ones
    f_i(c, c') = mean over t in T of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

c is lengthened by --step until the gain g falls below --threshold; the RECL of model i is the last
c reached. The definition is read as follows where it is ambiguous:

- b never exceeds l_i(c, t), so f_i(c, c) is the mean of b over T: the same base for all models.
- T is chosen anew for each c: the share r of the positions, rounded up; of equals, the earlier.
- c starts at --step. If a model gains too little from the start, its RECL is at most --step; if it
  always gains enough, its RECL is at least --max-context.
- A model with absolute positions reads no more tokens than in training, and its RECL is at most
  that number (the 128 of table 8's Transformer).

Works for segment language models and for models of fairseq's task language_modeling.

Each model computes its context from scratch, without a past, in windows of c - 1 + S tokens that
predict their last S tokens, where S is --stride. So a context of c tokens is c to c + S - 1 tokens;
--stride 1 is exact and the slowest. The distance clamp stays as trained. Positions with fewer than
--max-context tokens before them are scored but not counted: all contexts are compared on the same
positions.

Writes recl.json and recl.png, and prints a table.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from scripts._shared.command_line import (
    add_text_options,
    check_at_least,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.machine import hardware_line
from scripts._shared.results import markdown_table, prepare_results, save_results

# Shares r of the positions, as in table 8.
RATIOS = (0.1, 0.5, 1.0)
_SIGNS = {"exact": "", "at most": "≤ ", "at least": "≥ "}


def relative_gain(short: Sequence[Any], long: Any, ratio: float) -> float:
    """Return ``g_i(c, c')`` from l_i(c, ·) of each model of the group and l_i(c', ·), each (N,)."""
    import numpy as np

    baseline = np.min(np.stack(short), axis=0)
    number = math.ceil(ratio * len(baseline))
    hardest = np.sort(np.argsort(-baseline, kind="stable")[:number])
    # f_i(c, c) and f_i(c, c')
    base, reached = (
        float(np.minimum(baseline, other)[hardest].mean(dtype=np.float64))
        for other in (baseline, long)
    )
    # computed from the difference of losses, because perplexities of large losses would overflow
    return -math.expm1(reached - base)


def effective_context(
    losses: Callable[[int, int], Any],
    limits: Sequence[float],
    model: int,
    contexts: range,
    ratio: float,
    threshold: float,
) -> dict[str, Any]:
    """Return the RECL of a model in a group: "tokens", their "bound" and the "gains" of all steps.

    Args:
        losses: function that returns l_i(c, ·), (N,), for model i and context c.
        limits: the most tokens that each model of the group can read.
        model: i.
        contexts: c, from the shortest to the longest.
        ratio: r.
        threshold: the smallest gain, as a share of the perplexity, for which to go on.
    """
    gains: list[dict[str, Any]] = []
    tokens, bound = contexts[0], "at least"
    for long in contexts[1:]:
        group = [losses(other, tokens) for other in range(len(limits))]
        gain = relative_gain(group, losses(model, long), ratio)
        gains.append({"short": tokens, "long": long, "gain": gain})
        if gain < threshold:
            bound = "exact" if len(gains) > 1 else "at most"
            break
        tokens = long
    if tokens > limits[model]:
        # the model reads nothing beyond its limit, so a longer context cannot help
        tokens, bound = int(limits[model]), "at most" if bound == "at most" else "exact"
    return {"tokens": tokens, "bound": bound, "gains": gains}


def format_tokens(recl: dict[str, Any]) -> str:
    """Return the RECL, with a sign if it is only a bound."""
    return f"{_SIGNS[recl['bound']]}{recl['tokens']}"


def draw(axes: Any, models: dict[str, dict[str, Any]]) -> None:
    """Draw the RECL as bars, with a group for each ratio and a color for each model."""
    width = 0.8 / len(models)
    for number, (label, model) in enumerate(models.items()):
        shift = (number - (len(models) - 1) / 2) * width
        positions = [group + shift for group in range(len(RATIOS))]
        heights = [model["recl"][str(ratio)] for ratio in RATIOS]
        bars = axes.bar(positions, [recl["tokens"] for recl in heights], width, label=label)
        axes.bar_label(bars, [format_tokens(recl) for recl in heights])
    axes.set_xticks(range(len(RATIOS)), [f"r = {ratio}" for ratio in RATIOS])
    axes.set_ylabel("relative effective context length (tokens)")
    axes.margins(y=0.15)
    axes.legend()


def measure_recl(arguments: argparse.Namespace) -> None:
    """Measure each model's RECL."""
    stride, step, longest = arguments.stride, arguments.step, arguments.max_context
    check_at_least(1, stride=stride, step=step, max_tokens=arguments.max_tokens)
    if arguments.threshold >= 1:
        raise ValueError(f"--threshold is {arguments.threshold}: give a share such as 0.01")
    check_at_least(2 * step, max_context=longest)
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    from scripts.evaluate._scoring import (
        choose_device,
        context_losses,
        load_model,
        load_tokens,
        longest_context,
    )

    positions = len(load_tokens(arguments.data, arguments.split)[: arguments.max_tokens])
    counted = positions - longest
    if counted <= 0:
        raise ValueError(
            f"--max-context is {longest} and the text has {positions:,} tokens, so no token has "
            "that many before it: score more tokens, or give a smaller one"
        )
    loaded = [load_model(checkpoint, arguments) for checkpoint in checkpoints]
    limits = [longest_context(model, stride) for model in loaded]
    prepare_results(arguments.output)
    meaning = "exactly c" if stride == 1 else f"c to c + {stride - 1}"
    print(
        f"{arguments.split} of {short(arguments.data.resolve())}: {counted:,} positions of "
        f"{positions:,} tokens scored; stride {stride}: a context of c tokens is {meaning}\n"
        f"c grows by {step} up to {longest}, until a step lowers perplexity by less than "
        f"{100 * arguments.threshold:g} %\n"
    )

    @functools.cache
    def measure(number: int, context: int) -> Any:
        description = f"{checkpoints[number].label}, context {context}"
        options = {"max_tokens": positions, "description": description}
        losses = context_losses(loaded[number], context, arguments, **options)
        # all contexts count the same positions, which have the longest context before them
        return losses[longest:]

    def losses(number: int, context: int) -> Any:
        return measure(number, min(context, limits[number]))

    contexts, threshold = range(step, longest + 1, step), arguments.threshold
    models: dict[str, dict[str, Any]] = {}
    for number, checkpoint in enumerate(checkpoints):
        recl = {
            str(ratio): effective_context(losses, limits, number, contexts, ratio, threshold)
            for ratio in RATIOS
        }
        models[checkpoint.label] = {"checkpoint": short(checkpoint.path), "recl": recl}
    result = {
        "split": arguments.split,
        "positions": counted,
        "tokens": positions,
        "step": step,
        "max_context": longest,
        "stride": stride,
        "context_of_c_tokens": meaning,
        "threshold": threshold,
        "hardware": hardware_line(choose_device(arguments.cpu)),
        "models": models,
    }
    rows = [
        [label, *(format_tokens(recl) for recl in model["recl"].values())]
        for label, model in models.items()
    ]
    table = markdown_table(["model", *(f"r = {ratio}" for ratio in RATIOS)], rows) + "\n"
    save_results(arguments.output, "recl", result, table, lambda axes: draw(axes, models))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add_text_options(parser, "recl")
    add("--max-tokens", type=int, help="score only this many tokens from the start (all)")
    add("--step", type=int, default=100, help="shortest context, and its increment (100)")
    add("--max-context", type=int, default=1500, help="longest context (1500)")
    add("--threshold", type=float, default=0.01, help="stop below this gain (0.01)")
    add("--stride", type=int, default=10, help="tokens predicted in each window (10); 1 is exact")
    add("--batch-size", type=int, default=8, help="windows at once (8)")
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: measure_recl(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
