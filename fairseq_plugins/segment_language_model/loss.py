"""The loss of segment language models: cross-entropy of all tokens or the latter half, penalties.

Half loss: Transformer-XL, section 4.2. Penalty of learned spans: Sukhbaatar et al. 2019a
(arXiv:1905.07799), equation 9. Activation regularisation: Merity, McCann, Socher 2017
(arXiv:1708.01009). Penalties are part of the loss in training alone, and logged apart.

Shapes: B streams, T tokens of a segment, d model width.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.fairseq_integration.error_messages import flag
from fairseq_plugins.segment_language_model.adaptive_softmax import adaptive_cross_entropy

PENALTIES = ("activation_penalty", "temporal_penalty", "span_loss")


@dataclass
class SegmentLossConfig(CrossEntropyCriterionConfig):
    """Options of ``segment_loss``."""

    half_loss: bool = field(
        default=False,
        metadata={"help": "train on the latter half of each segment; validation scores all of it"},
    )
    span_loss: float = field(
        default=0.0,
        metadata={
            "help": "what a token of learned span (--adaptive-span) costs, in nats, averaged over "
            "the heads of a layer (published: 1e-7 all-attention on characters, 5e-7 elsewhere)"
        },
    )
    activation_penalty: float = field(
        default=0.0,
        metadata={
            "help": "activation regularisation: what the mean square of the last layer's output, "
            "after --output-dropout, costs a token, in nats (published for Penn Treebank: 0.2)"
        },
    )
    temporal_penalty: float = field(
        default=0.0,
        metadata={
            "help": "temporal activation regularisation: what the mean square of its change from "
            "token to token, before --output-dropout, costs, in nats (published for Penn Treebank: "
            "0.1)"
        },
    )


def latter_half(target: Tensor, pad: int) -> Tensor:
    """Return ``target`` (B, T) with padding for the first half of each stream's tokens.

    Of n tokens the first ``n // 2`` go; padding counts as no token, wherever it stands.
    """
    scored = target.ne(pad)
    before = scored.cumsum(dim=1) - 1
    first_half = before < scored.sum(dim=1, keepdim=True) // 2
    return target.masked_fill(first_half, pad)


def activation_penalty(dropped: Tensor, scored: Tensor) -> Tensor:
    """Return the mean square of ``dropped`` (B, T, d) at each token ``scored`` (B, T), in a sum."""
    return _at_least_single(dropped).square().mean(-1).masked_fill(~scored, 0.0).sum()


def temporal_penalty(hidden: Tensor, scored: Tensor) -> Tensor:
    """Return the mean square of the changes of ``hidden`` (B, T, d), times the tokens, in a sum.

    Changes are those between two tokens ``scored`` (B, T), averaged over a stream's: so parts of a
    batch (``--batch-split``) have the sum of the whole.
    """
    pairs = scored[:, 1:] & scored[:, :-1]
    changes = _at_least_single(hidden).diff(dim=1).square().mean(-1)
    changes = changes.masked_fill(~pairs, 0.0).sum(1)
    return (changes * scored.sum(1) / pairs.sum(1).clamp(min=1)).sum()


def _at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


@register_criterion("segment_loss", dataclass=SegmentLossConfig)
class SegmentLoss(CrossEntropyCriterion):
    """Cross-entropy under the model's softmax, plain or adaptive, with its penalties.

    Args:
        cfg: the options.
        task: the task.
    """

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
        """Return the summed loss in nats, the number of tokens that count and the statistics."""
        spans = getattr(model.decoder, "spans", [])
        if self.costs["span_loss"] > 0 and not spans:
            raise ValueError(
                f"--span-loss is {self.costs['span_loss']} for a model without --adaptive-span, "
                "which learns no spans: leave one of the two out, or give both"
            )
        if self.half_loss and self.training:
            sample = self._in_latter_half(sample)
        loss, activations = self._cross_entropy(model, sample)
        added = self._penalties(activations, spans, sample)
        ntokens, nsentences = sample["ntokens"], sample["target"].size(0)
        sample_size = nsentences if self.sentence_avg else ntokens
        log = {"loss": loss.detach(), "ntokens": ntokens, "nsentences": nsentences}
        log["sample_size"] = sample_size
        log.update((name, penalty.detach()) for name, penalty in added.items())
        if spans:
            log.update(self._describe_spans(spans))
        if self.training and added:
            loss = loss + sum(added.values())
        return loss, sample_size, log

    def _in_latter_half(self, sample: dict) -> dict:
        target = latter_half(sample["target"], self.padding_idx)
        counts = sample.get("stream_tokens")
        if counts is None:
            # another task's batch does not say: count them, for which a GPU's host waits
            ntokens = int(target.ne(self.padding_idx).sum())
        else:
            ntokens = sum(count - count // 2 for count in counts)
        return {**sample, "target": target, "ntokens": ntokens}

    def _cross_entropy(self, model: Any, sample: dict) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the summed loss; and the last layer's output before and after its dropout."""
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
        self, activations: tuple[Tensor, Tensor], spans: list, sample: dict
    ) -> dict[str, Tensor]:
        """Return what each penalty adds to the summed loss."""
        hidden, dropped = activations
        scored = sample["target"].ne(self.padding_idx)
        added = {}
        if (cost := self.costs["activation_penalty"]) > 0:
            added["activation_penalty"] = cost * activation_penalty(dropped, scored)
        if (cost := self.costs["temporal_penalty"]) > 0:
            added["temporal_penalty"] = cost * temporal_penalty(hidden, scored)
        if spans:
            # of each token: gradients are divided by their number, or by that of streams, later
            penalty = self.costs["span_loss"] * sum(span.penalty() for span in spans)
            added["span_loss"] = penalty * sample["ntokens"]
        return added

    def _describe_spans(self, spans: list) -> dict[str, Any]:
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
        """Log the loss of the tokens, each penalty in nats a token, and the spans in tokens.

        Spans count the ramp. All workers have the same.
        """
        super().reduce_metrics(logging_outputs)

        def total(key: str) -> Any:
            return sum(log[key] for log in logging_outputs)

        tokens = total("ntokens")
        for key in logging_outputs[0]:
            if key in PENALTIES:
                metrics.log_scalar(key, total(key) / tokens, tokens, round=9)
            elif key.startswith(("span_mean", "span_max")):
                # of weight 0: not their average since the last line, but what they are now
                metrics.log_scalar(key, total(key) / total("span_logs"), 0, round=1)
