"""The largest elements of many rows, exactly, with a fixed rule for equal ones.

Shapes: R rows, n elements of a row, k wanted, m looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

# How many elements are sorted at a time: few enough to stay in the cores' caches.
SORTED_AT_ONCE = 1 << 20
# How many more than k are looked at exactly, of those that come first by their leading bits.
SPARE = 8


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the numbers (…, k) of the largest of ``scores`` (…, n), best first.

    Of equal scores the one with the smaller number goes first, which ``torch.topk`` leaves open.
    """
    n = scores.size(-1)
    if k == n:
        return scores.argsort(dim=-1, descending=True, stable=True)
    rows = scores.reshape(-1, n)
    vectorised = rows.device.type == "cpu" and rows.dtype == torch.float32
    if vectorised and n >= 2 * (k + SPARE):
        parts = rows.split(max(1, SORTED_AT_ONCE // n))
        found = [_by_leading_bits(part.contiguous(), k) for part in parts]
        best, sure = (torch.cat(column) for column in zip(*found, strict=True))
    else:
        best, sure = _by_topk(rows, k)
    if not sure.all():
        in_order = rows[~sure].argsort(dim=-1, descending=True, stable=True)
        best = best.masked_scatter(~sure.unsqueeze(-1), in_order[:, :k])
    return best.view(*scores.shape[:-1], k)


def _by_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the numbers (R, k), and in which rows (R,) no equal scores leave them open."""
    # one more than asked for: it shows whether another has the score of the last
    values, best = scores.topk(k + 1, dim=-1)
    return best[:, :k], _all_differ(values)


def _by_leading_bits(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the same from a sort of single-precision numbers, several times as fast as topk.

    numpy sorts numbers with vector instructions, but not their places. So the place takes that of
    the last bits of the number; the first k + SPARE are looked at exactly, and a row is sure if its
    k-th exceeds whatever numbers the others may have had.
    """
    n = scores.size(1)
    place_bits = (1 << (n - 1).bit_length()) - 1
    tagged = torch.bitwise_and(scores.view(torch.int32), ~place_bits)
    tagged.bitwise_or_(torch.arange(n, dtype=torch.int32))
    # in one thread: others would wait for a core that torch's own threads hold for a while
    tagged.view(torch.float32).numpy().sort(axis=1)
    # (R, n) -> (R, m)
    leading = tagged[:, n - k - SPARE :]
    places = leading.bitwise_and(place_bits).long()
    values, order = scores.gather(1, places).topk(k + 1, dim=-1)
    least = leading[:, 0]
    # of positive numbers the last bits add, of negative ones they take away
    bound = torch.where(least >= 0, least | place_bits, least & ~place_bits).view(torch.float32)
    sure = _all_differ(values) & (values[:, k - 1] > bound)
    # an infinite number and its place make a NaN, which is sorted to the end and loses the place
    return places.gather(1, order[:, :k]), sure & ~leading[:, -1].view(torch.float32).isnan()


def _all_differ(falling: Tensor) -> Tensor:
    return (falling[:, 1:] < falling[:, :-1]).all(-1)
