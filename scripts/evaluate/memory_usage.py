r"""Measure how much of their product-key memories models read (Lample et al. 2019, section 4.2).

    python -m scripts.evaluate.memory_usage --data FOLDER --split test --output memory_usage \
        --checkpoint plain=plain/checkpoint_best.pt norm=norm/checkpoint_best.pt

The measures are over all tokens of a split, and come with its perplexity:
usage         share of the slots that were read, by each memory and by each of its heads
KL            divergence of the reads from uniform reads, in nats: 0 if all slots are read equally
overlap       share of one head's slots for a token that another head reads too (section 3.3)

Works for models of fairseq's tasks language_modeling and translation, and for segment language
models. If a token of the split is not scored exactly once, there is an error. Reads of padding do
not count. An encoder's memories count the tokens of the source. Layers are numbered from 1.

Writes memory_usage.json and memory_usage.png, and prints tables.
"""

import argparse
import sys
import warnings
from itertools import cycle
from typing import Any

from scripts._shared.command_line import (
    add_text_options,
    check_at_least,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import markdown_table, prepare_results, save_results

# Line styles of a model's memories; each model has a color.
_STYLES = ("-", "--", ":", "-.")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def format_tables(models: list[dict[str, Any]]) -> str:
    """Return Markdown tables of losses, memories and overlaps."""
    losses, figures, overlaps = [], [], []
    for model in models:
        label, loss = model["model"], f"{model['loss']:.4f}"
        losses.append([label, f"{model['tokens']:,}", loss, f"{model['perplexity']:.2f}"])
        for name, memory in model["memories"].items():
            totals = f"{memory['slots']:,}", _percent(memory["usage"]), f"{memory['kl']:.4f}"
            heads = " ".join(map(_percent, memory["usage_of_heads"]))
            figures.append([label, name, *totals, heads])
            if memory["heads"] > 1:
                for head, shares in enumerate(memory["overlap_of_tokens"], start=1):
                    overlaps.append([label, name, str(head), *map(_percent, shares)])
    headers = ["model", "memory", "slots", "usage, %", "KL, nats", "usage of heads, %"]
    parts = [markdown_table(["model", "tokens", "loss, nats", "perplexity"], losses)]
    parts.append(markdown_table(headers, figures))
    if overlaps:
        most = max(map(len, overlaps)) - 3
        headers = ["model", "memory", "head", *(f"in head {n}, %" for n in range(1, most + 1))]
        parts.append(
            "Of the slots that a token reads with one head (row), the share that another reads:"
        )
        parts.append(markdown_table(headers, overlaps))
    return "\n\n".join(parts)


def draw(axes: Any, models: list[dict[str, Any]]) -> None:
    """Draw the slots' weights, most read first: a line for each memory, a color for each model."""
    for number, model in enumerate(models):
        for style, (name, memory) in zip(cycle(_STYLES), model["memories"].items(), strict=False):
            ranks, weights = memory["curve"]["rank"], memory["curve"]["weight"]
            label = f"{model['model']}, {name}: {100 * memory['usage']:.1f}% used"
            # a line of one point is invisible
            look = {"color": f"C{number % 10}", "marker": "." if len(ranks) == 1 else None}
            axes.plot(ranks, weights, style, **look, label=label)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("slots that were read, the most read first")
    axes.set_ylabel("reads (1: as if all slots were read alike)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="x-small")


def measure_memory_usage(arguments: argparse.Namespace) -> None:
    """Measure each model."""
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    data, split = arguments.data.resolve(), arguments.split
    options = {name: getattr(arguments, name) for name in ("batch_size", "tokens_per_sample")}
    check_at_least(1, **options)
    from scripts.evaluate._memory_reads import check_inputs, measure
    from scripts.evaluate._scoring import choose_device

    for checkpoint in checkpoints:
        check_inputs(checkpoint, arguments.tokens_per_sample)
    device = choose_device(arguments.cpu)
    prepare_results(arguments.output)
    hardware = hardware_line(device)
    print(f"{split} of {short(data)}, on {hardware}\n", flush=True)
    # torch warns about fairseq's own attention in every batch with padding
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    models: list[dict[str, Any]] = []
    conditions = {"data": short(data), "split": split, **options}
    result = {**conditions, "hardware": hardware, "models": models}
    sizes = {name: value for name, value in options.items() if value}
    for checkpoint in checkpoints:
        models.append(measure(checkpoint, data, split, sizes, device))
        write_json(arguments.output / "memory_usage.json", result)
    text = f"{format_tables(models)}\n"
    save_results(arguments.output, "memory_usage", result, text, lambda axes: draw(axes, models))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add_text_options(parser, "memory_usage")
    help_text = (
        "blocks or sentence pairs in a batch (8), or parallel streams of a segment language model "
        "(1, which gives the exact loss of the whole text)"
    )
    add("--batch-size", type=int, help=help_text)
    add("--tokens-per-sample", type=int, help="length of a block or segment (as in training)")
    parsed = parser.parse_args(arguments)
    file = f"{short(parsed.output.resolve())}/memory_usage.json"
    interrupted = f"{file} keeps the models so far"
    return exit_status(lambda: measure_memory_usage(parsed), interrupted, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
