"""The table of cases, and the memory of each model, measured in a separate process."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.kernels import attention_case, keys_case, search_case
from benchmarks.language_models import Reading, all_attention_case, transformer_xl_case
from benchmarks.measure import EVALUATION, MODES, PUBLISHED, TRAINING, Case, Setting, peak_memory
from benchmarks.product_key_memory import inference_case, memory_case
from benchmarks.published import import_published
from benchmarks.weighted_transformer import translation_case

PAPERS = (
    *("transformer_xl", "all_attention", "product_key_memory", "weighted_transformer"),
    "kernels",
)
# makes glibc return freed memory at once; by default it keeps up to a third of the peak
MEASURED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def all_cases(on_gpu: bool, published: Mapping[str, type[nn.Module]]) -> list[Case]:
    """Return all cases, with more streams on a GPU."""
    streams = 16 if on_gpu else 2
    titles = "Transformer-XL, 12 layers", "all-attention with adaptive span, 18 layers"
    small, tiny = (18, 512, 8, 1024, 8192, 512), (6, 256, 4, 512, 1024, 128)
    xl, spans, memory = map(published.get, PAPERS[:3])
    training = Reading("enwik8_base, 512/512", TRAINING, 512, streams, title=titles[0])
    evaluation = Reading("enwik8_base, 80/2100/820", EVALUATION, 2100, 1, 27, titles[0])
    small_readings = [
        Reading("small", mode, 442, count, title=titles[1])
        for mode, count in zip(MODES, (streams // 2, 1), strict=True)
    ]
    tiny_readings = (
        Reading("tiny", TRAINING, 135, 4 * streams),
        Reading("tiny", EVALUATION, 135, 8, 2),
    )
    return [
        transformer_xl_case(training, xl, 512),
        transformer_xl_case(evaluation, xl, 80, clamp=820),
        *(all_attention_case(reading, spans, small, 0.05) for reading in small_readings),
        *(all_attention_case(reading, spans, tiny, 0.1) for reading in tiny_readings),
        *(
            memory_case(
                slots, mode, memory, title="product-key memory, 65k slots" * (slots == 2**16)
            )
            for slots in (128**2, 256**2, 512**2)
            for mode in MODES
        ),
        memory_case(256**2, TRAINING, memory, heads=1, tokens=512),
        memory_case(256**2, TRAINING, memory, heads=8, knn=8, tokens=4096),
        *(
            inference_case(24, width, texts, generated, length)
            for width in (1024, 1600)
            for texts in (1, 8)
            for generated, length in ((False, 256), (True, 32))
        ),
        *(
            translation_case(size, mode, sentences, f"Weighted Transformer, {size} size")
            for size in ("base", "small")
            # beam search takes as long for a quarter of the sentences
            for mode, sentences in zip(MODES, (128, 32), strict=True)
        ),
        attention_case(streams, 512, 1024),
        search_case(512**2, 2048),
        *(keys_case(slots, 512) for slots in (128**2, 384**2)),
    ]


def quick_cases(published: Mapping[str, type[nn.Module]]) -> list[Case]:
    """Return small cases, which show that every model runs; their results say little."""
    xl, spans, memory = map(published.get, PAPERS[:3])
    titles = "Transformer-XL, 2 layers", "all-attention, 2 layers"
    training = Reading("2 layers, 64/64", TRAINING, 64, 2, title=titles[0])
    evaluation = Reading("2 layers, 32/64/32", EVALUATION, 64, 1, 2, titles[0])
    readings = (
        Reading("2 layers", mode, 58, streams, title=titles[1])
        for mode, streams in zip(MODES, (2, 1), strict=True)
    )
    title = "product-key memory, 4k slots"
    return [
        transformer_xl_case(training, xl, 64, decoder_layers=2),
        transformer_xl_case(evaluation, xl, 32, clamp=32, decoder_layers=2),
        *(
            all_attention_case(reading, spans, (2, 128, 4, 128, 256, 64), 0.1)
            for reading in readings
        ),
        *(memory_case(64**2, mode, memory, tokens=256, title=title) for mode in MODES),
        *(inference_case(4, 128, 2, generated, 16, 100, 64**2) for generated in (False, True)),
        *(translation_case("small", mode, 4, "Weighted Transformer, small size") for mode in MODES),
        attention_case(1, 64, 128),
        search_case(64**2, 256),
        keys_case(64**2, 64),
    ]


def first_cases(published: Mapping[str, type[nn.Module]]) -> list[Case]:
    """Return the cases for the first minutes on a GPU: each paper's usual size, per kernel."""
    xl, spans, memory = map(published.get, PAPERS[:3])
    cases = []
    for mode, streams in zip(MODES, (16, 16), strict=True):
        reading = Reading("enwik8_base, 512/512", mode, 512, streams)
        cases.append(transformer_xl_case(reading, xl, 512, kernels=["plain"]))
    cases += [
        all_attention_case(
            Reading("small", mode, 442, 16), spans, (18, 512, 8, 1024, 8192, 512), 0.05
        )
        for mode in MODES
    ]
    cases += [memory_case(512**2, mode, memory) for mode in MODES]
    cases += [translation_case("base", mode, 128, "") for mode in MODES]
    return [attention_case(16, 512, 1024), *cases]


class Selection(NamedTuple):
    """The cases that a command line asks for.

    Args:
        papers: some of :data:`PAPERS`; [] for all.
        quick: whether to measure small cases.
        device: device of the models.
        threads: number of CPU threads.
        originals: checkouts of published code.
        first: whether to measure the cases for the first minutes on a GPU.
    """

    papers: Sequence[str]
    quick: bool
    device: torch.device
    threads: int
    originals: Sequence[Path]
    first: bool = False

    def cases(self, with_published: bool = True) -> dict[str, Case]:
        """Return the cases to measure by their text."""
        published = import_published(self.originals) if with_published else {}
        if self.quick:
            cases = quick_cases(published)
        elif self.first:
            cases = first_cases(published)
        else:
            cases = all_cases(self.device.type == "cuda", published)
        return {str(case): case for case in cases if case.paper in (self.papers or PAPERS)}

    def measure_memory(self, case: Case, model: str, dtype: str) -> int:
        """Return the peak of the bytes that a model adds: on a GPU, or to a separate process."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return _added_memory(self, str(case), model, dtype)
        # all processes are forked from one server, which has imported this module
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        os.environ.update(MEASURED_MEMORY)
        with ProcessPoolExecutor(1, context) as process:
            return process.submit(_added_memory, self, str(case), model, dtype).result()


def _added_memory(selection: Selection, case: str, model: str, dtype: str) -> int:
    """Return the peak of the bytes that building a model and two turns add to this process."""
    torch.set_num_threads(selection.threads)
    # importing fairseq lets the messages of all libraries through
    logging.getLogger().setLevel(logging.WARNING)
    # otherwise our model would build the published one too, for its weights
    cases = selection.cases(with_published=model.startswith(PUBLISHED))
    before = peak_memory(selection.device)
    work = cases[case].build(model, Setting(selection.device, dtype))
    for _ in range(2):
        work.turn()
    return peak_memory(selection.device) - before
