"""The table of cases, and the memory of each entry, measured in a separate process."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.kernels import AttentionCase, SearchCase
from benchmarks.language_models import (
    AllAttentionCase,
    TransformerXLCase,
    all_attention,
    transformer_xl,
)
from benchmarks.machine import peak_memory
from benchmarks.measure import EVALUATION, PUBLISHED, TRAINING, Case, Entry
from benchmarks.product_key_memory import MemoryCase
from benchmarks.published import import_published
from benchmarks.weighted_transformer import TranslationCase

PAPERS = (
    *("transformer_xl", "all_attention", "product_key_memory", "weighted_transformer"),
    "kernels",
)
# glibc gives back at once what is freed; by default it keeps up to a third of the peak
MEASURED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def all_cases(on_gpu: bool) -> list[Case]:
    """What is measured; a GPU has more streams at once."""
    streams = 16 if on_gpu else 2
    span = {"spans": 0.05, "title": "all-attention with adaptive span, 18 layers"}
    small = all_attention(18, 512, 8, vectors=1024, span=8192, segment=512)
    tiny = all_attention(6, 256, 4, vectors=512, span=1024, segment=128)
    title = "Transformer-XL, 12 layers"
    trained, read = transformer_xl(512, 512), transformer_xl(80, 2100, clamp=820)
    return [
        TransformerXLCase("enwik8_base, 512/512", TRAINING, trained, 512, streams, title=title),
        TransformerXLCase("enwik8_base, 80/2100/820", EVALUATION, read, 2100, 1, 27, title=title),
        AllAttentionCase("small", TRAINING, small, 442, streams // 2, **span),
        AllAttentionCase("small", EVALUATION, small, 442, 1, **span),
        AllAttentionCase("tiny", TRAINING, tiny, 135, 4 * streams, spans=0.1),
        AllAttentionCase("tiny", EVALUATION, tiny, 135, 8, 2, spans=0.1),
        *(
            MemoryCase(slots, mode, title="product-key memory, 65k slots" * (slots == 256**2))
            for slots in (128**2, 256**2, 512**2)
            for mode in (TRAINING, EVALUATION)
        ),
        MemoryCase(256**2, TRAINING, heads=1, tokens=512),
        MemoryCase(256**2, TRAINING, heads=8, knn=8, tokens=4096),
        *(
            TranslationCase(size, mode, sentences, f"Weighted Transformer, {size} size")
            for size in ("base", "small")
            # beam search takes as long for a quarter of the sentences
            for mode, sentences in ((TRAINING, 128), (EVALUATION, 32))
        ),
        AttentionCase(streams, 512, 1024, compiled=on_gpu),
        SearchCase(512**2, 2048),
    ]


def quick_cases() -> list[Case]:
    """Small ones, which show that all is there; their figures say little."""
    trained = transformer_xl(64, 64, decoder_layers=2)
    read = transformer_xl(32, 64, clamp=32, decoder_layers=2)
    size = all_attention(2, 128, 4, vectors=128, span=256, segment=64)
    span = {"spans": 0.1, "title": "all-attention, 2 layers"}
    title = "Transformer-XL, 2 layers"
    return [
        TransformerXLCase("2 layers, 64/64", TRAINING, trained, 64, 2, title=title),
        TransformerXLCase("2 layers, 32/64/32", EVALUATION, read, 64, 1, 2, title=title),
        AllAttentionCase("2 layers", TRAINING, size, 58, 2, **span),
        AllAttentionCase("2 layers", EVALUATION, size, 58, 1, **span),
        *(
            MemoryCase(64**2, mode, tokens=256, title="product-key memory, 4k slots")
            for mode in (TRAINING, EVALUATION)
        ),
        *(
            TranslationCase("small", mode, 4, "Weighted Transformer, small size")
            for mode in (TRAINING, EVALUATION)
        ),
        AttentionCase(1, 64, 128),
        SearchCase(64**2, 256),
    ]


class Selection(NamedTuple):
    """What a command line asks for.

    Args:
        papers: some of :data:`PAPERS`; [] for all.
        quick: whether small cases are measured.
        device: where they compute.
        threads: of the CPU.
        originals: checkouts of published code.
    """

    papers: Sequence[str]
    quick: bool
    device: torch.device
    threads: int
    originals: Sequence[Path]

    def cases(self) -> list[Case]:
        """The cases that are measured."""
        cases = quick_cases() if self.quick else all_cases(self.device.type == "cuda")
        return [case for case in cases if case.paper in (self.papers or PAPERS)]

    def own_memory(self, case: Case, entry: Entry) -> int:
        """The most bytes that an entry adds to a separate process."""
        names = [str(case) for case in self.cases()]
        # one server forks them all, which has imported this module
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        os.environ.update(MEASURED_MEMORY)
        with ProcessPoolExecutor(1, context) as process:
            return process.submit(_added_memory, self, names.index(str(case)), entry).result()


def _added_memory(selection: Selection, number: int, entry: Entry) -> int:
    """Bytes that building an entry and two turns of it add to this process at most."""
    torch.set_num_threads(selection.threads)
    # importing them lets every message of every library through
    logging.getLogger().setLevel(logging.WARNING)
    published = {}
    if entry.model.startswith(PUBLISHED):
        published = import_published(selection.originals)
    before = peak_memory(selection.device)
    case = selection.cases()[number]
    (work,) = case.build([entry], selection.device, published)
    for _ in range(2):
        work.turn()
    return peak_memory(selection.device) - before
