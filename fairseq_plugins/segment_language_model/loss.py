"""The loss of segment language models: cross-entropy over all or half of the tokens, and penalties.

Half loss: Transformer-XL, section 4.2. Activation regularisation: Merity, McCann, Socher 2017
(arXiv:1708.01009). A decoder may add its own ``penalties`` and ``figures``. Penalties count only in
training, and are logged separately.

Shapes: B streams, T tokens of a segment, d model width.
"""

import math
from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.fairseq_integration.options import flag, option
from fairseq_plugins.segment_language_model.adaptive_softmax import adaptive_cross_entropy

# models' own penalties, and the option that makes a model have one
OWN_PENALTIES = {"span_loss": "--adaptive-span"}
PENALTIES = ("activation_penalty", "temporal_penalty", *OWN_PENALTIES)
# all other entries of the statistics are the model's own figures
STATISTICS = ("loss", "ntokens", "nsentences", "sample_size", "logs", *PENALTIES)


@dataclass
class SegmentLossConfig(CrossEntropyCriterionConfig):
    """Options of ``segment_loss``."""

    half_loss: bool = option(
        False, "train on the latter half of each segment; validation scores all of it"
    )
    span_loss: float = option(
        0.0,
        "cost, in nats, of each token of learned span (--adaptive-span), in the mean over a "
        "layer's heads (published: 1e-7 for all-attention on characters, 5e-7 elsewhere)",
    )
    activation_penalty: float = option(
        0.0,
        "activation regularisation: cost, in nats per token, of the mean square of the last "
        "layer's output, after --output-dropout (published for Penn Treebank: 0.2)",
    )
    temporal_penalty: float = option(
        0.0,
        "temporal activation regularisation: cost, in nats per token, of the mean square "
        "change of the last layer's output from token to token, before --output-dropout (published "
        "for Penn Treebank: 0.1)",
    )


def latter_half(target: Tensor, pad: int) -> Tensor:
    """Replace the first ``n // 2`` of each stream's n tokens in ``target`` (B, T) by padding."""
    scored = target.ne(pad)
    before = scored.cumsum(dim=1) - 1
    first_half = before < scored.sum(dim=1, keepdim=True) // 2
    return target.masked_fill(first_half, pad)


def activation_penalty(dropped: Tensor, scored: Tensor) -> Tensor:
    """Return the mean square of ``dropped`` (B, T, d), summed over the ``scored`` tokens (B, T)."""
    return _at_least_single(dropped).square().mean(-1).masked_fill(~scored, 0.0).sum()


def temporal_penalty(hidden: Tensor, scored: Tensor) -> Tensor:
    """Return the mean square change of ``hidden`` (B, T, d), times the number of ``scored`` tokens.

    Each stream has its own mean, over its pairs of ``scored`` (B, T) tokens, so that the parts of a
    batch (``--batch-split``) add up to the whole.
    """
    pairs = scored[:, 1:] & scored[:, :-1]
    changes = _at_least_single(hidden).diff(dim=1).square().mean(-1)
    changes = changes.masked_fill(~pairs, 0.0).sum(1)
    return (changes * scored.sum(1) / pairs.sum(1).clamp(min=1)).sum()


def _at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


@register_criterion("segment_loss", dataclass=SegmentLossConfig)
class SegmentLoss(CrossEntropyCriterion):
    """Cross-entropy under the model's softmax, plain or adaptive, with its penalties."""

    def __init__(self, cfg: SegmentLossConfig, task: FairseqTask) -> None:
        super().__init__(task, cfg.sentence_avg)
        self.half_loss = cfg.half_loss
        self.costs = {name: getattr(cfg, name) for name in PENALTIES}
        for name, cost in self.costs.items():
            if not 0 <= cost < math.inf:
                raise ValueError(f"{flag(name)} is {cost}: it must be at least 0, and finite")

    @classmethod
    def build_criterion(cls, cfg: SegmentLossConfig, task: FairseqTask) -> "SegmentLoss":
        """Build the loss from its options."""
        return cls(cfg, task)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the summed loss in nats, the sample size and the statistics."""
        own: dict[str, Tensor] = getattr(model.decoder, "penalties", dict)()
        for name, needed in OWN_PENALTIES.items():
            if self.costs[name] > 0 and name not in own:
                raise ValueError(
                    f"{flag(name)} is {self.costs[name]} for a model without {needed}: give both, "
                    f"or leave {flag(name)} out"
                )
        if self.half_loss and self.training:
            sample = self._in_latter_half(sample)
        loss, activations = self._cross_entropy(model, sample)
        added = self._penalties(activations, own, sample)
        ntokens, nsentences = sample["ntokens"], sample["target"].size(0)
        sample_size = nsentences if self.sentence_avg else ntokens
        log = {"loss": loss.detach(), "ntokens": ntokens, "nsentences": nsentences}
        log["sample_size"] = sample_size
        log.update((name, penalty.detach()) for name, penalty in added.items())
        if own:
            log.update(model.decoder.figures(each_layer=not self.training), logs=1)
        if self.training and added:
            loss = loss + sum(added.values())
        return loss, sample_size, log

    def _in_latter_half(self, sample: dict) -> dict:
        target = latter_half(sample["target"], self.padding_idx)
        counts = sample.get("stream_tokens")
        if counts is None:
            # a batch of another task: the host waits for a GPU to count
            ntokens = int(target.ne(self.padding_idx).sum())
        else:
            ntokens = sum(count - count // 2 for count in counts)
        return {**sample, "target": target, "ntokens": ntokens}

    def _cross_entropy(self, model: Any, sample: dict) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the summed loss, and the last layer's output before and after its dropout."""
        seen: list[tuple[Tensor, Tensor]] = []
        hook = None
        if self.costs["activation_penalty"] > 0 or self.costs["temporal_penalty"] > 0:
            hook = model.decoder.output_dropout.register_forward_hook(
                lambda _, entering, out: seen.append((*entering, out))
            )
        try:
            net_output = model(**sample["net_input"])
        finally:
            if hook is not None:
                hook.remove()
        softmax = model.decoder.adaptive_softmax
        if softmax is None:
            loss, _ = self.compute_loss(model, net_output, sample)
        else:
            loss = adaptive_cross_entropy(
                softmax, net_output[0], sample["target"], self.padding_idx
            )
        return loss, (seen[0] if seen else (None, None))

    def _penalties(
        self, activations: tuple[Tensor, Tensor], own: dict[str, Tensor], sample: dict
    ) -> dict[str, Tensor]:
        """Return each penalty's part of the summed loss."""
        hidden, dropped = activations
        scored = sample["target"].ne(self.padding_idx)
        added = {}
        if (cost := self.costs["activation_penalty"]) > 0:
            added["activation_penalty"] = cost * activation_penalty(dropped, scored)
        if (cost := self.costs["temporal_penalty"]) > 0:
            added["temporal_penalty"] = cost * temporal_penalty(hidden, scored)
        for name, penalty in own.items():
            # times the tokens: fairseq divides gradients by the sample size later
            added[name] = self.costs[name] * penalty * sample["ntokens"]
        return added

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss of the tokens, each penalty in nats a token, and the model's figures."""
        super().reduce_metrics(logging_outputs)

        def total(key: str) -> Any:
            return sum(log[key] for log in logging_outputs)

        tokens = total("ntokens")
        for key in logging_outputs[0]:
            if key in PENALTIES:
                metrics.log_scalar(key, total(key) / tokens, tokens, round=9)
            elif key not in STATISTICS:
                # all workers have the same figures; weight 0 logs the latest ones, not their mean
                metrics.log_scalar(key, total(key) / total("logs"), 0, round=1)
