"""Adaptive softmax: fairseq's with the published models' biases, and its loss over every token.

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
        """Map (…, size) to the same shape."""
        return x + self.bias


class BiasedAdaptiveSoftmax(AdaptiveSoftmax):
    """fairseq's adaptive softmax, with a bias for every symbol and cluster.

    With ``adaptive_inputs`` the weights are tied, with ``tie_proj`` the clusters' projections too.
    What frequent symbols and clusters are scored from has a ``head_projection``, d to d, or the
    projection of the frequent symbols' embeddings (``tie_head_proj``).
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
    """Return the summed negative log-likelihood of ``target`` (B, T), in nats, single precision.

    fairseq's ``adaptive_loss`` takes ``<pad>``, symbol 1, out of every cluster, and so drops the
    loss of each cluster's second symbol within it. ``features`` is (B, T, d).
    """
    scores, targets = softmax(features, target.flatten())
    # padding is a symbol of the first cluster, so only there can it be a target
    loss = F.cross_entropy(scores[0].float(), targets[0], ignore_index=pad, reduction="sum")
    for of_cluster, own_target in zip(scores[1:], targets[1:], strict=True):
        if own_target is not None:
            loss = loss + F.cross_entropy(of_cluster.float(), own_target, reduction="sum")
    return loss
