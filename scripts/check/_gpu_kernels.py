"""The attention kernels beside each other, and this package's models beside the published code."""

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.segment_language_model.attention import plain_attention
from fairseq_plugins.segment_language_model.attention_blocks import (
    Window,
    hidden_by_window,
    rel_shift,
)
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from scripts._shared.machine import peak_memory, reset_peak_memory, seconds_of
from scripts.benchmark._benchmark import Benchmark
from scripts.benchmark._original import ALL_ATTENTION, MEMORY, TRANSFORMER_XL, Checkout
from scripts.benchmark._report import Entry
from scripts.benchmark.all_attention import AllAttentionBenchmark
from scripts.benchmark.product_key_memory import MemoryBenchmark
from scripts.benchmark.transformer_xl import TransformerXLBenchmark
from scripts.check._gpu_models import BF16, FP16, FP32
from scripts.check._gpu_training import Found, Place

REPEATS, WARM = 5, 2
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}


class Shape(NamedTuple):
    """Sizes of an attention: H, B, T, S, d_h."""

    heads: int
    streams: int
    queries: int
    keys: int
    width: int


# A segment and as much memory, as transformer_xl_enwik8_base trains with.
SHAPES = {"cuda": Shape(8, 16, 512, 1024, 64), "cpu": Shape(2, 1, 64, 128, 16)}


def dense_bias_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rel_keys: Tensor,
    window: Window,
    position_query: Tensor,
) -> tuple[Tensor, None]:
    """Compute ``plain_attention`` by scaled_dot_product_attention with a bias for each score."""
    by_distance = position_query @ rel_keys.unsqueeze(1).mT
    # (H, B, T, S + 1) -> (H, B, T, S)
    bias = rel_shift(by_distance, keys.size(2))
    queries, keys_ = query.size(2), keys.size(2)
    hidden = hidden_by_window(keys_ - queries, queries, keys_, window, query)
    bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
    return attended, None


def compiled_attention(*inputs: Tensor | Window, position_query: Tensor) -> tuple[Tensor, None]:
    """Compute ``plain_attention`` under torch.compile."""
    return _compiled()(*inputs, position_query=position_query)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, None]]:
    return torch.compile(plain_attention)


KERNELS = {
    "fast": window_attention,
    "plain": plain_attention,
    "dense bias": dense_bias_attention,
}
COMPILED = {"compiled": compiled_attention}


def compare_kernels(
    kernels: dict[str, Callable[..., tuple]], precision: str, place: Place
) -> list[Callable[[], Found]]:
    """A step for each kernel: milliseconds of a forward and a backward pass, and how far it is off.

    The latter is the largest difference of an output or a gradient from the plain kernel in fp32,
    as a part of the largest number there.
    """
    shape, device = SHAPES[place.device.type], place.device
    heads, streams, queries, keys, width = shape

    @functools.cache
    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        sizes = [(streams, queries), (streams, keys), (streams, keys), (keys + 1,)]
        sizes += [(streams, queries), (streams, queries)]
        drawn = [torch.randn(heads, *size, width, generator=generator) for size in sizes]
        # queries are divided by √d_h
        drawn[0] /= width**0.5
        drawn[4] /= width**0.5
        return [x.to(device, DTYPES[precision]) for x in drawn]

    def results(kernel: Callable[..., tuple], given: list[Tensor]) -> list[Tensor]:
        *leaves, grad = (x.detach() for x in given)
        for leaf in leaves:
            leaf.requires_grad_()
        query, key, value, rel_keys, position_query = leaves
        window = Window(0, keys - queries)
        attended, _ = kernel(query, key, value, rel_keys, window, position_query=position_query)
        return [attended.detach(), *torch.autograd.grad(attended, leaves, grad)]

    def step(name: str, kernel: Callable[..., tuple]) -> Found:
        found = results(kernel, inputs())
        exact = results(plain_attention, [x.float() for x in inputs()])
        pairs = zip(found, exact, strict=True)
        # not of Python, whose max() leaves out what is not a number
        off = torch.stack([(a.float() - b).abs().max() / b.abs().max() for a, b in pairs]).max()
        difference = off.item()
        del found, exact, pairs
        for _ in range(WARM):
            results(kernel, inputs())
        reset_peak_memory(device)
        seconds = [seconds_of(lambda: results(kernel, inputs())) for _ in range(REPEATS)]
        milliseconds = 1000 * statistics.median(seconds)
        peak = peak_memory(device)
        return {name: {"milliseconds": milliseconds, "peak_bytes": peak, "difference": difference}}

    return [functools.partial(step, name, kernel) for name, kernel in kernels.items()]


class Published(NamedTuple):
    """How a model is measured beside the published code, by a benchmark of this repository.

    Args:
        checkout: where its class is.
        benchmark: that compares the two.
        options: of the benchmark, on a GPU and on a CPU.
    """

    checkout: Checkout
    benchmark: type[Benchmark]
    options: dict[str, str]


PUBLISHED = {
    "transformer_xl": Published(
        TRANSFORMER_XL,
        TransformerXLBenchmark,
        {
            "cuda": "--train 512/512/16 --evaluate 512/512/16",
            "cpu": "--size transformer_xl_tiny --train 64/64/2 --evaluate 64/64/2",
        },
    ),
    "all_attention_lm": Published(
        ALL_ATTENTION, AllAttentionBenchmark, {"cuda": "--case small", "cpu": "--case tiny"}
    ),
    "pkm_transformer_lm": Published(
        MEMORY,
        MemoryBenchmark,
        {
            "cuda": "--slots 262144 --heads 4 --tokens 8192 --mode train inference",
            "cpu": "--slots 1024 --heads 2 --knn 8 --tokens 64 --mode train inference",
        },
    ),
}


def find_published(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    """Names in PUBLISHED of what checkouts hold, and where.

    Raises ValueError for a folder that holds none of them.
    """
    for path in paths:
        refusals = []
        for name, published in PUBLISHED.items():
            try:
                published.checkout.find(path)
            except ValueError as error:
                refusals.append(error)
            else:
                yield name, path
        if len(refusals) == len(PUBLISHED):
            urls = ", ".join(published.checkout.url for published in PUBLISHED.values())
            raise ValueError(f"--original is {path}: give folders of checkouts of {urls}")


def beside_published(name: str, path: Path, place: Place) -> list[Callable[[], Found]]:
    """One step: a benchmark's figures, after it has seen that losses or outputs agree."""
    published, device = PUBLISHED[name], place.device
    dtypes = "fp32 bf16 bf16-autocast" if device.type == "cuda" else "fp32"
    words = [*published.options[device.type].split(), "--dtype", *dtypes.split(), "--steps", "3"]
    words += ["--device", str(device), "--original", str(path)]

    def step() -> Found:
        benchmark = published.benchmark(published.benchmark.parse_options(words))

        def memory_of(number: int, entry: Entry) -> dict[str, int]:
            reset_peak_memory(device)
            # it builds no published model where ours alone is measured
            with mock.patch.object(benchmark, "original_class", benchmark.original_class):
                return benchmark.own_memory(benchmark.cases[number], entry)

        # the benchmark's own takes another process for each
        with mock.patch.object(benchmark, "memory_of", memory_of):
            rows, circumstances = benchmark.run()
        kept = ("size", "mode", "setting", "model", "dtype", "peak_bytes")
        measured = [
            {**{name: getattr(row, name) for name in kept}, "tokens_per_second": row.rate()}
            for row in rows
        ]
        return {"published": measured, "differences": circumstances["largest_difference_fp32"]}

    return [step]
