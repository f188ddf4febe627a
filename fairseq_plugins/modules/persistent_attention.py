"""Persistent key-value vectors (all-attention, section 4.2, equations 10-13).

Shapes: H heads, N persistent vectors, d_h head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class PersistentVectors(nn.Module):
    """N pairs of key and value vectors a head, which every query may attend to.

    Reparameterised (section 5.1) as ``√d_h·m_k`` with ``m_k ~ N(0, 1/d_h)`` and ``√N·m_v`` with
    ``m_v ~ N(0, 1/N)``: unit variance like context vectors, while the parameters themselves are as
    small as those of a feed-forward sublayer.

    Args:
        num_vectors: N, at least 1.
        num_heads: H.
        head_dim: d_h.
    """

    def __init__(self, num_vectors: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(num_heads, num_vectors, head_dim))
        self.values = nn.Parameter(torch.empty(num_heads, num_vectors, head_dim))
        self.key_scale = math.sqrt(head_dim)
        self.value_scale = math.sqrt(num_vectors)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both sets of vectors anew."""
        nn.init.normal_(self.keys, std=1 / self.key_scale)
        nn.init.normal_(self.values, std=1 / self.value_scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (H, N, d_h)."""
        return self.key_scale * self.keys, self.value_scale * self.values
