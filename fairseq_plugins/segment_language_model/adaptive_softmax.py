"""Adaptive softmax: fairseq's with the published models' biases, and its loss over every token.

Grave, Joulin, Cissé, Grangier, Jégou: Efficient softmax approximation for GPUs (2017,
arXiv:1609.04309). Shapes: d model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss, AdaptiveLossConfig
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.modules.adaptive_softmax import TiedLinear
from torch import Tensor, nn


class Bias(nn.Module):
    """Add a learned vector to (…, size)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, size) to the same shape."""
        return x + self.bias


class BiasedAdaptiveSoftmax(AdaptiveSoftmax):
    """fairseq's adaptive softmax, with a bias for every symbol and cluster.

    Args:
        vocab_size: number of symbols.
        input_dim: d.
        cutoff: where the clusters end.
        dropout: of the tail projections.
        factor: how much narrower each cluster is.
        adaptive_inputs: embeddings to tie the weights to; None for weights of its own.
        tie_proj: tie the clusters' projections to those of the embeddings too.
        head_projection: project what the frequent symbols and the clusters are scored from, d to d,
            which fairseq's does not.
        tie_head_proj: tie that projection to the one of the embeddings of frequent symbols
            (all-attention's published models; Transformer-XL's do not).
    """

    def __init__(
        self,
        vocab_size: int,
        input_dim: int,
        cutoff: list[int],
        dropout: float,
        factor: float,
        adaptive_inputs: AdaptiveInput | None,
        tie_proj: bool,
        head_projection: bool,
        tie_head_proj: bool = False,
    ) -> None:
        super().__init__(vocab_size, input_dim, cutoff, dropout, factor, adaptive_inputs, tie_proj)
        parts = [self.head, Bias(self.cutoff[0] + len(self.cutoff) - 1)]
        if tie_head_proj:
            _, projection = adaptive_inputs.weights_for_band(0)
            parts.insert(0, TiedLinear(projection, transpose=True))
        elif head_projection:
            parts.insert(0, nn.Linear(input_dim, input_dim, bias=False))
        self.head = nn.Sequential(*parts)
        for first, last, tail in zip(self.cutoff, self.cutoff[1:], self.tail, strict=False):
            tail.append(Bias(last - first))


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
