"""Losses with penalties for large activations, and for activations that change from token to token.

Merity, McCann, Socher 2017 (arXiv:1708.01009): activation regularisation, α of the squares of the
last layer's output after its dropout, and temporal activation regularisation, β of the squares of
the differences between that output, before its dropout, at a token and at the one before it.
Squares are averaged over the elements, as in the code of AWD-LSTM, and added to the loss of each
token.

Shapes: B streams, T tokens of a segment, d model width.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLossConfig
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss


def activation_penalty_option() -> Any:
    """Return the option α of both losses."""
    return field(
        default=0.0,
        metadata={
            "help": "activation regularisation: what the mean square of the last layer's output, "
            "after --output-dropout, costs a token, in nats (published for Penn Treebank: 0.2)"
        },
    )


def temporal_penalty_option() -> Any:
    """Return the option β of both losses."""
    return field(
        default=0.0,
        metadata={
            "help": "temporal activation regularisation: what the mean square of its change from "
            "token to token, before --output-dropout, costs, in nats (published for Penn Treebank: "
            "0.1)"
        },
    )


@dataclass
class PenalizedCrossEntropyConfig(CrossEntropyCriterionConfig):
    """Options of ``penalized_cross_entropy``."""

    activation_penalty: float = activation_penalty_option()
    temporal_penalty: float = temporal_penalty_option()


@dataclass
class PenalizedExactAdaptiveLossConfig(AdaptiveLossConfig):
    """Options of ``penalized_exact_adaptive_loss``."""

    activation_penalty: float = activation_penalty_option()
    temporal_penalty: float = temporal_penalty_option()


def activation_penalty(dropped: Tensor, scored: Tensor) -> Tensor:
    """Return the mean square of ``dropped`` (B, T, d) at each token ``scored`` (B, T), in a sum."""
    return _exact(dropped).square().mean(-1).masked_fill(~scored, 0.0).sum()


def temporal_penalty(hidden: Tensor, scored: Tensor) -> Tensor:
    """Return the mean square of the changes of ``hidden`` (B, T, d), times the tokens, in a sum.

    Changes are those between two tokens ``scored`` (B, T), averaged over a stream's: so parts of a
    batch (``--batch-split``) have the sum of the whole.
    """
    pairs = scored[:, 1:] & scored[:, :-1]
    changes = _exact(hidden).diff(dim=1).square().mean(-1)
    changes = changes.masked_fill(~pairs, 0.0).sum(1)
    return (changes * scored.sum(1) / pairs.sum(1).clamp(min=1)).sum()


def _exact(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


class _ActivationPenalty:
    """Adds the penalties in training; what is logged as the loss stays that of the tokens.

    Args:
        cfg: the options.
        task: the task.

    Raises:
        ValueError: a coefficient is not a finite number of 0 or more.
    """

    def __init__(self, cfg: Any, task: FairseqTask) -> None:
        super().__init__(task, cfg.sentence_avg)
        for option in ("activation_penalty", "temporal_penalty"):
            if not 0 <= getattr(cfg, option) < math.inf:
                flag, value = option.replace("_", "-"), getattr(cfg, option)
                raise ValueError(f"--{flag} is {value}: it must be at least 0, and finite")
        self.alpha, self.beta = cfg.activation_penalty, cfg.temporal_penalty

    @classmethod
    def build_criterion(cls, cfg: Any, task: FairseqTask) -> Any:
        """Build the loss from its options."""
        return cls(cfg, task)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the loss with the penalties, in nats, the tokens and the statistics.

        Raises:
            ValueError: as the criterion does.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        dropout = model.decoder.output_dropout
        # the last layer's output is what enters this dropout
        hook = dropout.register_forward_hook(lambda _, entering, out: seen.append((*entering, out)))
        try:
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        finally:
            hook.remove()
        ((hidden, dropped),) = seen
        scored = sample["target"].ne(self.padding_idx)
        penalty = torch.zeros((), device=hidden.device)
        if self.alpha > 0:
            penalty = penalty + self.alpha * activation_penalty(dropped, scored)
        if self.beta > 0:
            penalty = penalty + self.beta * temporal_penalty(hidden, scored)
        if self.training:
            loss = loss + penalty
        logging_output["penalty"] = penalty.detach()
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss of the tokens, and the penalties in nats a token."""
        super().reduce_metrics(logging_outputs)
        tokens = sum(log["ntokens"] for log in logging_outputs)
        penalty = sum(log["penalty"] for log in logging_outputs)
        metrics.log_scalar("penalty", penalty / tokens, tokens, round=5)


@register_criterion("penalized_cross_entropy", dataclass=PenalizedCrossEntropyConfig)
class PenalizedCrossEntropy(_ActivationPenalty, CrossEntropyCriterion):
    """fairseq's ``cross_entropy`` with the penalties of activations."""


@register_criterion("penalized_exact_adaptive_loss", dataclass=PenalizedExactAdaptiveLossConfig)
class PenalizedExactAdaptiveLoss(_ActivationPenalty, ExactAdaptiveLoss):
    """``exact_adaptive_loss`` with the penalties of activations."""
