"""Persistent key and value vectors, and attention to them (all-attention, equations 9 to 13).

Shapes: H heads, B streams, T tokens of a segment, N persistent vectors, d model width, d_h head
width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention import choose_kernel
from fairseq_plugins.segment_language_model.attention_blocks import EVERY_KEY


class PersistentVectors(nn.Module):
    """N pairs of key and value vectors for each head, which every query attends to.

    Keys ``√d_h·m_k`` with ``m_k ~ N(0, 1/d_h)``, values ``√N·m_v`` with ``m_v ~ N(0, 1/N)``
    (section 5.1).
    """

    def __init__(
        self, num_vectors: int, num_heads: int, head_dim: int, kernel: str = "fast"
    ) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(num_heads, num_vectors, head_dim))
        self.values = nn.Parameter(torch.empty(num_heads, num_vectors, head_dim))
        self.key_scale = math.sqrt(head_dim)
        self.value_scale = math.sqrt(num_vectors)
        choose_kernel(kernel)
        self.kernel = kernel
        nn.init.normal_(self.keys, std=1 / self.key_scale)
        nn.init.normal_(self.values, std=1 / self.value_scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (H, N, d_h)."""
        return self.key_scale * self.keys, self.value_scale * self.values

    def attend(self, query: Tensor, dropout: float) -> Tensor:
        """Attend from queries (H, B, T, d_h), divided by √d_h, to their heads' vectors alone."""
        keys, values = self()
        # streams share the vectors: (H, B, T, d_h) -> (H, 1, B·T, d_h)
        queries = query.flatten(1, 2).unsqueeze(1)
        attend = choose_kernel(self.kernel, query.device)
        vectors = keys.unsqueeze(1), values.unsqueeze(1)
        return attend(queries, *vectors, None, EVERY_KEY, dropout).view(query.shape)


class SoftmaxFeedForward(nn.Module):
    """``U softmax(V x)``: a feed-forward sublayer as attention to persistent vectors (equation 9).

    V and U are the N keys and values of one head as wide as the model. The scales of keys, √d, and
    queries, 1/√d, cancel out.
    """

    def __init__(
        self, num_vectors: int, embed_dim: int, dropout: float = 0.0, kernel: str = "fast"
    ) -> None:
        super().__init__()
        self.persistent = PersistentVectors(num_vectors, 1, embed_dim, kernel)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        query = (x / math.sqrt(x.size(-1))).unsqueeze(0)
        return self.persistent.attend(query, self.dropout if self.training else 0.0).squeeze(0)
