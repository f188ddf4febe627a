"""The keys of a memory, and the exact search for those that fit a query best.

Lample et al. 2019 (arXiv:1907.05242), sections 3.1 to 3.3. Equal scores are ranked by a fixed rule,
so that the same query always reads the same slots: of product keys, the better first sub-key goes
first, then the better second one; equal sub-keys, and flat keys, go by their number.

Shapes: N queries, H heads, K slots, n = √K sub-keys of each half, d_q query width, k slots selected
by a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.search import score_keys, score_pairs


class ProductKeys(nn.Module):
    """Keys that are all pairs of two sets of sub-keys, with sub-keys of each head its own (3.1).

    Slot i·n + j has sub-key i of the first set and j of the second. They are drawn uniformly from
    ±1/√(d_q/2).

    Args:
        heads: H.
        slots: K, a square number.
        query_dim: d_q, an even number.
        search: a key of ``SEARCHES``.

    Raises:
        ValueError: ``slots`` is not a square number, or ``query_dim`` is odd.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.subkeys_per_half = math.isqrt(slots)
        if self.subkeys_per_half**2 != slots:
            near = self.subkeys_per_half**2, (self.subkeys_per_half + 1) ** 2
            raise ValueError(
                f"`slots` is {slots}: product keys need a square number, such as {near[0]} "
                f"or {near[1]}"
            )
        if query_dim % 2:
            raise ValueError(
                f"`query_dim` is {query_dim}: product keys halve it, so it must be even"
            )
        half = query_dim // 2
        # (H, halves, n, d_q/2)
        self.subkeys = nn.Parameter(torch.empty(heads, 2, self.subkeys_per_half, half))
        nn.init.uniform_(self.subkeys, -(half**-0.5), half**-0.5)
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores and the slots (N, H, k) that fit ``queries`` (N, H, d_q) best.

        They are exactly the best of all K, best first (equation 4 and what follows it).
        """
        return score_pairs(queries, self.subkeys, k, self.search)


class FlatKeys(nn.Module):
    """K keys of full width for each head, all of which are compared: the ablation (section 4.5).

    Args:
        heads: H.
        slots: K.
        query_dim: d_q.
        search: a key of ``SEARCHES``.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, slots, query_dim))
        # as long as two halves of product keys together
        bound = (query_dim / 2) ** -0.5
        nn.init.uniform_(self.keys, -bound, bound)
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k) that fit ``queries`` (N, H, d_q) best (equation 1)."""
        return score_keys(queries, self.keys, k, self.search)
