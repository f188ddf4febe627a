"""The loss of segment models: cross-entropy over all or half of the tokens, and cost of spans.

Half loss: Transformer-XL, section 4.2; cost of spans: arXiv:1905.07799, equation 9. The cost counts
only in training, and is logged separately.

Shapes: B streams, T tokens of a segment.
"""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.fairseq_integration.options import check_range, option
from fairseq_plugins.segment_language_model.adaptive_softmax import adaptive_cross_entropy

# all other entries of the statistics are figures of the spans
STATISTICS = ("loss", "ntokens", "nsentences", "sample_size", "logs", "span_loss")


@dataclass
class SegmentLossConfig(CrossEntropyCriterionConfig):
    """Options of ``segment_loss``."""

    half_loss: bool = option(
        False, "train on the latter half of each segment; validation scores all of it"
    )
    span_loss: float = option(
        0.0,
        "cost, in nats, of each token of learned span (--adaptive-span), on average over a "
        "layer's heads (published: 1e-7 for all-attention on characters, 5e-7 elsewhere)",
    )


def latter_half(target: Tensor, pad: int) -> Tensor:
    """Replace the first ``n // 2`` of each stream's n tokens in ``target`` (B, T) by padding."""
    scored = target.ne(pad)
    before = scored.cumsum(dim=1) - 1
    first_half = before < scored.sum(dim=1, keepdim=True) // 2
    return target.masked_fill(first_half, pad)


def span_statistics(spans: list[Any], each_layer: bool) -> dict[str, Tensor]:
    """Return the mean and the largest learned span, in tokens, ramp included, for the log."""
    tokens = torch.stack([span.tokens() for span in spans])  # (layers, H)
    statistics = {"span_mean": tokens.mean(), "span_max": tokens.max()}
    for number, layer_tokens in enumerate(tokens if each_layer else (), start=1):
        statistics[f"span_mean_{number}"] = layer_tokens.mean()
        statistics[f"span_max_{number}"] = layer_tokens.max()
    return statistics


@register_criterion("segment_loss", dataclass=SegmentLossConfig)
class SegmentLoss(CrossEntropyCriterion):
    """Cross-entropy under the model's softmax, plain or adaptive, and the cost of learned spans."""

    def __init__(self, cfg: SegmentLossConfig, task: FairseqTask) -> None:
        super().__init__(task, cfg.sentence_avg)
        self.half_loss = cfg.half_loss
        self.span_loss = cfg.span_loss
        check_range(cfg, 0, "span_loss")

    @classmethod
    def build_criterion(cls, cfg: SegmentLossConfig, task: FairseqTask) -> "SegmentLoss":
        """Build the loss from its options."""
        if cfg.span_loss and not getattr(task, "reads_streams", False):
            raise ValueError(
                f"--span-loss is {cfg.span_loss}, and models of this task have no --adaptive-span: "
                "leave it out, or give --task segment_language_modeling and such a model"
            )
        return cls(cfg, task)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the summed loss in nats, the sample size and the statistics."""
        if self.half_loss and self.training:
            sample = self._in_latter_half(sample)
        net_output = model(**sample["net_input"])
        softmax = model.decoder.adaptive_softmax
        if softmax is None:
            loss, _ = self.compute_loss(model, net_output, sample)
        else:
            loss = adaptive_cross_entropy(
                softmax, net_output[0], sample["target"], self.padding_idx
            )
        ntokens, nsentences = sample["ntokens"], sample["target"].size(0)
        sample_size = nsentences if self.sentence_avg else ntokens
        log = {"loss": loss.detach(), "ntokens": ntokens, "nsentences": nsentences}
        log["sample_size"] = sample_size
        spans: list[Any] = getattr(model, "learned_spans", list)()  # other tasks' models have none
        if spans:
            # times the tokens: fairseq divides gradients by the sample size later
            penalty = self.span_loss * sum(span.penalty() for span in spans) * ntokens
            log["span_loss"] = penalty.detach()
            log.update(span_statistics(spans, each_layer=not self.training), logs=1)
            if self.training:
                loss = loss + penalty
        return loss, sample_size, log

    def _in_latter_half(self, sample: dict) -> dict:
        target = latter_half(sample["target"], self.padding_idx)
        if "stream_tokens" in sample:
            ntokens = sum(count - count // 2 for count in sample["stream_tokens"])
        else:
            # a batch of another task: the host waits for a GPU to count
            ntokens = int(target.ne(self.padding_idx).sum())
        return {**sample, "target": target, "ntokens": ntokens}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss of the tokens, the cost of spans in nats a token, and the spans' figures."""
        super().reduce_metrics(logging_outputs)

        def total(key: str) -> Any:
            return sum(log[key] for log in logging_outputs)

        for key in logging_outputs[0]:
            if key == "span_loss":
                tokens = total("ntokens")
                metrics.log_scalar(key, total(key) / tokens, tokens, round=9)
            elif key not in STATISTICS:
                # all workers have the same figures; weight 0 logs the latest ones, not their mean
                metrics.log_scalar(key, total(key) / total("logs"), 0, round=1)
