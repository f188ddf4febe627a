"""The loss of each token under a trained model, and the units in which it is given.

Shapes: B texts or streams, T tokens, N tokens of a text or split, d model width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.utils import move_to_cuda
from torch import Tensor
from tqdm import tqdm

from fairseq_plugins.segment_language_model.evaluation import BITS

logger = logging.getLogger(__name__)
# Log-probabilities that are computed at once: those of a large vocabulary outweigh all else.
_LOG_PROBABILITIES = 2**26
# The share of <unk> in a text above which its figure says little: <unk> is easy to predict.
_MOST_UNKNOWN = 0.01


def in_unit(nats: float, unit: str) -> float:
    """Return a mean loss in nats a token as bits per character, or as the perplexity of a token."""
    return float(nats / np.log(2) if unit == BITS else np.exp(nats))


@dataclass(frozen=True)
class Score:
    """What a model says of a text, token by token; scores of pieces add up to that of the whole.

    Args:
        tokens: the symbols, ``</s>`` where the text has a newline.
        log_probs: log-probability of each in nats, float32 (N,).
        unit: the unit of :attr:`loss`, "bits per character" or "perplexity".
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


def warn_of_unknown(unknown: int, tokens: int) -> None:
    """Log a warning where more than 1 % of the tokens of a text are ``<unk>``."""
    if unknown > _MOST_UNKNOWN * tokens:
        logger.warning(
            "%.1f %% of %s tokens are <unk>, which is easy to predict: the figure does not compare "
            "with others of the text",
            100 * unknown / tokens,
            f"{tokens:,}",
        )


def check_at_least(least: int, **values: int | None) -> None:
    """Refuse arguments that are below ``least``."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")


@torch.no_grad()
def score_features(
    model: BaseFairseqModel, features: Tensor, target: Tensor, scored: Tensor
) -> Tensor:
    """Return the losses of some of the tokens that a batch predicts, in nats, row after row.

    Args:
        model: any whose decoder maps features to scores.
        features: the output of its last layer, (B, T, d).
        target: the tokens predicted there, (B, T).
        scored: which of them are wanted, (B, T).
    """
    features, target = features[scored], target[scored]
    piece = max(1, _LOG_PROBABILITIES // len(model.decoder.dictionary))
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


@torch.no_grad()
def score_batches(
    model: BaseFairseqModel,
    batches: Iterable[dict[str, Any]],
    wanted: Callable[[dict[str, Any]], Tensor],
    total: int | None = None,
    description: str = "scoring",
) -> Iterator[tuple[list[int], list[int], np.ndarray]]:
    """Yield the numbers of each batch's rows, how many tokens each row has, and their losses.

    Args:
        model: reads and extends the memory that a batch brings.
        batches: as a task's iterator has them.
        wanted: returns which targets (B, T) of a batch are scored.
        total: how many tokens there are, for a progress bar.
        description: of the progress bar.
    """
    device = next(model.parameters()).device
    hidden = True if total is None else None
    with tqdm(total=total, desc=description, unit=" tokens", leave=False, disable=hidden) as bar:
        for batch in batches:
            batch = move_to_cuda(batch, device=device)
            scored, net_input = wanted(batch), batch["net_input"]
            if "recurrence" in net_input:
                features, _ = model.decoder.extract_features(
                    net_input["src_tokens"],
                    recurrence=net_input["recurrence"],
                    start=net_input["start"],
                )
            else:
                features, _ = model(**net_input, features_only=True)
            losses = score_features(model, features, batch["target"], scored)
            bar.update(len(losses))
            yield batch["id"].tolist(), scored.sum(1).tolist(), losses.cpu().numpy()
