"""An adaptive softmax with the biases and the first projection of the published models.

Shapes: C clusters beside the frequent symbols, d model width.
"""

from __future__ import annotations

import torch
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
