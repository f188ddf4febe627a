r"""Measure a text's loss against the attention length: how far back a trained model uses it.

    python -m scripts.evaluate.attention_length --data FOLDER --checkpoint XL=checkpoint_best.pt \
        --mem-len 128,256,512,1024 --output attention_length

The attention length is raised at evaluation, as for the results of Transformer-XL (section 4) and
its tables 6 and 10 (columns "PPL best" and "Attn Len"). With --mem-len it is the recurrence, and
every token attends to that many tokens, as in the paper. Models without recurrence recompute the
--extended-context before each segment: a token of a segment of S tokens sees that many tokens and
up to S more.

"Nats against the first" is the mean difference between a token's loss and its loss in the model's
first row, the shortest length with the smallest clamp, with a 95% confidence interval. The interval
treats the means of 32 parts of the text as independent. It is valid for other text of this kind,
not for another training.

--sliding-window N also times N windows: the whole attention length is recomputed for every single
token, as Al-Rfou et al. 2018 evaluate, instead of reusing states. Table 9 of Transformer-XL has
this ratio of times for another machine and implementation.

Writes attention_length.json, updated after each measurement, and attention_length.png, and prints a
table. More streams (--batch-size) are faster, but each starts with an empty past: one stream
gives the exact loss of the text.
"""

import argparse
import math
import sys
import time
from typing import Any

from scripts._shared.checkpoints import checkpoint_options, read_checkpoint
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

# Table 9: how many times slower the model of Al-Rfou et al. 2018 is.
PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
# Losses of nearby tokens are correlated, those of distant tokens hardly: the means of PARTS parts
# of a text, each of at least PART_TOKENS tokens, are treated as independent.
PARTS, PART_TOKENS = 32, 512
# The 97.5% quantile of Student's t with PARTS - 1 degrees of freedom.
T_QUANTILE = 2.0395


def parse_lengths(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the attention lengths that the options ask for: for each clamp, increasing lengths.

    ``clamp_len`` None leaves the clamp as it was trained.
    """
    clamps: list[int | None] = [None]
    if arguments.clamp_len is not None:
        clamps = [*parse_numbers("--clamp-len", arguments.clamp_len, 1)]
    if arguments.mem_len is not None:
        recurrences = parse_numbers("--mem-len", arguments.mem_len, 1)
        lengths = [{"mem_len": length, "extended_context": 0} for length in recurrences]
    elif arguments.sliding_window:
        raise ValueError("--sliding-window needs a recurrence: drop it, or give --mem-len")
    else:
        contexts = parse_numbers("--extended-context", arguments.extended_context, 0)
        lengths = [{"mem_len": 0, "extended_context": context} for context in contexts]
    return [{**length, "clamp_len": clamp} for clamp in clamps for length in lengths]


def paired_difference(losses: Any, reference: Any) -> tuple[float, float | None]:
    """Return the mean difference of two losses (N,) of the same tokens, and half its 95% interval.

    The interval is None if the text is too short for it.
    """
    import numpy as np

    differences = losses.astype(np.float64) - reference
    if len(differences) < PARTS * PART_TOKENS:
        return float(differences.mean()), None
    means = [part.mean() for part in np.array_split(differences, PARTS)]
    return float(differences.mean()), float(T_QUANTILE * np.std(means, ddof=1) / math.sqrt(PARTS))


def time_window(model: Any, tokens: Any, times: int) -> float:
    """Return the median seconds to read tokens (L,) and score the last one, without a past."""
    import numpy as np
    import torch

    from fairseq_plugins.python_interface.scoring import score_features

    inputs = torch.from_numpy(tokens.astype(np.int64)).to(model.device).unsqueeze(0)
    scored = torch.zeros_like(inputs, dtype=torch.bool)
    scored[:, -1] = True
    seconds = []
    # the first run warms up
    for _ in range(times + 1):
        synchronize(model.device)
        started = time.perf_counter()
        with torch.no_grad():
            features, _ = model.model.decoder.extract_features(inputs)
            score_features(model.model, features, inputs, scored)
        synchronize(model.device)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def measure(
    checkpoint: NamedFile, length: dict[str, Any], tokens: Any, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """Return a row of the results, and the loss of each token in nats, (N,)."""
    import numpy as np

    from fairseq_plugins.python_interface.scoring import in_unit
    from scripts.evaluate._scoring import load_model, score

    clamp = {"clamp_len": length["clamp_len"]} if length["clamp_len"] else {}
    model = load_model(checkpoint, arguments, length["mem_len"], **clamp)
    started = time.monotonic()
    losses = score(
        model,
        arguments,
        tokens_per_sample=arguments.tokens_per_sample,
        extended_context=length["extended_context"],
        max_tokens=arguments.max_tokens,
        description=f"{checkpoint.label}, {length['mem_len'] or length['extended_context']} back",
    )
    seconds = time.monotonic() - started
    nats = float(np.mean(losses, dtype=np.float64))
    trained = checkpoint_options(read_checkpoint(checkpoint.path), "model")
    row = {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        **length,
        "clamp_len": length["clamp_len"] or trained.get("clamp_len"),
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
        # repeats a short text
        text, window = np.resize(tokens, length["mem_len"]), load_model(checkpoint, arguments)
        row["reuse_ms_per_token"] = 1000 * seconds / len(losses)
        row["window_ms_per_token"] = 1000 * time_window(window, text, arguments.sliding_window)
    return row, losses


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, and each model's best length below it."""
    headers = ["model", "recurrence", "extended context", "clamp", "segment", "streams"]
    headers += ["tokens", rows[0]["unit"], "nats against the first", "seconds"]
    cells, best = [], {}
    for row in rows:
        difference, half = row["nats_difference"], row["nats_half_interval"]
        against = "" if difference is None else f"{difference:+.4f}"
        against += "" if half is None else f" ± {half:.4f}"
        lengths = row["mem_len"], row["extended_context"], row["clamp_len"] or "none"
        cells.append([row["model"], *lengths, row["segment"], row["streams"]])
        cells[-1] += [f"{row['tokens']:,}", f"{row['loss']:.4f}", against, f"{row['seconds']:.1f}"]
        best[row["model"]] = min(best.get(row["model"], row), row, key=lambda one: one["nats"])
    lines = [markdown_table(headers, cells), ""]
    for model, row in best.items():
        length = row["mem_len"] or row["extended_context"]
        clamp = f", clamp {row['clamp_len']}" if row["clamp_len"] else ""
        lines.append(f"{model}: best at {length} tokens{clamp}, {row['loss']:.4f} {row['unit']}")
    return "\n".join(lines)


def format_times(rows: list[dict[str, Any]]) -> str:
    """Return the times of state reuse and of sliding windows as a Markdown table."""
    headers = ["model", "attention length", "state reuse, ms/token", "sliding window, ms/token"]
    cells = []
    for row in rows:
        reuse, window = row["reuse_ms_per_token"], row["window_ms_per_token"]
        published = f"{PUBLISHED[row['mem_len']]}x" if row["mem_len"] in PUBLISHED else ""
        times = f"{reuse:.4g}", f"{window:.4g}", f"{window / reuse:.0f}x"
        cells.append([row["model"], row["mem_len"], *times, published])
    return markdown_table([*headers, "ratio", "published ratio"], cells)


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw each model's loss against the attention length."""
    clamps = {row["clamp_len"] for row in rows}
    for label, clamp in dict.fromkeys((row["model"], row["clamp_len"]) for row in rows):
        line = [row for row in rows if (row["model"], row["clamp_len"]) == (label, clamp)]
        lengths = [row["mem_len"] or row["extended_context"] for row in line]
        name = label if len(clamps) == 1 else f"{label}, clamp {clamp or 'none'}"
        axes.plot(lengths, [row["loss"] for row in line], marker="o", label=name)
    recomputed = any(row["extended_context"] for row in rows)
    axes.set_xlabel("extended context (tokens)" if recomputed else "recurrence (tokens)")
    axes.set_ylabel(rows[0]["unit"])
    axes.set_title(f"{rows[0]['tokens']:,} tokens, segments of {rows[0]['segment']}")
    axes.grid(alpha=0.3)
    axes.legend()


def measure_lengths(arguments: argparse.Namespace) -> None:
    """Measure each model at each length."""
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    lengths = parse_lengths(arguments)
    check_at_least(0, sliding_window=arguments.sliding_window)
    from scripts.evaluate._scoring import choose_device, load_tokens

    tokens = load_tokens(arguments.data, arguments.split)
    prepare_results(arguments.output)
    rows: list[dict[str, Any]] = []
    hardware = hardware_line(choose_device(arguments.cpu))
    result = {"split": arguments.split, "hardware": hardware, "rows": rows}
    for checkpoint in checkpoints:
        first = None
        for length in lengths:
            row, losses = measure(checkpoint, length, tokens, arguments)
            difference = (None, None) if first is None else paired_difference(losses, first)
            row["nats_difference"], row["nats_half_interval"] = difference
            first = losses if first is None else first
            rows.append(row)
            write_json(arguments.output / "attention_length.json", result)
    text = format_table(rows)
    if arguments.sliding_window:
        text += f"\n\n{format_times(rows)}\n"
    save_results(arguments.output, "attention_length", result, text, lambda axes: draw(axes, rows))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add_text_options(parser, "attention_length")
    add("--max-tokens", type=int, help="score only this many tokens from the start (all)")
    lengths = parser.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--mem-len", help="recurrences to evaluate with, such as 128,256,512")
    help_text = "tokens before each segment to recompute, for models without recurrence"
    lengths.add_argument("--extended-context", help=help_text)
    add("--tokens-per-sample", type=int, default=128, help="segment length (128)")
    add("--clamp-len", help="distance limits, such as 400,800 (as trained)")
    add("--batch-size", type=int, default=1, help="number of parallel streams (1)")
    help_text = "also time N sliding windows of each attention length, one at a time (0)"
    add("--sliding-window", type=int, default=0, metavar="N", help=help_text)
    parsed = parser.parse_args(arguments)
    file = f"{short(parsed.output.resolve())}/attention_length.json"
    interrupted = f"{file} keeps the results so far"
    return exit_status(lambda: measure_lengths(parsed), interrupted, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
