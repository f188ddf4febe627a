"""The keys of a memory, and the plain search for those that fit a query best.

Lample et al. 2019 (arXiv:1907.05242), sections 3.1 to 3.3. The plain search is the equations as
they stand, for autograd; :mod:`.search` finds the same faster. A fixed rule ranks equal scores, so
that the same query always reads the same slots: of product keys, the better first sub-key goes
first, then the better second one; equal sub-keys, and flat keys, go by their number.

Shapes: N queries, H heads, K slots, n = √K sub-keys of each half, d_q query width, k slots selected
by a head, r = min(k, n) sub-keys selected of each half.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.search import (
    SEARCHES,
    at_least_single,
    score_keys,
    score_pairs,
)

PLAIN = "plain"
KEY_SEARCHES = (*SEARCHES, PLAIN)


def plain_score_pairs(queries: Tensor, subkeys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the best of all pairs of sub-keys, as section 3.2 describes it.

    Args:
        queries: (N, H, d_q).
        subkeys: of both halves, (H, 2, n, d_q/2).
        k: at most n².

    Returns:
        The best scores, best first, and their slots i·n + j: (N, H, k) each.
    """
    n = subkeys.size(2)
    # (N, H, d_q) -> (N, H, 2, d_q/2): the two halves of each query
    halves = queries.unflatten(-1, (2, -1))
    # (N, H, 2, d_q/2), (H, 2, n, d_q/2) -> (N, H, 2, n): all sub-keys' scores
    scores = plain_products("nhsd,hsid->nhsi", halves, subkeys)
    # (N, H, 2, n) -> (N, H, 2, r): the best sub-keys of each half (equation 4)
    best, numbers = plain_top_k(scores, min(k, n))
    # (N, H, r, 1) + (N, H, 1, r) -> (N, H, r·r): all pairs of one of each half
    sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(2)
    slots = (numbers[:, :, 0, :, None] * n + numbers[:, :, 1, None, :]).flatten(2)
    # (N, H, r·r) -> (N, H, k): the best pairs are the best of all K keys
    scores, pairs = plain_top_k(sums, k)
    return scores, slots.gather(-1, pairs)


def plain_score_keys(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and slots (N, H, k) of the best of ``keys`` (H, K, d_q) (equation 1)."""
    # (N, H, d_q), (H, K, d_q) -> (N, H, K)
    return plain_top_k(plain_products("nhd,hkd->nhk", queries, keys), k)


def plain_products(equation: str, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the inner products that ``torch.einsum`` calls ``equation``.

    They are in single precision or higher, also under autocast.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return torch.einsum(equation, at_least_single(queries), at_least_single(keys))


def plain_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest of ``scores`` (…, n), best first, and their numbers: (…, k) each."""
    # torch.topk leaves open which of equal scores goes first
    best, numbers = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], numbers[..., :k]


class ProductKeys(nn.Module):
    """Keys that are all pairs of two sets of sub-keys; each head has its own (section 3.1).

    Slot i·n + j has sub-key i of the first set and j of the second. Sub-keys are drawn uniformly
    from ±1/√(d_q/2).

    Args:
        heads: H.
        slots: K, a square number.
        query_dim: d_q, an even number.
        search: one of ``KEY_SEARCHES``.

    Raises:
        ValueError: ``slots`` is not a square number, or ``query_dim`` is odd.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.subkeys_per_half = math.isqrt(slots)
        if self.subkeys_per_half**2 != slots:
            near = self.subkeys_per_half**2, (self.subkeys_per_half + 1) ** 2
            raise ValueError(
                f"`slots` is {slots}: product keys need a square number, such as {near[0]} or "
                f"{near[1]}"
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
        """Search for the keys that fit ``queries`` (N, H, d_q) best.

        Returns:
            Scores and slots, exactly the best of all K, best first: (N, H, k) each.
        """
        if self.search == PLAIN:
            return plain_score_pairs(queries, self.subkeys, k)
        return score_pairs(queries, self.subkeys, k, self.search)


class FlatKeys(nn.Module):
    """K keys of full width for each head, all of which are scored: the ablation (section 4.5).

    Keys are drawn uniformly from ±1/√d_q, as in the published code: they are 1/√2 as long as
    product keys of the same width.

    Args:
        heads: H.
        slots: K.
        query_dim: d_q.
        search: one of ``KEY_SEARCHES``.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, slots, query_dim))
        nn.init.uniform_(self.keys, -(query_dim**-0.5), query_dim**-0.5)
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search for the keys that fit ``queries`` (N, H, d_q) best (equation 1).

        Returns:
            Scores and slots, best first: (N, H, k) each.
        """
        if self.search == PLAIN:
            return plain_score_keys(queries, self.keys, k)
        return score_keys(queries, self.keys, k, self.search)
