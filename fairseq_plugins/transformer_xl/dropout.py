"""Dropout for small data sets, as Transformer-XL uses it on Penn Treebank (section 4.1).

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LockedDropout(nn.Module):
    """Dropout, with probability p, of the same elements at every token of a segment.

    Gal and Ghahramani 2016.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        if not self.training or self.p == 0:
            return x
        mask = torch.rand(x.size(0), 1, x.size(2), device=x.device) >= self.p
        return x * mask.to(x.dtype) / (1 - self.p)


class WordDropout(nn.Module):
    """Dropout, with probability p, of whole words, everywhere in the batch.

    Merity, Keskar and Socher 2017 (AWD-LSTM), section 4. ``num_symbols`` is V.
    """

    def __init__(self, p: float, num_symbols: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"`p` is {p}: word dropout must be in [0, 1)")
        self.p = p
        self.num_symbols = num_symbols

    def forward(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        """Map the embeddings (B, T, d) of ``tokens`` (B, T) to (B, T, d)."""
        if not self.training or self.p == 0:
            return embedded
        mask = torch.rand(self.num_symbols, device=embedded.device) >= self.p
        return embedded * mask[tokens].unsqueeze(-1).to(embedded.dtype) / (1 - self.p)
