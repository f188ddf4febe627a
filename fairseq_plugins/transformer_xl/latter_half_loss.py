"""Training on the latter half of each segment (Transformer-XL, section 4.2, "half" loss).

The tokens of the first half have little context where nothing is remembered; without them,
absolute positions train better (tables 6 and 10).

Shapes: B streams, T tokens of a segment.
"""

from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLossConfig
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from torch import Tensor

from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss


def latter_half(target: Tensor, pad: int) -> Tensor:
    """Return ``target`` (B, T) with padding for the first half of each stream's tokens.

    Of n tokens the first ``n // 2`` go; padding counts as no token, wherever it stands.
    """
    scored = target.ne(pad)
    before = scored.cumsum(dim=1) - 1
    first_half = before < scored.sum(dim=1, keepdim=True) // 2
    return target.masked_fill(first_half, pad)


class _LatterHalf:
    """Keeps the first half of each segment from a criterion in training; validation scores all.

    The tokens that training logs (``wpb``, ``wps``) are those of the latter halves.
    """

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the summed loss in nats, the number of tokens that count and the statistics.

        Raises:
            ValueError: as the criterion does.
        """
        if self.training:
            target = latter_half(sample["target"], self.padding_idx)
            counts = sample.get("stream_tokens")
            if counts is None:
                # another task's batch does not tell: count them, for which a GPU's host waits
                ntokens = int(target.ne(self.padding_idx).sum())
            else:
                ntokens = sum(count - count // 2 for count in counts)
            sample = {**sample, "target": target, "ntokens": ntokens}
        return super().forward(model, sample, reduce)


@register_criterion("half_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class HalfCrossEntropy(_LatterHalf, CrossEntropyCriterion):
    """fairseq's ``cross_entropy`` of the latter half of each segment."""


@register_criterion("half_exact_adaptive_loss", dataclass=AdaptiveLossConfig)
class HalfExactAdaptiveLoss(_LatterHalf, ExactAdaptiveLoss):
    """``exact_adaptive_loss`` of the latter half of each segment."""
