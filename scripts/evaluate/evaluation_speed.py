r"""Time of scoring a token with reused states and with a sliding window (Transformer-XL, table 9).

    python -m scripts.evaluate.evaluation_speed --arch transformer_xl_enwik8_base
    python -m scripts.evaluate.evaluation_speed --checkpoint checkpoint_best.pt

At each attention length L, two models of the same sizes are timed:
state reuse       segments of S tokens with a memory of L tokens, every token attending to L
sliding window    for every single token the L tokens before the next are computed anew, without a
                  memory and with sinusoidal-absolute positions (Vaswani et al. 2017), as Al-Rfou et
                  al. 2018 evaluate; of all_attention_lm, which has no such positions, itself
                  without a memory

Both score what they predict, and only that. The window is timed a few times, not once for each
token of a text. Weights are random, also with --checkpoint, which only gives the sizes: speed does
not depend on them. The published ratios are of another machine and another implementation, and of
a segment length and batch size that the paper does not give.

Writes evaluation_speed.json and evaluation_speed.png, and prints a table.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.utils import move_to_cuda
from tqdm import tqdm

from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from fairseq_plugins.segment_language_model.streams import RunningText, TokenStreams
from scripts._shared.command_line import (
    add_output_options,
    check_at_least,
    command_parser,
    exit_status,
    make_output_folder,
    parse_numbers,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line, synchronize
from scripts._shared.results import check_plotting, markdown_table, save_plot
from scripts._shared.scoring import choose_device, score_batch
from scripts.evaluate._untrained_models import (
    Sizes,
    build_sliding_window,
    build_state_reuse,
    check_reuse,
    sizes_of_arch,
    sizes_of_checkpoint,
)

# Table 9: how many times slower the model of Al-Rfou et al. 2018 is.
PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Setting(NamedTuple):
    """How models are timed: tokens of a segment, streams, timed segments and windows, where."""

    tokens_per_sample: int
    batch_size: int
    segments: int
    windows: int
    device: torch.device
    dtype: torch.dtype


def random_text(dictionary: Dictionary, length: int) -> np.ndarray:
    """Tokens of no meaning, (length,)."""
    generator = np.random.default_rng(1)
    return generator.integers(dictionary.nspecial, len(dictionary), length)


def time_batches(
    model: SegmentLanguageModel,
    batches: Iterable[dict[str, Any]],
    warm_up: int,
    device: torch.device,
    progress: tqdm,
) -> float:
    """Median time of scoring a batch in seconds, the first ``warm_up`` left out."""
    seconds = []
    for batch in batches:
        batch = move_to_cuda(batch, device=device)
        synchronize(device)
        started = time.perf_counter()
        score_batch(model, batch)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        progress.update()
    return statistics.median(seconds[warm_up:])


def time_state_reuse(
    sizes: Sizes, attention_length: int, setting: Setting, progress: tqdm
) -> float:
    """Seconds a token, with a memory that is full."""
    model, task = build_state_reuse(sizes, attention_length, setting.tokens_per_sample)
    model.to(setting.device, setting.dtype)
    warm_up = math.ceil(attention_length / setting.tokens_per_sample) + 1
    segments = warm_up + setting.segments
    length = segments * setting.tokens_per_sample * setting.batch_size
    text = RunningText(random_text(task.dictionary, length))
    epoch = task.get_batch_iterator(text, max_sentences=setting.batch_size)
    batches = epoch.next_epoch_itr(shuffle=False)
    seconds = time_batches(model, batches, warm_up, setting.device, progress)
    return seconds / (setting.tokens_per_sample * setting.batch_size)


def time_sliding_window(
    sizes: Sizes, attention_length: int, setting: Setting, progress: tqdm
) -> float:
    """Seconds a token, each the last of a full window."""
    model, task = build_sliding_window(sizes, attention_length)
    model.to(setting.device, setting.dtype)
    windows = (setting.windows + 1) * setting.batch_size
    text = random_text(task.dictionary, attention_length + windows)
    streams = TokenStreams(text, task.dictionary, 1, 1, attention_length - 1)
    batches = (
        streams.collater([streams[first + number] for number in range(setting.batch_size)])
        for first in range(attention_length, len(text), setting.batch_size)
    )
    return time_batches(model, batches, 1, setting.device, progress) / setting.batch_size


def measure(sizes: Sizes, attention_length: int, setting: Setting) -> dict[str, Any]:
    """Times of both at one attention length, in milliseconds a token."""
    segments = math.ceil(attention_length / setting.tokens_per_sample) + 1 + setting.segments
    with tqdm(
        total=segments + setting.windows + 1,
        desc=f"attention length {attention_length}",
        unit=" batches",
        leave=False,
        disable=None,
    ) as progress:
        reuse = time_state_reuse(sizes, attention_length, setting, progress)
        window = time_sliding_window(sizes, attention_length, setting, progress)
    return {
        "attention_length": attention_length,
        "state_reuse_ms_per_token": 1000 * reuse,
        "sliding_window_ms_per_token": 1000 * window,
        "ratio": window / reuse,
        "published_ratio": PUBLISHED.get(attention_length),
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """Table of the times in Markdown."""
    headers = ["attention length", "state reuse, ms/token", "sliding window, ms/token"]
    cells = [
        [
            str(row["attention_length"]),
            f"{row['state_reuse_ms_per_token']:.4g}",
            f"{row['sliding_window_ms_per_token']:.4g}",
            f"{row['ratio']:.0f}x",
            f"{row['published_ratio']}x" if row["published_ratio"] else "",
        ]
        for row in rows
    ]
    return markdown_table([*headers, "ratio", "published ratio"], cells)


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the ratio against the attention length, and the published one."""
    lengths = [row["attention_length"] for row in rows]
    axes.plot(lengths, [row["ratio"] for row in rows], marker="o", label="measured here")
    published = [row for row in rows if row["published_ratio"]]
    if published:
        axes.plot(
            [row["attention_length"] for row in published],
            [row["published_ratio"] for row in published],
            marker="x",
            linestyle="--",
            label="published (another machine)",
        )
    axes.set_xlabel("attention length (tokens)")
    axes.set_ylabel("times that the sliding window is slower")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def measure_evaluation_speed(arguments: argparse.Namespace) -> None:
    """Time both at each attention length; raises ValueError for what cannot be, before any work."""
    lengths = parse_numbers("--attention-lengths", arguments.attention_lengths, int, 1, math.inf)
    for option in ("tokens_per_sample", "batch_size", "segments", "windows", "symbols"):
        least = 5 if option == "symbols" else 1
        check_at_least(f"--{option.replace('_', '-')}", getattr(arguments, option), least)
    if arguments.checkpoint is not None:
        name, sizes = str(arguments.checkpoint), sizes_of_checkpoint(arguments.checkpoint.resolve())
    else:
        name, sizes = arguments.arch, sizes_of_arch(arguments.arch, arguments.symbols)
    check_reuse(sizes)
    check_plotting()
    make_output_folder(arguments.output)
    setting = Setting(
        arguments.tokens_per_sample,
        arguments.batch_size,
        arguments.segments,
        arguments.windows,
        choose_device(arguments.cpu),
        DTYPES[arguments.dtype],
    )
    conditions = {
        "model": name,
        "symbols": sizes.symbols,
        "hardware": hardware_line(setting.device),
        "dtype": arguments.dtype,
        "segment": setting.tokens_per_sample,
        "streams": setting.batch_size,
        "timed": f"median of {setting.segments} segments and of {setting.windows} windows; the "
        "sliding window's time for a text is extrapolated from these few",
    }
    for key, value in conditions.items():
        print(f"{key}: {value}")
    rows: list[dict[str, Any]] = []
    for length in lengths:
        rows.append(measure(sizes, length, setting))
        write_json(arguments.output / "evaluation_speed.json", {**conditions, "rows": rows})
    print(f"\n{format_table(rows)}\n")
    save_plot(arguments.output / "evaluation_speed.png", lambda axes: draw(axes, rows))
    print(f"written to {short(arguments.output.resolve())}/evaluation_speed.json and .png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--arch", help="a preset of this package")
    models.add_argument("--checkpoint", type=Path, help="a trained model, for its sizes")
    parser.add_argument(
        "--symbols", type=int, default=208, help="vocabulary of --arch, specials included (208)"
    )
    parser.add_argument(
        "--attention-lengths",
        default="800,1800,2800,3800",
        help="tokens that a token attends to (800,1800,2800,3800)",
    )
    parser.add_argument("--tokens-per-sample", type=int, default=128, help="segment length (128)")
    parser.add_argument(
        "--batch-size", type=int, default=1, help="streams, and windows at once (1)"
    )
    parser.add_argument("--segments", type=int, default=5, help="segments that are timed (5)")
    parser.add_argument("--windows", type=int, default=3, help="windows that are timed (3)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="number format (fp32)")
    add_output_options(parser, "evaluation_speed")
    parsed = parser.parse_args(arguments)
    return exit_status(
        lambda: measure_evaluation_speed(parsed),
        f"{short(parsed.output.resolve())}/evaluation_speed.json keeps the times so far",
    )


if __name__ == "__main__":
    sys.exit(main())
