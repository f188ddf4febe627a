"""Shared by all models from Python: losses of tokens, their units, and binarized splits.

Shapes: B texts or streams, T tokens, N tokens of a text or split, d model width.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.utils import move_to_cuda
from torch import Tensor
from tqdm import tqdm

from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.units import BITS

logger = logging.getLogger(__name__)
# how many log-probabilities are computed at once: a large vocabulary takes much memory
LOG_PROBABILITIES = 2**26


def in_unit(nats: float, unit: str) -> float:
    """Return a mean loss in nats as bits per character or as perplexity."""
    return float(nats / np.log(2) if unit == BITS else np.exp(nats))


@dataclass(frozen=True)
class Score:
    """A model's score of each token of a text; the sum of pieces is the score of the whole text.

    ``log_probs`` (N,) are in nats, fp32; ``unit`` is the unit of :attr:`loss`.
    """

    tokens: list[str]
    log_probs: np.ndarray
    unit: str

    @property
    def nats(self) -> float:
        """Return the mean loss of a token in nats."""
        return -float(np.mean(self.log_probs, dtype=np.float64))

    @property
    def loss(self) -> float:
        """Return the mean loss in :attr:`unit`."""
        return in_unit(self.nats, self.unit)

    def __len__(self) -> int:
        return len(self.tokens)

    def __add__(self, other: Score) -> Score:
        log_probs = np.concatenate([self.log_probs, other.log_probs])
        return Score(self.tokens + other.tokens, log_probs, self.unit)

    def __str__(self) -> str:
        digits = 4 if self.unit == BITS else 2
        return f"{self.loss:.{digits}f} {self.unit}, {len(self):,} tokens"


def check_at_least(minimum: int, **values: int | None) -> None:
    """Refuse arguments that are no integers of at least ``minimum``."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Integral) and value >= minimum):
            raise ValueError(f"{name} is {value!r}: it must be an integer of at least {minimum}")


@torch.no_grad()
def score_features(
    model: BaseFairseqModel, features: Tensor, target: Tensor, scored: Tensor
) -> Tensor:
    """Return the losses in nats of the tokens of ``target`` (B, T) that are ``scored``.

    ``features`` (B, T, d) are the last layer's output.
    """
    features, target = features[scored], target[scored]
    piece = max(1, LOG_PROBABILITIES // len(model.decoder.dictionary))
    losses = [torch.empty(0, device=features.device)]
    for some, their_target in zip(features.split(piece), target.split(piece), strict=True):
        output = model.decoder.output_layer(some.unsqueeze(0))
        sample = {"target": their_target.unsqueeze(0)}
        log_probs = model.get_normalized_probs((output, None), log_probs=True, sample=sample)
        losses.append(-log_probs.gather(-1, sample["target"].unsqueeze(-1)).view(-1).float())
    losses = torch.cat(losses)
    if not losses.isfinite().all():
        raise FloatingPointError(
            "the loss of a token is not finite: the training of this checkpoint diverged; use an "
            "earlier checkpoint, or give the model more precision"
        )
    return losses


class Hypothesis(NamedTuple):
    """A continuation or translation that fairseq's generator found.

    ``score`` is the sum of ``log_probs``, divided by the number of symbols to the power of the
    length penalty. The last of ``log_probs`` belongs to the final ``</s>``, which counts as a
    symbol; in running text, which its length ends, it is 0 and does not count.
    """

    text: str
    score: float
    tokens: list[str]
    log_probs: np.ndarray


class LoadedModel(ABC):
    """A trained model, ready for inference, and fairseq's task, which has the dictionaries."""

    def __init__(self, model: BaseFairseqModel, task: FairseqTask) -> None:
        self.model = model
        self.task = task

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return next(self.model.parameters()).device

    def to(self, *args: Any, **kwargs: Any) -> LoadedModel:
        """Move or cast the model, as ``torch.nn.Module.to`` does."""
        self.model.to(*args, **kwargs)
        return self

    def score_split(
        self,
        split: str = "test",
        *,
        before_batch: Callable[[dict[str, Any], Tensor], None] | None = None,
        description: str = "scoring",
        **options: Any,
    ) -> np.ndarray:
        """Return the losses in nats of a binarized split's tokens in order, (N,) in fp32.

        ``before_batch`` gets each batch and a mask of the targets (B, T) that are scored. All
        models take ``batch_size``, language models also ``tokens_per_sample``,
        ``extended_context`` and ``max_tokens``.
        """
        size, batches, position = self._read_split(split, **options)
        positions: list[int] = []
        counts, losses = [], []
        with tqdm(total=size, desc=description, unit=" tokens", leave=False, disable=None) as bar:
            for rows, row_counts, batch_losses in self._losses(batches, before_batch):
                positions += map(position, rows)
                counts += row_counts
                losses.append(batch_losses)
                bar.update(len(batch_losses))
        if sum(counts) != size:
            raise ValueError(
                f"{sum(counts):,} tokens were scored of the {size:,} of the split {split}, "
                "so the figures would be wrong: fairseq leaves out sentences that are longer than "
                "the model's positions; remove them from the split"
            )
        order = np.argsort(np.repeat(positions, counts), kind="stable")
        return np.concatenate(losses)[order]

    @abstractmethod
    def _read_split(
        self, split: str, **options: Any
    ) -> tuple[int, Iterable[dict[str, Any]], Callable[[int], int]]:
        """Return a split's number of tokens, its batches, and where each row stands."""

    @torch.no_grad()
    def _losses(
        self,
        batches: Iterable[dict[str, Any]],
        before_batch: Callable[[dict[str, Any], Tensor], None] | None = None,
    ) -> Iterator[tuple[list[int], list[int], np.ndarray]]:
        """Yield the numbers of each batch's rows, the rows' token counts, and the tokens' losses.

        For ``before_batch`` see :meth:`score_split`.
        """
        for batch in batches:
            batch = move_to_cuda(batch, device=self.device)
            scored = batch["target"].ne(self.task.target_dictionary.pad())
            if before_batch is not None:
                before_batch(batch, scored)
            net_input = batch["net_input"]
            if "pasts" in net_input:
                features = self.model.read_segment(
                    net_input["src_tokens"], net_input["pasts"], net_input["start"]
                )
            else:
                features, _ = self.model(**net_input, features_only=True)
            losses = score_features(self.model, features, batch["target"], scored)
            yield batch["id"].tolist(), scored.sum(1).tolist(), losses.cpu().numpy()

    @staticmethod
    def _hypotheses(text: TextCoder, candidates: list[dict[str, Any]]) -> list[Hypothesis]:
        """Return what fairseq's generator found for one text, in its order."""
        hypotheses = []
        for one in candidates:
            # the last token is the end
            tokens, log_probs = one["tokens"][:-1].cpu(), one["positional_scores"].float().cpu()
            score, symbols = float(one["score"]), text.symbols(tokens)
            hypotheses.append(Hypothesis(text.decode(tokens), score, symbols, log_probs.numpy()))
        return hypotheses

    def __getstate__(self) -> dict[str, Any]:
        """Leave the data and the state of fairseq's task, which cannot be copied, out of copies."""
        task = copy.copy(self.task)
        task.state = SimpleNamespace()
        task.datasets, task.dataset_to_epoch_iter = {}, {}
        return {**self.__dict__, "task": task}
