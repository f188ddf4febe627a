"""Persistent key-value vectors and attention to them (all-attention, section 4, equations 9-13).

Shapes: H heads, B streams, T tokens of a segment, N persistent vectors, d model width, d_h head
width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention_blocks import EVERY_KEY
from fairseq_plugins.segment_language_model.attention_kernel import window_attention


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

    def attend(
        self, query: Tensor, dropout: float = 0.0, with_total: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each query to the persistent vectors of its head alone.

        Args:
            query: (H, B, T, d_h), already divided by √d_h.
            dropout: probability of dropping a weight.
            with_total: return the logarithm of what the weights were divided by, too.

        Returns:
            (H, B, T, d_h), and log Σ exp(score), (H, B, T), or None.
        """
        keys, values = self()
        # streams share the vectors: (H, B, T, d_h) -> (H, 1, B·T, d_h)
        queries = query.flatten(1, 2).unsqueeze(1)
        attended, total = window_attention(
            queries,
            keys.unsqueeze(1),
            values.unsqueeze(1),
            None,
            EVERY_KEY,
            dropout,
            with_total=with_total,
        )
        return attended.view(query.shape), None if total is None else total.view(query.shape[:3])


def joint_softmax(
    first: Tensor, first_total: Tensor, second: Tensor, second_total: Tensor
) -> Tensor:
    """Return what one softmax over two sets of keys gives (equation 13), from those over each set.

    Args:
        first: attended values (H, B, T, d_h) of the one set.
        first_total: log Σ exp(score) of its keys, (H, B, T); -∞ for an empty set.
        second: of the other set, which may not be empty, (H, B, T, d_h).
        second_total: (H, B, T).

    Returns:
        (H, B, T, d_h).
    """
    share_of_second = torch.sigmoid(second_total - first_total).unsqueeze(-1).to(first.dtype)
    return torch.lerp(first, second, share_of_second)


class SoftmaxFeedForward(nn.Module):
    """``U softmax(V x)``: a feed-forward sublayer as attention to persistent vectors (equation 9).

    No biases, no projections; V and U are persistent keys and values of one head as wide as the
    model. The keys' scale √d and the queries' 1/√d cancel out.

    Args:
        num_vectors: N, the inner width.
        embed_dim: d.
        dropout: probability of dropping a weight.
    """

    def __init__(self, num_vectors: int, embed_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.persistent = PersistentVectors(num_vectors, 1, embed_dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, d)."""
        query = (x / math.sqrt(x.size(-1))).unsqueeze(0)
        return self.persistent.attend(query, self.dropout if self.training else 0.0)[0].squeeze(0)
