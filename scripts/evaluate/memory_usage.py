r"""How much of their product-key memories trained models read (Lample et al. 2019, section 4.2).

    python -m scripts.evaluate.memory_usage --data FOLDER --split test --output memory_usage \
        --checkpoint plain=plain/checkpoint_best.pt norm=norm/checkpoint_best.pt

Over all tokens of a split, with the perplexity that they had there:
usage         share of the slots that were read, of each memory and of each of its heads
KL            divergence of the reads from uniform ones, in nats: 0 where all slots are read alike
half, 90%     how many slots, the most read ones, have that share of all reads
overlap       share of the slots that a token reads with one head which it reads with another too
              (section 3.3), and of the slots that one head reads at all, those of another

Takes models of fairseq's tasks language_modeling and translation, and segment language models. Each
token of the split is scored once, or there is an error; of a context that is read again
(--context-window) the reads do not count, nor those of padding. Memories of an encoder count the
tokens of the source. Layers count from 1.

Writes memory_usage.json and memory_usage.png, and prints tables.
"""

import argparse
import math
import sys
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts._shared.command_line import (
    NamedFile,
    add_checkpoint_option,
    add_output_options,
    check_at_least,
    command_parser,
    exit_status,
    make_output_folder,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import check_plotting, markdown_table, save_plot
from scripts._shared.scoring import choose_device
from scripts.evaluate._memory_reads import SHARES, describe, record_usage
from scripts.evaluate._split_loss import Reading, check_inputs, load_model, load_split, score_split

# Memories of a model have its colour, each a style of its own.
_STYLES = ("-", "--", ":", "-.")


def percent(share: float) -> str:
    """Share of 1 as a percentage, without its sign."""
    return f"{100 * share:.2f}"


def measure(checkpoint: NamedFile, reading: Reading, device: torch.device) -> dict[str, Any]:
    """Loss of a model and the figures of its memories over a split.

    Raises ValueError when it cannot be used with this data, or a token was not read once.
    """
    model, task = load_model(checkpoint.path, reading.data, device)
    tokens = load_split(task, model, reading)
    with record_usage(model) as memories:
        in_decoder = [memories[name] for name in memories if not name.startswith("encoder")]

        def count_only(counted: Tensor) -> None:
            for memory in in_decoder:
                memory.counted = counted

        description = f"scoring {checkpoint.label}"
        loss = score_split(model, task, reading, tokens.targets, count_only, description)
    for name, memory in memories.items():
        there = tokens.targets if memory in in_decoder else tokens.sources
        if memory.tokens != there:
            raise ValueError(
                f"{name} of --checkpoint {short(checkpoint.path)} read for {memory.tokens:,} "
                f"tokens of the {there:,} of --split {reading.split}, so the figures would be "
                "wrong: use the versions of fairseq and of this plugin that belong together"
            )
    return {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "tokens": tokens.targets,
        "loss": loss,
        "perplexity": math.exp(loss),
        "memories": {name: describe(memory) for name, memory in memories.items()},
    }


def _memories(models: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (model["model"], name, memory)
        for model in models
        for name, memory in model["memories"].items()
    ]


def format_models(models: list[dict[str, Any]]) -> str:
    """Table of the losses in Markdown."""
    rows = [
        [
            model["model"],
            f"{model['tokens']:,}",
            f"{model['loss']:.4f}",
            f"{model['perplexity']:.2f}",
        ]
        for model in models
    ]
    return markdown_table(["model", "tokens", "loss, nats", "perplexity"], rows)


def format_memories(models: list[dict[str, Any]]) -> str:
    """Table of the memories in Markdown, a row a memory."""
    rows = [
        [
            model,
            name,
            f"{memory['slots']:,}",
            percent(memory["usage"]),
            f"{memory['kl']:.4f}",
            *(f"{memory['slots_with_share'][str(share)]:,}" for share in SHARES),
            " ".join(map(percent, memory["usage_of_heads"])),
        ]
        for model, name, memory in _memories(models)
    ]
    shares = [f"slots with {share:.0%} of reads" for share in SHARES]
    headers = ["model", "memory", "slots", "usage, %", "KL, nats", *shares, "usage of heads, %"]
    return markdown_table(headers, rows)


def format_overlap(models: list[dict[str, Any]], kind: str) -> str | None:
    """Table of an overlap between heads in Markdown, a row a head; None without two heads.

    Args:
        models: their figures.
        kind: which of the overlaps.
    """
    several = [row for row in _memories(models) if row[2]["heads"] > 1]
    if not several:
        return None
    most = max(memory["heads"] for _, _, memory in several)
    rows = [
        [model, name, str(head), *map(percent, shares), *[""] * (most - memory["heads"])]
        for model, name, memory in several
        for head, shares in enumerate(memory[kind], start=1)
    ]
    return markdown_table(
        ["model", "memory", "head", *(f"in head {head}, %" for head in range(1, most + 1))], rows
    )


def draw(axes: Any, models: list[dict[str, Any]]) -> None:
    """Draw the weight of each slot, most read first: a line a memory, a colour a model."""
    for number, model in enumerate(models):
        for style, (name, memory) in zip(cycle(_STYLES), model["memories"].items(), strict=False):
            found = memory["curve"]
            axes.plot(
                found["rank"],
                found["weight"],
                style,
                color=f"C{number % 10}",
                # a memory may have one slot that was read
                marker="." if len(found["rank"]) == 1 else None,
                label=f"{model['model']}, {name}: {100 * memory['usage']:.1f}% used",
            )
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("slots that were read, the most read first")
    axes.set_ylabel("reads (1: as if all slots were read alike)")
    axes.grid(alpha=0.3)
    # lines fall from the left to the right
    axes.legend(loc="best", fontsize="x-small")


def _print_tables(models: list[dict[str, Any]]) -> None:
    print(f"\n{format_models(models)}\n\n{format_memories(models)}")
    for kind, meaning in (
        (
            "overlap_of_tokens",
            "Of the slots that a token reads with a head (row), those it reads with another too:",
        ),
        (
            "overlap_of_slots",
            "Of the slots that a head (row) reads for any token, those that another reads too:",
        ),
    ):
        table = format_overlap(models, kind)
        if table is not None:
            print(f"\n{meaning}\n\n{table}")
    by_chance = {
        f"{memory['knn']} of {memory['slots']:,}, {100 * memory['knn'] / memory['slots']:.2g}%"
        for _, _, memory in _memories(models)
        if memory["heads"] > 1
    }
    if by_chance:
        print(
            f"\nBy chance a token's slots of two heads would share {'; '.join(sorted(by_chance))}"
        )


def measure_memory_usage(arguments: argparse.Namespace) -> None:
    """Measure each model; raises ValueError for what cannot be, before any work."""
    for option in ("batch_size", "tokens_per_sample"):
        value = getattr(arguments, option)
        if value is not None:
            check_at_least(f"--{option.replace('_', '-')}", value, 1)
    check_at_least("--context-window", arguments.context_window, 0)
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    reading = Reading(
        arguments.data.resolve(),
        arguments.split,
        arguments.batch_size,
        arguments.tokens_per_sample,
        arguments.context_window,
    )
    for checkpoint in checkpoints:
        check_inputs(checkpoint.path, reading.data)
    device = choose_device(arguments.cpu)
    check_plotting()
    make_output_folder(arguments.output)
    print(f"{reading.split} of {short(reading.data)}, on {hardware_line(device)}", flush=True)
    # fairseq's own attention has torch warn in every batch with padding
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    models: list[dict[str, Any]] = []
    for checkpoint in checkpoints:
        models.append(measure(checkpoint, reading, device))
        result = {
            "data": short(reading.data),
            "split": reading.split,
            "batch_size": reading.batch_size,
            "tokens_per_sample": reading.tokens_per_sample,
            "context_window": reading.context_window,
            "hardware": hardware_line(device),
            "models": models,
        }
        write_json(arguments.output / "memory_usage.json", result)
    _print_tables(models)
    save_plot(arguments.output / "memory_usage.png", lambda axes: draw(axes, models))
    print(f"\nwritten to {short(arguments.output.resolve())}/memory_usage.json and .png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that fairseq-preprocess wrote"
    )
    add_checkpoint_option(parser)
    parser.add_argument("--split", default="test", help="part of the data to score (test)")
    parser.add_argument(
        "--batch-size",
        type=int,
        help="blocks or pairs of sentences at once (8), or parallel streams of a segment language "
        "model (1, which gives the exact figure of the whole text)",
    )
    parser.add_argument(
        "--tokens-per-sample", type=int, help="length of a block or segment (as in training)"
    )
    parser.add_argument(
        "--context-window",
        type=int,
        default=0,
        help="tokens of a block that are read again, as context, and not scored (0)",
    )
    add_output_options(parser, "memory_usage")
    parsed = parser.parse_args(arguments)
    return exit_status(
        lambda: measure_memory_usage(parsed),
        f"{short(parsed.output.resolve())}/memory_usage.json keeps the models so far",
    )


if __name__ == "__main__":
    sys.exit(main())
