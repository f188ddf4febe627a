"""How the benchmarks of language models go on: what is read, by which model, and what it costs.

Shapes: B streams, T tokens of a segment, M remembered tokens, V symbols, d model width.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from scripts._shared.machine import peak_memory
from scripts.benchmark._benchmark import USUAL_RATE, Benchmark
from scripts.benchmark._report import AUTOCAST, BF16, FP32, Entry, Measurement

MODES = TRAIN, EVALUATE = ("train", "evaluate")
# Symbols of fairseq's own in any dictionary, before those of the text.
SPECIAL = Dictionary().nspecial


@dataclass(frozen=True)
class Case:
    """A size of the models, as its option names it, and what is read how.

    Args:
        size: preset or case.
        mode: one of MODES.
        segment: T.
        memory: M.
        batch: B.
        symbols: V.
        clamp: where distances end; None for nowhere.
    """

    size: str
    mode: str
    segment: int
    memory: int
    batch: int
    symbols: int
    clamp: int | None = None

    @property
    def setting(self) -> str:
        """Segment, memory, batch and, where there is one, clamp, with slashes between."""
        numbers = [self.segment, self.memory, self.batch, *([self.clamp] if self.clamp else [])]
        return "/".join(map(str, numbers))

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return self.mode == TRAIN

    @property
    def segments(self) -> int:
        """Segments that renew the memory once."""
        return max(1, math.ceil(self.memory / self.segment))

    def __str__(self) -> str:
        return f"{self.size}, {self.mode} {self.setting}"


@functools.lru_cache(maxsize=1)
def make_dictionary(symbols: int) -> Dictionary:
    """A dictionary of so many symbols, fairseq's special ones among them."""
    dictionary = Dictionary()
    for number in range(symbols - SPECIAL):
        dictionary.add_symbol(str(number))
    return dictionary


def draw_tokens(case: Case, generator: torch.Generator) -> Tensor:
    """A segment and the token after it, (B, T + 1), as frequent as Zipf's law has them."""
    uniform = torch.rand(case.batch, case.segment + 1, generator=generator)
    tokens = SPECIAL * (case.symbols / SPECIAL) ** uniform
    return tokens.long().clamp_(max=case.symbols - 1)


def token_losses(decoder: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    """Loss of each of the targets (B, T), as fairseq's criteria compute it."""
    flat = targets.flatten()
    softmax = decoder.adaptive_softmax
    if softmax is None:
        losses = F.cross_entropy(scores.flatten(0, 1).float(), flat, reduction="none")
        return losses.view_as(targets)
    (scores, *in_clusters), (first, *targets_in_clusters) = softmax(scores, flat)
    losses = F.cross_entropy(scores.float(), first, reduction="none")
    for cluster, (scores, chosen) in enumerate(zip(in_clusters, targets_in_clusters, strict=True)):
        if chosen is not None:
            where = first == softmax.cutoff[0] + cluster
            in_cluster = F.cross_entropy(scores.float(), chosen, reduction="none")
            losses = losses.masked_scatter(where, losses[where] + in_cluster)
    return losses.view_as(targets)


class PlainModel(nn.Module):
    """One of fairseq's own language models, without a memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def losses(self, tokens: Tensor, memory: None) -> tuple[Tensor, None]:
        """Return the loss of each token but the first, (B, T) of (B, T + 1), and no memory."""
        scores, _ = self.model(tokens[:, :-1])
        return token_losses(self.model.decoder, scores, tokens[:, 1:]), None


class MemoryModel(nn.Module):
    """A segment language model of this package; its memory is a Recurrence and the place in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def memory_of(self, past: Tensor) -> tuple[Recurrence, int]:
        """Memory as if (B, M, d) had entered each of the layers."""
        decoder, memory = self.model.decoder, Recurrence()
        # one tensor for all layers: what is there before the clock starts is not to raise the peak
        states = [HiddenStates(past.to(next(decoder.parameters()).dtype))] * len(decoder.layers)
        memory.at(0).write(decoder, states, past.size(1), decoder.context.mem_len)
        return memory, past.size(1)

    def losses(
        self, tokens: Tensor, memory: tuple[Recurrence, int] | None
    ) -> tuple[Tensor, tuple[Recurrence, int]]:
        """Return the loss of each token but the first, (B, T) of (B, T + 1), and the memory."""
        recurrence, start = memory or (Recurrence(), 0)
        scores, _ = self.model(tokens[:, :-1], recurrence=recurrence.at(start))
        losses = token_losses(self.model.decoder, scores, tokens[:, 1:])
        return losses, (recurrence, start + tokens.size(1) - 1)


class Reader:
    """An entry that reads streams segment by segment.

    Args:
        entry: which model, in which dtype.
        model: a PlainModel, MemoryModel or the like, in fp32.
        case: how it reads.
        device: where it computes.
    """

    def __init__(self, entry: Entry, model: nn.Module, case: Case, device: torch.device) -> None:
        self.entry, self.case, self.device = entry, case, device
        self.model = model.to(device).train(case.training)
        if entry.dtype == BF16:
            self.model.bfloat16()
        self.memory: Any = None

    @contextmanager
    def _precision(self) -> Iterator[None]:
        autocast = self.entry.dtype == AUTOCAST
        with (
            torch.set_grad_enabled(self.case.training),
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast),
        ):
            yield

    def remember(self, past: Tensor) -> None:
        """Begin as if (B, M, d) had entered each of the layers."""
        self.memory = self.model.memory_of(past)

    def score(self, tokens: Tensor) -> Tensor:
        """Read tokens (B, T + 1) and return the losses (B, T) of all but the first.

        In training nothing is learned from them.
        """
        with self._precision():
            losses, self.memory = self.model.losses(tokens, self.memory)
        return losses.detach()

    def read(self, tokens: Tensor) -> None:
        """Read tokens (B, T + 1), in training with the gradient of all but the first one's loss."""
        with self._precision():
            losses, self.memory = self.model.losses(tokens, self.memory)
            loss = losses.mean()
        if self.case.training:
            loss.backward()
            self.model.zero_grad(set_to_none=True)


class LanguageModelBenchmark(Benchmark):
    """A comparison of language models that read the same segments."""

    compared = "losses of a token, in nats,"
    tolerance = 2e-4

    @abstractmethod
    def build(self, case: Case, model: str, original: nn.Module | None) -> nn.Module:
        """A PlainModel or a MemoryModel; ours has the weights of an original."""

    @abstractmethod
    def build_original(self, case: Case) -> nn.Module:
        """The published model."""

    @abstractmethod
    def multiply_adds(self, case: Case, model: str) -> float:
        """Multiply-adds of the matrix products that a model needs for a segment."""

    def begin(self, case: Case, readers: list[Reader]) -> int:
        """Give the readers what they remember; returns how many segments then fill the memory."""
        return case.segments

    def segments(self, case: Case, model: str) -> int:
        """Segments that a model reads in a repeat: those that renew the memory once."""
        return case.segments

    def entries(self, case: Case) -> list[Entry]:
        """Who takes part: the published code in fp32 and, beside bf16 of any kind, autocast."""
        ours, plain, original = self.models
        chosen = [Entry(model, dtype) for dtype in self.dtypes for model in (ours, plain)]
        if self.original:
            dtypes = [FP32] if self.dtypes == [FP32] else [FP32, AUTOCAST]
            chosen += [Entry(original, dtype) for dtype in dtypes]
        return chosen

    def readers(self, case: Case, entries: list[Entry]) -> list[Reader]:
        """A reader of each of the entries, with the same weights where there is an original."""
        torch.manual_seed(1)
        original = self.build_original(case) if self.original_class else None
        # all weights are drawn before the first model moves to its device and dtype
        models = [
            original
            if entry.model == self.models.original
            else self.build(case, entry.model, original)
            for entry in entries
        ]
        return [
            Reader(entry, model, case, self.device)
            for entry, model in zip(entries, models, strict=True)
        ]

    def draw(self, case: Case, segments: int) -> list[Tensor]:
        """So many segments."""
        return [draw_tokens(case, self.generator).to(self.device) for _ in range(segments)]

    def differences(self, case: Case) -> dict[str, float]:
        """The largest difference of the original's loss of a token from ours in fp32."""
        if not self.original:
            return {}
        pair = [Entry(self.models.ours, FP32), Entry(self.models.original, FP32)]
        ours, original = readers = self.readers(case, pair)
        off = [
            (ours.score(tokens) - original.score(tokens)).abs().max()
            for tokens in self.draw(case, self.begin(case, readers) + 2)
        ]
        return {self.models.original: torch.stack(off).max().item()}

    def own_memory(self, case: Case, entry: Entry) -> dict[str, int]:
        """Bytes that an entry adds to this process."""
        before = peak_memory(self.device)
        if entry.model != self.models.original:
            self.original_class = None
        (reader,) = readers = self.readers(case, [entry])
        segments = self.begin(case, readers) + self.segments(case, entry.model) + 1
        for tokens in self.draw(case, segments):
            reader.read(tokens)
        return {"peak_bytes": peak_memory(self.device) - before}

    def measure(self, case: Case, memory: dict[Entry, dict[str, int]]) -> list[Measurement]:
        """Time the entries, which read the same segments in turn; the warm-up fills the memory."""
        entries = self.entries(case)
        readers = self.readers(case, entries)
        self.begin(case, readers)
        numbers = [self.segments(case, entry.model) for entry in entries]
        repeat: list[Tensor] = []

        def draw() -> None:
            repeat[:] = self.draw(case, max(numbers))

        def read(reader: Reader, number: int) -> None:
            for tokens in repeat[:number]:
                reader.read(tokens)

        work = []
        for entry, reader, number in zip(entries, readers, numbers, strict=True):
            multiply_adds = number * self.multiply_adds(case, entry.model)
            row = Measurement(
                case.size,
                case.mode,
                case.setting,
                *entry,
                tokens=number * case.segment * case.batch,
                floor_seconds=self.floor_seconds(multiply_adds, entry.dtype),
                **memory[entry],
            )
            work.append((row, functools.partial(read, reader, number)))
        return self.time(work, draw)

    def slowness(self, case: Case) -> float:
        """About how many times as long as ours the published code takes, for the duration alone."""
        return 3

    def repeat_seconds(self, case: Case) -> float:
        """About how long a repeat of all entries takes on two cores."""
        return sum(
            (self.slowness(case) if model == self.models.original else 1)
            * self.segments(case, model)
            * self.multiply_adds(case, model)
            / USUAL_RATE
            for model, _ in self.entries(case)
        )
