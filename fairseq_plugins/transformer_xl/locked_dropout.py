"""Dropout whose choice holds for a whole segment or a whole word, for small data.

Gal and Ghahramani 2016; Merity, Keskar and Socher 2017 (AWD-LSTM), section 4; Transformer-XL uses
both for Penn Treebank (section 4.1).

Shapes: B streams, T tokens of a segment, V symbols, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LockedDropout(nn.Module):
    """Dropout of the same elements at every token of a stream's segment.

    Args:
        p: probability of dropping an element.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(x.size(0), 1, x.size(2), device=x.device) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)


class WordDropout(nn.Module):
    """Dropout of the embeddings of whole words, wherever they occur in the batch.

    Args:
        p: probability of dropping a word.
        num_symbols: V.
    """

    def __init__(self, p: float, num_symbols: int) -> None:
        super().__init__()
        self.p = p
        self.num_symbols = num_symbols

    def forward(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        """Map the embeddings (B, T, d) of ``tokens`` (B, T) to (B, T, d)."""
        if not self.training or self.p == 0:
            return embedded
        kept = torch.rand(self.num_symbols, device=embedded.device) >= self.p
        return embedded * kept[tokens].unsqueeze(-1).to(embedded.dtype) / (1 - self.p)
