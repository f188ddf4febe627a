"""fairseq's adaptive softmax with the published models' biases, and a loss that counts every token.

Grave et al. 2017 (arXiv:1609.04309). Shapes: d model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.modules.adaptive_softmax import TiedLinear
from torch import Tensor, nn


class Bias(nn.Module):
    """Add a learned vector to (…, size)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, size) to (…, size)."""
        return x + self.bias


class BiasedAdaptiveSoftmax(AdaptiveSoftmax):
    """fairseq's adaptive softmax, with a bias for every symbol and cluster.

    ``adaptive_inputs`` ties the weights, ``tie_proj`` the clusters' projections too.
    ``head_projection``, d to d, comes before the scores of frequent symbols and clusters;
    ``tie_head_proj`` takes the projection of the frequent symbols' embeddings instead.
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
            _, projection = adaptive_inputs.weights_for_band(0)  # type: ignore[union-attr]
            parts.insert(0, TiedLinear(projection, transpose=True))
        elif head_projection:
            parts.insert(0, nn.Linear(input_dim, input_dim, bias=False))
        self.head = nn.Sequential(*parts)
        for first, last, tail in zip(self.cutoff, self.cutoff[1:], self.tail, strict=False):
            tail.append(Bias(last - first))


def adaptive_cross_entropy(
    softmax: AdaptiveSoftmax, features: Tensor, target: Tensor, pad: int
) -> Tensor:
    """Return the negative log-likelihood of ``target`` (B, T), in nats, summed in single precision.

    fairseq's ``adaptive_loss`` ignores index 1, ``<pad>``, in every cluster, and so loses part of
    the loss of each cluster's second symbol. ``features`` are (B, T, d).
    """
    scores, targets = softmax(features, target.flatten())
    # padding belongs to the first cluster, so no other cluster has it as a target
    loss = F.cross_entropy(scores[0].float(), targets[0], ignore_index=pad, reduction="sum")
    for cluster_scores, cluster_target in zip(scores[1:], targets[1:], strict=True):
        if cluster_target is not None:
            loss = loss + F.cross_entropy(cluster_scores.float(), cluster_target, reduction="sum")
    return loss
