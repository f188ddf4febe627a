"""Values in bfloat16: they are rounded at random, and only rows that were read have moments.

A step of Adam is often smaller than half of what bfloat16 can add to a value (1/256 of it).
Rounding to the nearest number would drop it, each time. Rounding up or down at random, up as
often as the number is near to the upper one, keeps the sum of many steps on average: no copy in
single precision is needed.

The random bits are a hash of row, column and update. So they are the same on all workers, for the
columns of a shard, on every device, and when a training resumes.

Shapes: K rows of a table, d width, U rows of a gradient, T rows that were read at least once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def round_at_random(x: Tensor, rows: Tensor, update: int, first_column: int = 0) -> Tensor:
    """Return ``x`` (U, d) in bfloat16: one of the two numbers next to each, ``x`` on average.

    Args:
        x: in single precision.
        rows: of the table, (U,).
        update: number of the update.
        first_column: of the table, that of the first column of ``x``.
    """
    columns = torch.arange(first_column, first_column + x.size(1), device=x.device)
    of_rows = _mix((rows * 0x9E3779B1 + update * 0x85EBCA77).int())
    bits = _mix(of_rows.unsqueeze(1) + (columns * 0xC2B2AE3D).int())
    # bfloat16 is the upper half of the bits: what is added to the lower half carries, or does not
    bits.bitwise_and_(0xFFFF).add_(x.view(torch.int32)).bitwise_and_(-0x10000)
    return bits.view(torch.float32).bfloat16()


def _mix(x: Tensor) -> Tensor:
    """Return a hash of integers of 32 bits, each bit of which depends on all (MurmurHash3's)."""
    for shift, factor in ((16, 0x85EBCA6B - (1 << 32)), (13, 0xC2B2AE35 - (1 << 32))):
        x = x.bitwise_xor((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


class RowMoments:
    """Both moments of Adam, in single precision, of the rows of a table that were read.

    Args:
        slots: K.
        width: d.
        device: of the table.

    Attributes:
        exp_avg: the first moment, of each row at its place; places beyond ``count`` are free.
        exp_avg_sq: the second one.
        count: T.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.exp_avg = torch.empty(0, width, device=device)
        self.exp_avg_sq = torch.empty(0, width, device=device)
        self.count = 0
        self._places = torch.full((slots,), -1, dtype=torch.int32, device=device)

    def places(self, rows: Tensor) -> Tensor:
        """Return where the moments of ``rows`` (U,), each once, are: (U,).

        New rows get moments of zero; the host waits for their number.
        """
        places = self._places[rows].long()
        new = places < 0
        count = self.count + int(new.sum())
        if count > self.count:
            self._reserve(count)
            places[new] = torch.arange(self.count, count, device=rows.device)
            self._places[rows] = places.int()
            for moment in (self.exp_avg, self.exp_avg_sq):
                moment[self.count : count] = 0
            self.count = count
        return places

    def _reserve(self, count: int) -> None:
        if count > len(self.exp_avg):
            size = reserved(count, len(self._places), self._places.device)
            for name in ("exp_avg", "exp_avg_sq"):
                old = getattr(self, name)
                new = old.new_empty(size, old.size(1))
                new[: self.count] = old[: self.count]
                setattr(self, name, new)

    def read(self) -> Tensor:
        """Return which rows have moments, (K,)."""
        return self._places >= 0

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the moments of ``rows`` (U,), (U, d) each: 0 for those without."""
        places = self._places[rows].long()
        missing = (places < 0).unsqueeze(1)
        moments = (self.exp_avg, self.exp_avg_sq)
        return tuple(x[places.clamp(min=0)].masked_fill_(missing, 0) for x in moments)

    def set(self, rows: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Give ``rows`` (U,) moments (U, d) each, whatever their dtype and device."""
        places = self.places(rows.to(self._places.device))
        self.exp_avg[places] = exp_avg.to(self.exp_avg)
        self.exp_avg_sq[places] = exp_avg_sq.to(self.exp_avg_sq)


def reserved(count: int, slots: int, device: torch.device) -> int:
    """Return for how many rows to reserve memory when ``count`` of ``slots`` need it."""
    if device.type == "cpu":
        # the system gives memory where it is first written
        return slots
    # somewhat more than needed, since all must be copied then
    return min(count + count // 4, slots)


def update_rounded_rows(
    values: Tensor,
    moments: RowMoments,
    rows: Tensor,
    grads: Tensor,
    rule: Callable[..., None],
    update: int,
    first_column: int,
    length: int,
) -> None:
    """Update ``values`` (K, d), in bfloat16, and ``moments`` in the rows that were read.

    Args:
        values: the table.
        moments: of its rows.
        rows: (U,), each once.
        grads: (U, d).
        rule: updates values, both moments, and takes rows and gradients, all in single precision.
        update: number of the update.
        first_column: of the whole table, that of the first column of ``values``.
        length: number of rows to update at a time.
    """
    places = moments.places(rows)
    parts = (x.split(length) for x in (rows, places, grads))
    for rows, places, grads in zip(*parts, strict=True):
        value = values.index_select(0, rows).float()
        mean, square = (x.index_select(0, places) for x in (moments.exp_avg, moments.exp_avg_sq))
        every = torch.arange(len(rows), device=rows.device)
        rule(value, mean, square, every, grads.float())
        moments.exp_avg.index_copy_(0, places, mean)
        moments.exp_avg_sq.index_copy_(0, places, square)
        values.index_copy_(0, rows, round_at_random(value, rows, update, first_column))
