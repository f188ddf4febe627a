"""What benchmarks compare: models in dtypes, what these read, and how.

Shapes: B streams, T tokens of a segment, M remembered tokens, V symbols, d model width.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.recurrence import Recurrence

DTYPES = FP32, BF16, AUTOCAST = ("fp32", "bf16", "bf16-autocast")
MODES = TRAIN, EVALUATE = ("train", "evaluate")


class Models(NamedTuple):
    """Names of the models of a benchmark: this package's, the plain one, the published code's."""

    ours: str
    plain: str
    original: str = "original"


class Entry(NamedTuple):
    """What a benchmark measures: one of its models in one of DTYPES."""

    model: str
    dtype: str


@dataclass(frozen=True)
class Setting:
    """What is read how: T tokens a segment, a memory of M, B streams; distances end at a clamp."""

    mode: str
    segment: int
    memory: int
    batch: int
    clamp: int | None = None

    @property
    def text(self) -> str:
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


class Case(NamedTuple):
    """A size of the models, as its option names it, in a setting."""

    size: str
    setting: Setting

    @property
    def text(self) -> str:
        """The case in words."""
        return f"{self.size}, {self.setting.mode} {self.setting.text}"


def choose_entries(models: Models, dtypes: list[str], original: bool) -> list[Entry]:
    """Who takes part, in turn.

    The published code is measured in fp32 and, beside bf16 of any kind, under autocast.
    """
    chosen = [Entry(model, dtype) for dtype in dtypes for model in (models.ours, models.plain)]
    if original:
        chosen.append(Entry(models.original, FP32))
        if dtypes != [FP32]:
            chosen.append(Entry(models.original, AUTOCAST))
    return chosen


@functools.lru_cache(maxsize=1)
def make_dictionary(symbols: int) -> Dictionary:
    """A dictionary of so many symbols, fairseq's special ones among them."""
    dictionary = Dictionary()
    for number in range(symbols - dictionary.nspecial):
        dictionary.add_symbol(str(number))
    return dictionary


def draw_tokens(dictionary: Dictionary, setting: Setting, generator: torch.Generator) -> Tensor:
    """A segment and the token after it, (B, T + 1), as frequent as Zipf's law has them."""
    first, symbols = dictionary.nspecial, len(dictionary)
    uniform = torch.rand(setting.batch, setting.segment + 1, generator=generator)
    return (first * (symbols / first) ** uniform).long().clamp_(max=symbols - 1)


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


class Reader(ABC):
    """A entry that reads streams segment by segment.

    Args:
        entry: which model, in which dtype.
        model: the model, in fp32.
        setting: how it reads.
        device: where it computes.
    """

    def __init__(
        self, entry: Entry, model: nn.Module, setting: Setting, device: torch.device
    ) -> None:
        self.entry, self.setting, self.device = entry, setting, device
        self.model = model.to(device).train(setting.training)
        if entry.dtype == BF16:
            self.model.bfloat16()

    @contextmanager
    def _precision(self) -> Iterator[None]:
        autocast = self.entry.dtype == AUTOCAST
        with (
            torch.set_grad_enabled(self.setting.training),
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast),
        ):
            yield

    def score(self, tokens: Tensor) -> Tensor:
        """Read tokens (B, T + 1) and return the losses (B, T) of all but the first.

        In training nothing is learned from them.
        """
        with self._precision():
            return self._losses(tokens).detach()

    def read(self, tokens: Tensor) -> None:
        """Read tokens (B, T + 1), in training with the gradient of all but the first one's loss."""
        with self._precision():
            loss = self._losses(tokens).mean()
        if self.setting.training:
            loss.backward()
            self.model.zero_grad(set_to_none=True)

    @abstractmethod
    def _losses(self, tokens: Tensor) -> Tensor:
        """Losses (B, T) of all tokens (B, T + 1) but the first."""


class PlainReader(Reader):
    """One of fairseq's own language models, without a memory."""

    def _losses(self, tokens: Tensor) -> Tensor:
        scores, _ = self.model(tokens[:, :-1])
        return token_losses(self.model.decoder, scores, tokens[:, 1:])


class MemoryReader(Reader):
    """A segment language model of this package, with a memory of its own."""

    def __init__(
        self, entry: Entry, model: nn.Module, setting: Setting, device: torch.device
    ) -> None:
        super().__init__(entry, model, setting, device)
        self.memory = Recurrence()
        self.start = 0

    def remember(self, past: Tensor) -> None:
        """Begin as if (B, M, d) had entered each of the layers."""
        decoder = self.model.decoder
        # one tensor for all layers: what is there before the clock starts is not to raise the peak
        states = [HiddenStates(past.to(next(decoder.parameters()).dtype))] * len(decoder.layers)
        self.memory.at(0).write(decoder, states, past.size(1), decoder.context.mem_len)
        self.start = past.size(1)

    def _losses(self, tokens: Tensor) -> Tensor:
        scores, _ = self.model(tokens[:, :-1], recurrence=self.memory.at(self.start))
        self.start += tokens.size(1) - 1
        return token_losses(self.model.decoder, scores, tokens[:, 1:])


class OriginalReader(Reader):
    """A published model, with a memory of its own."""

    def __init__(
        self, entry: Entry, model: nn.Module, setting: Setting, device: torch.device
    ) -> None:
        super().__init__(entry, model, setting, device)
        self.memory: list[Tensor] = []

    def remember(self, past: Tensor) -> None:
        """Begin as if (B, M, d) had entered each of the layers."""
        self.memory = self.model.memory_of(past)

    def _losses(self, tokens: Tensor) -> Tensor:
        losses, self.memory = self.model.losses(tokens, self.memory)
        return losses
