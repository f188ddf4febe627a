r"""Loss of a text against the attention length: how far back a trained model makes use of it.

    python -m scripts.evaluate.attention_length --data FOLDER --checkpoint XL=checkpoint_best.pt \
        --mem-len 128,256,512,1024 --output attention_length

The attention length is lengthened at evaluation, as for the results of Transformer-XL (section 4)
and its tables 6 and 10 (columns "PPL best" and "Attn Len"). With --mem-len it is the memory; every
token attends to the same number of tokens, as in the paper, unless --no-same-length is given.
Models without a memory read the --extended-context before each segment anew: a token of a segment
of S tokens sees that many tokens and up to S more.

"Nats against the first" is the mean of what a token's loss differs by from the same token's in the
model's first row, its shortest length with its smallest clamp, with a 95% confidence interval. That
is of the means of 32 parts of the text, which are taken for independent, so it holds for other text
of this kind, not for another training.

--sliding-window N also times N windows: for every single token the tokens of the attention length
are computed anew, as Al-Rfou et al. 2018 evaluate, in place of reusing states. The ratio of the two
times is that of Transformer-XL's table 9, published for another machine and implementation.

Writes attention_length.json, brought up to date after each figure, and attention_length.png, and
prints a table. More streams (--batch-size) are faster, and each starts with an empty memory: one
stream gives the exact figure of the text.
"""

import argparse
import math
import statistics
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from fairseq_plugins.python_interface.language_model import LanguageModel
from fairseq_plugins.python_interface.loading import load
from fairseq_plugins.python_interface.scoring import in_unit
from scripts._shared.checkpoints import load_checkpoint, options_of
from scripts._shared.command_line import (
    NamedFile,
    add_text_options,
    check_at_least,
    command_parser,
    exit_status,
    parse_named_files,
    parse_numbers,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line, synchronize
from scripts._shared.results import markdown_table, prepare_results, save_results
from scripts.evaluate._splits import choose_device, load_tokens

# Parts of a text whose means are compared, and how many tokens each has at least: losses of
# neighbours depend on one another, those of distant tokens hardly.
PARTS, PART_TOKENS = 32, 512
# 97.5% of Student's t with PARTS - 1 degrees of freedom is below this.
T_QUANTILE = 2.0395
# Table 9: how many times slower the model of Al-Rfou et al. 2018 is.
PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


class AttentionLength(NamedTuple):
    """One length to evaluate with: ``mem_len``, or ``extended_context`` of a model without memory.

    All in tokens; ``clamp_len`` None leaves the clamp as it was trained.
    """

    mem_len: int
    extended_context: int
    same_length: bool
    clamp_len: int | None

    @property
    def tokens(self) -> int:
        """The length itself."""
        return self.mem_len or self.extended_context

    def overrides(self) -> dict[str, Any]:
        """Options of the model that differ from those of training."""
        changed = {"mem_len": self.mem_len, "same_length": self.same_length}
        return changed if self.clamp_len is None else {**changed, "clamp_len": self.clamp_len}


def parse_lengths(arguments: argparse.Namespace) -> list[AttentionLength]:
    """Attention lengths that the options ask for: for each clamp, the lengths rising."""
    clamps: list[int | None] = [None]
    if arguments.clamp_len is not None:
        clamps = parse_numbers("--clamp-len", arguments.clamp_len, int, 1, math.inf)
    contexts = arguments.extended_context
    if contexts is not None:
        if arguments.same_length or arguments.sliding_window:
            option = "--same-length" if arguments.same_length else "--sliding-window"
            raise ValueError(f"{option} is about a memory: drop it, or give --mem-len")
        contexts = parse_numbers("--extended-context", contexts, int, 0, math.inf)
        return [
            AttentionLength(0, context, False, clamp) for clamp in clamps for context in contexts
        ]
    same_length = arguments.same_length is not False
    memories = parse_numbers("--mem-len", arguments.mem_len, int, 0, math.inf)
    if memories[0] == 0 and (same_length or arguments.sliding_window):
        raise ValueError(
            f"--mem-len is {arguments.mem_len!r}: a memory of 0 tokens with --same-length or "
            "--sliding-window leaves nothing to attend to; leave 0 out, or give --no-same-length"
        )
    return [
        AttentionLength(memory, 0, same_length, clamp) for clamp in clamps for memory in memories
    ]


def check_length(checkpoint: NamedFile, length: AttentionLength, segment: int) -> None:
    """Check that the model of a checkpoint can have this attention length."""
    options = options_of(load_checkpoint(checkpoint.path), "model")
    positions, span = str(options.get("positions")), options.get("attention_span")
    problem = ""
    if positions.endswith("-absolute") and length.mem_len > 0:
        problem = (
            f"--mem-len {length.mem_len}: {checkpoint.label} has --positions {positions}, which go "
            "without a memory; give --extended-context in its place"
        )
    elif positions.endswith("-absolute") and length.clamp_len is not None:
        problem = (
            f"--clamp-len {length.clamp_len}: {checkpoint.label} has --positions {positions}, "
            "which encode no distances; leave it out"
        )
    elif span is not None and length.mem_len > span:
        problem = (
            f"--mem-len {length.mem_len}: {checkpoint.label} attends to --attention-span {span} "
            "tokens and no more; give smaller numbers"
        )
    elif positions == "learned-absolute":
        places = options["tokens_per_sample"] + options["extended_context"]
        if segment + length.extended_context > places:
            problem = (
                f"--extended-context {length.extended_context} with --tokens-per-sample {segment}: "
                f"{checkpoint.label} has vectors of {places} places; the two must not exceed that"
            )
    if problem:
        raise ValueError(problem)


def paired_difference(losses: np.ndarray, reference: np.ndarray) -> tuple[float, float | None]:
    """Mean difference of two losses of the same tokens, (N,) each, and half its 95% interval.

    In the losses' unit. None in place of the interval for texts that are too short for one.
    """
    differences = losses.astype(np.float64) - reference
    if len(differences) < PARTS * PART_TOKENS:
        return float(differences.mean()), None
    means = [float(part.mean()) for part in np.array_split(differences, PARTS)]
    half = T_QUANTILE * statistics.stdev(means) / math.sqrt(PARTS)
    return float(differences.mean()), half


@torch.no_grad()
def time_window(model: LanguageModel, tokens: np.ndarray, windows: int) -> float:
    """Median of the seconds in which a model reads all tokens (L,) anew to score the last one.

    Args:
        model: one without a memory.
        tokens: (L,).
        windows: how often it is timed, after once for warming up.
    """
    inputs = torch.from_numpy(tokens.astype(np.int64)).to(model.device).unsqueeze(0)
    seconds = []
    for _ in range(windows + 1):
        synchronize(model.device)
        started = time.perf_counter()
        features, _ = model.model.decoder.extract_features(inputs)
        output = model.model.decoder.output_layer(features[:, -1:])
        sample = {"target": inputs[:, -1:]}
        model.model.get_normalized_probs((output, None), log_probs=True, sample=sample)
        synchronize(model.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def measure(
    checkpoint: NamedFile, length: AttentionLength, arguments: argparse.Namespace
) -> tuple[dict[str, Any], np.ndarray]:
    """One figure with all that it was got with, and the loss of each token in nats, (N,)."""
    device = choose_device(arguments.cpu)
    model = load(checkpoint.path, arguments.data, **length.overrides()).to(device)
    description = f"{checkpoint.label}, {length.tokens} tokens back"
    description += f", clamp {length.clamp_len}" if length.clamp_len else ""
    started = time.monotonic()
    losses = model.score_split(
        arguments.split,
        batch_size=arguments.batch_size,
        tokens_per_sample=arguments.tokens_per_sample,
        extended_context=length.extended_context,
        max_tokens=arguments.max_tokens,
        description=description,
    )
    seconds = time.monotonic() - started
    nats = float(np.mean(losses, dtype=np.float64))
    tokens = load_tokens(arguments.data, arguments.split)
    row = {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "mem_len": length.mem_len,
        "extended_context": length.extended_context,
        "clamp_len": length.clamp_len
        or options_of(load_checkpoint(checkpoint.path), "model").get("clamp_len"),
        "same_length": length.same_length,
        "segment": arguments.tokens_per_sample,
        "streams": arguments.batch_size,
        "tokens": len(losses),
        "tokens_of_split": len(tokens),
        "nats": nats,
        "unit": model.unit,
        "loss": in_unit(nats, model.unit),
        "seconds": round(seconds, 3),
    }
    if arguments.sliding_window:
        window = load(checkpoint.path, arguments.data, mem_len=0, same_length=False).to(device)
        text = np.resize(tokens, length.mem_len)
        row["reuse_ms_per_token"] = 1000 * seconds / len(losses)
        row["window_ms_per_token"] = 1000 * time_window(window, text, arguments.sliding_window)
    return row, losses


def format_difference(row: dict[str, Any]) -> str:
    """Difference from the model's first row, with half its interval; "" for that row itself."""
    difference, half = row["nats_difference"], row["nats_half_interval"]
    if difference is None:
        return ""
    return f"{difference:+.4f}" + (f" ± {half:.4f}" if half is not None else "")


def format_table(rows: list[dict[str, Any]]) -> str:
    """Table of the figures in Markdown."""
    headers = ["model", "memory", "extended context", "clamp", "same length", "segment", "streams"]
    headers += ["tokens", rows[0]["unit"], "nats against the first", "seconds"]
    cells = [
        [
            row["model"],
            *(row["mem_len"], row["extended_context"], row["clamp_len"] or "none"),
            *("yes" if row["same_length"] else "no", row["segment"], row["streams"]),
            *(f"{row['tokens']:,}", f"{row['loss']:.4f}", format_difference(row)),
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    return markdown_table(headers, cells)


def format_times(rows: list[dict[str, Any]]) -> str:
    """Table of the times of states that are reused and of windows in Markdown."""
    headers = ["model", "attention length", "state reuse, ms/token", "sliding window, ms/token"]
    cells = []
    for row in rows:
        reuse, window = row["reuse_ms_per_token"], row["window_ms_per_token"]
        published = PUBLISHED.get(row["mem_len"])
        cells.append([row["model"], row["mem_len"], f"{reuse:.4g}", f"{window:.4g}"])
        cells[-1] += [f"{window / reuse:.0f}x", f"{published}x" if published else ""]
    return markdown_table([*headers, "ratio", "published ratio"], cells)


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw each model's loss against the attention length."""
    clamps = {row["clamp_len"] for row in rows}
    for label, clamp in dict.fromkeys((row["model"], row["clamp_len"]) for row in rows):
        own = [row for row in rows if (row["model"], row["clamp_len"]) == (label, clamp)]
        lengths = [row["mem_len"] or row["extended_context"] for row in own]
        name = label if len(clamps) == 1 else f"{label}, clamp {clamp or 'none'}"
        axes.plot(lengths, [row["loss"] for row in own], marker="o", label=name)
    recomputed = any(row["extended_context"] for row in rows)
    axes.set_xlabel("extended context (tokens)" if recomputed else "memory (tokens)")
    axes.set_ylabel(rows[0]["unit"])
    axes.set_title(f"{rows[0]['tokens']:,} tokens, segments of {rows[0]['segment']}")
    axes.grid(alpha=0.3)
    axes.legend()


def measure_lengths(arguments: argparse.Namespace) -> None:
    """Measure each model at each length."""
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    lengths = parse_lengths(arguments)
    for name in ("batch_size", "tokens_per_sample", "max_tokens"):
        check_at_least(1, **{name: getattr(arguments, name)})
    check_at_least(0, sliding_window=arguments.sliding_window)
    whole = len(load_tokens(arguments.data, arguments.split))
    for checkpoint in checkpoints:
        for length in lengths:
            check_length(checkpoint, length, arguments.tokens_per_sample)
    prepare_results(arguments.output)
    tokens = min(whole, arguments.max_tokens or whole)
    part = "all" if tokens == whole else f"only the first {tokens:,}"
    print(f"{arguments.split} of {short(arguments.data.resolve())}: {part} of {whole:,} tokens\n")
    rows: list[dict[str, Any]] = []
    hardware = hardware_line(choose_device(arguments.cpu))
    result = {"split": arguments.split, "hardware": hardware, "rows": rows}
    for checkpoint in checkpoints:
        first = None
        for length in lengths:
            row, losses = measure(checkpoint, length, arguments)
            difference = (None, None) if first is None else paired_difference(losses, first)
            row["nats_difference"], row["nats_half_interval"] = difference
            first = losses if first is None else first
            rows.append(row)
            write_json(arguments.output / "attention_length.json", result)
    text = [f"{format_table(rows)}\n"]
    for label, _ in checkpoints:
        best = min((row for row in rows if row["model"] == label), key=lambda row: row["nats"])
        length = best["mem_len"] or best["extended_context"]
        clamp = f", clamp {best['clamp_len']}" if best["clamp_len"] else ""
        text.append(f"{label}: best at {length} tokens{clamp}, {best['loss']:.4f} {best['unit']}")
    if arguments.sliding_window:
        text.append(f"\n{format_times(rows)}\n")
    text = "\n".join(text)
    save_results(arguments.output, "attention_length", result, text, lambda axes: draw(axes, rows))


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add_text_options(parser, "attention_length")
    add("--max-tokens", type=int, help="score only the first so many tokens (all)")
    lengths = parser.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--mem-len", help="memory lengths to evaluate with, such as 128,256,512")
    help_text = "tokens before each segment that are computed anew, for models without a memory"
    lengths.add_argument("--extended-context", help=help_text)
    add("--tokens-per-sample", type=int, default=128, help="segment length (128)")
    add("--clamp-len", help="distance limits, such as 400,800 (as it was trained)")
    help_text = "every token attends to the same number of tokens (yes with --mem-len)"
    add("--same-length", action=argparse.BooleanOptionalAction, help=help_text)
    add("--batch-size", type=int, default=1, help="number of parallel streams (1)")
    help_text = "time N sliding windows of each attention length too (0)"
    add("--sliding-window", type=int, default=0, metavar="N", help=help_text)
    parsed = parser.parse_args(arguments)
    kept = f"{short(parsed.output.resolve())}/attention_length.json keeps the figures so far"
    return exit_status(lambda: measure_lengths(parsed), kept, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
