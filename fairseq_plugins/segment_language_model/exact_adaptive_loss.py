"""The loss of an adaptive softmax, over every token.

Grave, Joulin, Cissé, Grangier, Jégou: Efficient softmax approximation for GPUs (2017,
arXiv:1609.04309).
"""

from typing import Any

import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss, AdaptiveLossConfig
from torch import Tensor


@register_criterion("exact_adaptive_loss", dataclass=AdaptiveLossConfig)
class ExactAdaptiveLoss(AdaptiveLoss):
    """fairseq's ``adaptive_loss`` with no token left out, summed in single precision.

    fairseq's own takes ``<pad>``, symbol 1, out of every cluster. Symbols of a cluster are counted
    from its first one, so for the second symbol of each cluster but the first it drops the loss
    within the cluster, and the loss that is trained on and logged is too low.
    """

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the summed negative log-likelihood (1,), in nats, the tokens and the statistics.

        Raises:
            ValueError: the model has no adaptive softmax.
        """
        adaptive_softmax = model.decoder.adaptive_softmax
        if adaptive_softmax is None:
            raise ValueError(
                "--criterion exact_adaptive_loss needs --adaptive-softmax-cutoff; without it use "
                "--criterion cross_entropy"
            )
        features = model(**sample["net_input"])[0]
        scores, targets = adaptive_softmax(features, sample["target"].flatten())
        # padding is a symbol of the first cluster, so only there can it be a target
        loss = F.cross_entropy(
            scores[0].float(), targets[0], ignore_index=self.padding_idx, reduction="sum"
        )
        for of_cluster, target in zip(scores[1:], targets[1:], strict=True):
            if target is not None:
                loss = loss + F.cross_entropy(of_cluster.float(), target, reduction="sum")
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        return (
            loss.view(1),
            sample_size,
            {
                "loss": loss.detach(),
                "ntokens": sample["ntokens"],
                "nsentences": sample["target"].size(0),
                "sample_size": sample_size,
            },
        )
