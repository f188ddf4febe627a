"""Losses with the penalty that keeps learned attention spans short.

Sukhbaatar et al. 2019a (arXiv:1905.07799), equation 9; all-attention, section 5.1: coefficient x
largest span x mean over heads of the learned part, summed over the layers, is added to the loss of
each token.
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

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss


def span_loss_option() -> Any:
    """Return the option that both losses have."""
    return field(
        default=1e-7,
        metadata={
            "help": "what a token of learned span costs, in nats, averaged over the heads of a "
            "layer (published: 1e-7 all-attention on characters, 5e-7 elsewhere)"
        },
    )


@dataclass
class SpanCrossEntropyConfig(CrossEntropyCriterionConfig):
    """Options of ``span_cross_entropy``."""

    span_loss: float = span_loss_option()


@dataclass
class SpanExactAdaptiveLossConfig(AdaptiveLossConfig):
    """Options of ``span_exact_adaptive_loss``."""

    span_loss: float = span_loss_option()


class _SpanLoss:
    """Adds the penalty in training; what is logged as the loss stays that of the tokens.

    Args:
        cfg: the options.
        task: the task.

    Raises:
        ValueError: the coefficient is not a number of 0 or more.
    """

    def __init__(self, cfg: Any, task: FairseqTask) -> None:
        super().__init__(task, cfg.sentence_avg)
        if not 0 <= cfg.span_loss < math.inf:
            raise ValueError(f"--span-loss is {cfg.span_loss}: it must be at least 0, and finite")
        self.span_loss = cfg.span_loss

    @classmethod
    def build_criterion(cls, cfg: Any, task: FairseqTask) -> Any:
        """Build the loss from its options."""
        return cls(cfg, task)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the loss with the penalty, in nats, the tokens and the statistics.

        Raises:
            ValueError: the model learns no spans, or the loss is not for its softmax.
        """
        spans: list[AdaptiveSpan] = getattr(model.decoder, "spans", [])
        if not spans:
            raise ValueError(
                f"--criterion {self.name} needs --adaptive-span; without it use --criterion "
                f"{self.without_spans}"
            )
        adaptive = model.decoder.adaptive_softmax is not None
        if adaptive != (self.name == SpanExactAdaptiveLoss.name):
            raise ValueError(
                f"--criterion {self.name} is for models with{'out' if adaptive else ''} "
                "--adaptive-softmax-cutoff: use --criterion "
                f"{SpanExactAdaptiveLoss.name if adaptive else SpanCrossEntropy.name}"
            )
        loss, sample_size, logging_output = super().forward(model, sample, reduce)
        penalty = self.span_loss * sum(span.penalty() for span in spans)
        if self.training:
            # of each token: gradients are divided by their number, or by that of streams, later
            loss = loss + penalty * sample["ntokens"]
        logging_output["span_loss"] = penalty.detach() * sample["ntokens"]
        logging_output.update(self._observe(spans))
        return loss, sample_size, logging_output

    def _observe(self, spans: list[AdaptiveSpan]) -> dict[str, Any]:
        """Return mean and largest span, in validation of each layer too, and how many to sum."""
        tokens = torch.stack([span.tokens() for span in spans])  # (layers, H)
        seen = {"span_mean": tokens.mean(), "span_max": tokens.max(), "span_logs": 1}
        if not self.training:
            for layer, of_layer in enumerate(tokens, start=1):
                seen[f"span_mean_{layer}"] = of_layer.mean()
                seen[f"span_max_{layer}"] = of_layer.max()
        return seen

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss of the tokens, the penalty in nats a token, and the spans in tokens.

        Spans count the ramp. All workers have the same.
        """
        super().reduce_metrics(logging_outputs)

        def total(key: str) -> Any:
            return sum(log[key] for log in logging_outputs)

        tokens = total("ntokens")
        metrics.log_scalar("span_loss", total("span_loss") / tokens, tokens, round=9)
        for key in logging_outputs[0]:
            if key.startswith(("span_mean", "span_max")):
                # of weight 0: not their average since the last line, but what they are now
                metrics.log_scalar(key, total(key) / total("span_logs"), 0, round=1)


@register_criterion("span_cross_entropy", dataclass=SpanCrossEntropyConfig)
class SpanCrossEntropy(_SpanLoss, CrossEntropyCriterion):
    """fairseq's ``cross_entropy`` with the penalty of learned spans."""

    name, without_spans = "span_cross_entropy", "cross_entropy"


@register_criterion("span_exact_adaptive_loss", dataclass=SpanExactAdaptiveLossConfig)
class SpanExactAdaptiveLoss(_SpanLoss, ExactAdaptiveLoss):
    """``exact_adaptive_loss`` with the penalty of learned spans."""

    name, without_spans = "span_exact_adaptive_loss", "exact_adaptive_loss"
