r"""Measure how much of their product-key memories models read (Lample et al. 2019, section 4.2).

    python -m scripts.evaluate.memory_usage --data FOLDER --split test --output memory_usage \
        --checkpoint plain=plain/checkpoint_best.pt norm=norm/checkpoint_best.pt

The measures are over all tokens of a split, and come with its perplexity:
usage         share of the slots that were read, by each memory and by each of its heads
KL            divergence of the reads from uniform reads, in nats: 0 if all slots are read equally

Works for models of fairseq's tasks language_modeling and translation, and for segment language
models. If a token of the split is not scored exactly once, there is an error. Reads of padding do
not count. An encoder's memories count the tokens of the source. Layers are numbered from 1.

Writes memory_usage.json and prints tables.
"""

import argparse
import sys
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
from scripts._shared.results import markdown_table


def format_tables(models: list[dict[str, Any]]) -> str:
    """Return Markdown tables of losses and of memories."""
    losses, figures = [], []
    for model in models:
        label, loss = model["model"], f"{model['loss']:.4f}"
        losses.append([label, f"{model['tokens']:,}", loss, f"{model['perplexity']:.2f}"])
        for name, memory in model["memories"].items():
            heads = " ".join(f"{100 * share:.2f}" for share in memory["usage_of_heads"])
            row = [f"{memory['slots']:,}", f"{100 * memory['usage']:.2f}", f"{memory['kl']:.4f}"]
            figures.append([label, name, *row, heads])
    headers = ["model", "memory", "slots", "usage, %", "KL, nats", "usage of heads, %"]
    table = markdown_table(["model", "tokens", "loss, nats", "perplexity"], losses)
    return f"{table}\n\n{markdown_table(headers, figures)}"


def measure_memory_usage(arguments: argparse.Namespace) -> None:
    """Measure each model."""
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    check_at_least(1, batch_size=arguments.batch_size)
    from scripts.evaluate._memory_reads import measure
    from scripts.evaluate._scoring import choose_device

    hardware = hardware_line(choose_device(arguments.cpu))
    data, split = short(arguments.data.resolve()), arguments.split
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(f"{split} of {data}, on {hardware}\n", flush=True)
    models: list[dict[str, Any]] = []
    sizes = {name: getattr(arguments, name) for name in ("batch_size", "tokens_per_sample")}
    result = {"data": data, "split": split, **sizes, "hardware": hardware, "models": models}
    for checkpoint in checkpoints:
        models.append(measure(checkpoint, arguments))
        write_json(arguments.output / "memory_usage.json", result)
    print(format_tables(models))
    print(f"\nwritten to {short(arguments.output.resolve())}/memory_usage.json")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add_text_options(parser, "memory_usage")
    help_text = (
        "blocks or sentence pairs in a batch (8), or parallel streams of a segment language model "
        "(1, which gives the exact loss of the whole text)"
    )
    parser.add_argument("--batch-size", type=int, help=help_text)
    help_text = "length of a block or segment (as in training)"
    parser.add_argument("--tokens-per-sample", type=int, help=help_text)
    parsed = parser.parse_args(arguments)
    file = f"{short(parsed.output.resolve())}/memory_usage.json"
    interrupted = f"{file} keeps the models so far"
    return exit_status(lambda: measure_memory_usage(parsed), interrupted, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
