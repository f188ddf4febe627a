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
import dataclasses
import math
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
)
from fairseq.utils import move_to_cuda
from tqdm import tqdm

from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from fairseq_plugins.segment_language_model.streams import RunningText, TokenStreams
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from scripts._shared.checkpoints import load_checkpoint
from scripts._shared.command_line import (
    add_output_options,
    check_at_least,
    command_parser,
    exit_status,
    parse_numbers,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line, synchronize
from scripts._shared.results import markdown_table, prepare_results, save_results
from scripts.evaluate._scoring import choose_device, has_absolute_positions, score_batch

# Table 9: how many times slower the model of Al-Rfou et al. 2018 is.
PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Sizes(NamedTuple):
    """What to build models from: name, options and number of symbols of one."""

    model: str
    options: dict[str, Any]
    symbols: int


def sizes_of_arch(arch: str, symbols: int) -> Sizes:
    """Sizes of a preset with a vocabulary of ``symbols``.

    Raises ValueError when there is no such preset, or its cutoffs go beyond the vocabulary.
    """
    models = ARCH_MODEL_REGISTRY.items()
    known = sorted(name for name, model in models if issubclass(model, SegmentLanguageModel))
    if arch not in known:
        raise ValueError(f"--arch {arch} is none of this package: give one of {', '.join(known)}")
    preset = argparse.Namespace()
    ARCH_CONFIG_REGISTRY[arch](preset)
    options = vars(preset)
    cutoffs = options.get("adaptive_softmax_cutoff") or options.get("adaptive_input_cutoff")
    if cutoffs and int(cutoffs.split(",")[-1]) >= symbols:
        raise ValueError(
            f"--symbols is {symbols}: --arch {arch} has cutoffs {cutoffs}; give the number of "
            "symbols in dict.txt, specials included, such as 267744 for WikiText-103"
        )
    return Sizes(_model_of(arch), options, symbols)


def _model_of(arch: str) -> str:
    """Name of the model that a preset belongs to."""
    return next(model for model, archs in ARCH_MODEL_INV_REGISTRY.items() if arch in archs)


def sizes_of_checkpoint(checkpoint: Path) -> Sizes:
    """Sizes of a trained model; raises as load_checkpoint."""
    state = load_checkpoint(checkpoint)
    options = dict(state["cfg"]["model"])
    of_symbols = re.compile(r"decoder\.embed_tokens\.(embeddings\.\d+\.0\.)?weight")
    symbols = sum(
        len(weight) for name, weight in state["model"].items() if of_symbols.fullmatch(name)
    )
    return Sizes(_model_of(options["_name"]), options, symbols)


def check_reuse(sizes: Sizes) -> None:
    """Raise ValueError for a model that cannot reuse states."""
    if has_absolute_positions(sizes.options):
        raise ValueError(
            f"the model has --positions {sizes.options['positions']}, which go without a memory, "
            "so there is no state to reuse: give one with relative positions"
        )


def build(
    sizes: Sizes, tokens_per_sample: int, extended_context: int, **changes: Any
) -> tuple[SegmentLanguageModel, SegmentLanguageModelingTask]:
    """Model with random weights, some of its options changed, and its task over random text.

    Args:
        sizes: of the model.
        tokens_per_sample: tokens of a segment that are scored.
        extended_context: tokens before them that are read.
        **changes: options that differ from those of the sizes; unknown ones are left out.
    """
    dictionary = Dictionary()
    for number in range(sizes.symbols - len(dictionary)):
        dictionary.add_symbol(f"symbol{number}")
    segments = {"tokens_per_sample": tokens_per_sample, "extended_context": extended_context}
    task = SegmentLanguageModelingTask(
        SegmentLanguageModelingConfig(**segments, dataset_impl=None), dictionary
    )
    dataclass = MODEL_DATACLASS_REGISTRY[sizes.model]
    names = {field.name for field in dataclasses.fields(dataclass)}
    options = {**sizes.options, **changes, "checkpoint_activations": False, **segments}
    config = dataclass(**{name: options[name] for name in options if name in names})
    return ARCH_MODEL_REGISTRY[sizes.model].build_model(config, task).eval(), task


def build_state_reuse(
    sizes: Sizes, attention_length: int, tokens_per_sample: int
) -> tuple[SegmentLanguageModel, SegmentLanguageModelingTask]:
    """Model with a memory of ``attention_length`` tokens, and its task."""
    changes = {"mem_len": attention_length, "same_length": True, "attention_span": attention_length}
    return build(sizes, tokens_per_sample, 0, **changes)


def build_sliding_window(
    sizes: Sizes, attention_length: int
) -> tuple[SegmentLanguageModel, SegmentLanguageModelingTask]:
    """Model of the same sizes that reads ``attention_length`` tokens for each, and its task."""
    changes = {"mem_len": 0, "same_length": False, "clamp_len": None}
    if sizes.model == "transformer_xl":
        changes.update(positions="sinusoidal-absolute", untie_r=False)
    return build(sizes, 1, attention_length - 1, attention_span=attention_length, **changes)


class Setting(NamedTuple):
    """How models are timed: tokens of a segment, streams, timed segments and windows, where."""

    tokens_per_sample: int
    batch_size: int
    segments: int
    windows: int
    device: torch.device
    dtype: torch.dtype

    def warm_up(self, attention_length: int) -> int:
        """How many segments fill a memory, and one more."""
        return math.ceil(attention_length / self.tokens_per_sample) + 1


def random_text(dictionary: Dictionary, length: int) -> np.ndarray:
    """Tokens of no meaning, (length,)."""
    generator = np.random.default_rng(1)
    return generator.integers(dictionary.nspecial, len(dictionary), length)


def time_batches(
    model: SegmentLanguageModel,
    batches: Iterable[dict[str, Any]],
    warm_up: int,
    setting: Setting,
    progress: tqdm,
) -> float:
    """Median time of scoring a batch in seconds, the first ``warm_up`` left out."""
    model.to(setting.device, setting.dtype)
    seconds = []
    for batch in batches:
        batch = move_to_cuda(batch, device=setting.device)
        synchronize(setting.device)
        started = time.perf_counter()
        score_batch(model, batch)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - started)
        progress.update()
    return statistics.median(seconds[warm_up:])


def time_state_reuse(
    sizes: Sizes, attention_length: int, setting: Setting, progress: tqdm
) -> float:
    """Seconds a token, with a memory that is full."""
    model, task = build_state_reuse(sizes, attention_length, setting.tokens_per_sample)
    warm_up = setting.warm_up(attention_length)
    in_batch = setting.tokens_per_sample * setting.batch_size
    text = RunningText(random_text(task.dictionary, (warm_up + setting.segments) * in_batch))
    epoch = task.get_batch_iterator(text, max_sentences=setting.batch_size)
    batches = epoch.next_epoch_itr(shuffle=False)
    return time_batches(model, batches, warm_up, setting, progress) / in_batch


def time_sliding_window(
    sizes: Sizes, attention_length: int, setting: Setting, progress: tqdm
) -> float:
    """Seconds a token, each the last of a full window."""
    model, task = build_sliding_window(sizes, attention_length)
    windows = (setting.windows + 1) * setting.batch_size
    text = random_text(task.dictionary, attention_length + windows)
    streams = TokenStreams(text, task.dictionary, 1, 1, attention_length - 1)
    batches = (
        streams.collater([streams[first + number] for number in range(setting.batch_size)])
        for first in range(attention_length, len(text), setting.batch_size)
    )
    return time_batches(model, batches, 1, setting, progress) / setting.batch_size


def measure(sizes: Sizes, attention_length: int, setting: Setting) -> dict[str, Any]:
    """Times of both at one attention length, in milliseconds a token."""
    segments = setting.warm_up(attention_length) + setting.segments
    bar = {"desc": f"attention length {attention_length}", "unit": " batches", "leave": False}
    with tqdm(total=segments + setting.windows + 1, disable=None, **bar) as progress:
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
            *(row["attention_length"], f"{row['state_reuse_ms_per_token']:.4g}"),
            *(f"{row['sliding_window_ms_per_token']:.4g}", f"{row['ratio']:.0f}x"),
            f"{row['published_ratio']}x" if row["published_ratio"] else "",
        ]
        for row in rows
    ]
    return markdown_table([*headers, "ratio", "published ratio"], cells)


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the ratio against the attention length, and the published one."""
    lengths = [row["attention_length"] for row in rows]
    axes.plot(lengths, [row["ratio"] for row in rows], marker="o", label="measured here")
    if published := {length: PUBLISHED[length] for length in lengths if length in PUBLISHED}:
        label = "published (another machine)"
        axes.plot(published.keys(), published.values(), marker="x", linestyle="--", label=label)
    axes.set_xlabel("attention length (tokens)")
    axes.set_ylabel("times that the sliding window is slower")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def measure_evaluation_speed(arguments: argparse.Namespace) -> None:
    """Time both at each attention length; raises ValueError for what cannot be, before any work."""
    lengths = parse_numbers("--attention-lengths", arguments.attention_lengths, int, 1, math.inf)
    counts = "tokens_per_sample", "batch_size", "segments", "windows"
    check_at_least(1, **{name: getattr(arguments, name) for name in counts})
    check_at_least(5, symbols=arguments.symbols)
    if arguments.checkpoint is not None:
        name, sizes = str(arguments.checkpoint), sizes_of_checkpoint(arguments.checkpoint.resolve())
    else:
        name, sizes = arguments.arch, sizes_of_arch(arguments.arch, arguments.symbols)
    check_reuse(sizes)
    prepare_results(arguments.output)
    where = choose_device(arguments.cpu), DTYPES[arguments.dtype]
    setting = Setting(*(getattr(arguments, name) for name in counts), *where)
    result: dict[str, Any] = {
        "model": name,
        "symbols": sizes.symbols,
        "hardware": hardware_line(setting.device),
        "dtype": arguments.dtype,
        "segment": setting.tokens_per_sample,
        "streams": setting.batch_size,
        "timed": f"median of {setting.segments} segments and of {setting.windows} windows; the "
        "sliding window's time for a text is extrapolated from these few",
    }
    for key, value in result.items():
        print(f"{key}: {value}")
    rows = result["rows"] = []
    for length in lengths:
        rows.append(measure(sizes, length, setting))
        write_json(arguments.output / "evaluation_speed.json", result)
    told = f"\n{format_table(rows)}\n"
    save_results(arguments.output, "evaluation_speed", result, told, lambda axes: draw(axes, rows))


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--arch", help="a preset of this package")
    models.add_argument("--checkpoint", type=Path, help="a trained model, for its sizes")
    lengths = "800,1800,2800,3800"
    add("--symbols", type=int, default=208, help="vocabulary of --arch, with specials (208)")
    add("--attention-lengths", default=lengths, help=f"tokens that a token attends to ({lengths})")
    add("--tokens-per-sample", type=int, default=128, help="segment length (128)")
    add("--batch-size", type=int, default=1, help="streams, and windows at once (1)")
    add("--segments", type=int, default=5, help="segments that are timed (5)")
    add("--windows", type=int, default=3, help="windows that are timed (3)")
    add("--dtype", choices=DTYPES, default="fp32", help="number format (fp32)")
    add_output_options(parser, "evaluation_speed")
    parsed = parser.parse_args(arguments)
    kept = f"{short(parsed.output.resolve())}/evaluation_speed.json keeps the times so far"
    return exit_status(lambda: measure_evaluation_speed(parsed), kept, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
