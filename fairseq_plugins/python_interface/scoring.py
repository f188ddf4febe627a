"""The loss of each token under a trained model, and the units in which it is told.

Shapes: B texts or streams, T tokens, d model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_plugins.segment_language_model.generation import is_characters

BITS, PERPLEXITY = "bits per character", "perplexity"
# Log-probabilities that are computed at once: those of a large vocabulary outweigh all else.
_LOG_PROBABILITIES = 2**26


def loss_unit(dictionary: Dictionary) -> str:
    """Return the unit in which the loss of a text is usually given: by the kind of its symbols."""
    return BITS if is_characters(dictionary) else PERPLEXITY


def in_unit(nats: float, unit: str) -> float:
    """Return a mean loss in nats a token as bits per character, or as the perplexity of a token."""
    return float(nats / np.log(2) if unit == BITS else np.exp(nats))


@dataclass(frozen=True)
class Score:
    """What a model says of a text, token by token; scores of pieces add up to that of the whole.

    Args:
        tokens: the symbols, ``</s>`` where the text has a newline.
        log_probs: log-probability of each in nats, float32 (N,).
        unit: that of :attr:`loss`, "bits per character" or "perplexity".
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


@torch.no_grad()
def score_features(
    model: BaseFairseqModel, features: Tensor, target: Tensor, scored: Tensor
) -> Tensor:
    """Return the losses of some of the tokens that a batch predicts, in nats, row after row.

    Args:
        model: any whose decoder maps features to scores.
        features: what its last layer says of each token, (B, T, d).
        target: the tokens predicted there, (B, T).
        scored: which of them are wanted, (B, T).

    Returns:
        (tokens,), in single precision.
    """
    features, target = features[scored], target[scored]
    piece = max(1, _LOG_PROBABILITIES // len(model.decoder.dictionary))
    losses = []
    for some, their_target in zip(features.split(piece), target.split(piece), strict=True):
        output = model.decoder.output_layer(some.unsqueeze(0))
        sample = {"target": their_target.unsqueeze(0)}
        log_probs = model.get_normalized_probs((output, None), log_probs=True, sample=sample)
        losses.append(-log_probs.gather(-1, sample["target"].unsqueeze(-1)).view(-1).float())
    return torch.cat(losses)
