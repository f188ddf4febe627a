"""Lazy Adam: rows of a table that were read take a step of Adam, all other rows stay.

The rule is that of torch's SparseAdam with the weight decay of fairseq's Adam. For each row that
was read, with t the number of updates so far, of any rows: ::

    m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
    p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

A row of a padded gradient (:mod:`.values`) counts as read if its gradient is not zero. If every row
is read, :func:`update_rows` equals fairseq's Adam bit for bit, and the CPU's loop up to rounding.

Values that stay in bfloat16 are rounded at random. Most steps are smaller than half the distance
between two bfloat16 numbers, and rounding to the nearest would lose them all. Random rounding keeps
their sum on average, without a copy in single precision. The random bits are a hash of row, column
and update, so all workers, devices and resumed trainings draw the same ones.

Shapes: K rows of a table, d width, U rows of a gradient, T rows that were read at least once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba
from fairseq_plugins.product_key_memory.sharding import AllColumns
from fairseq_plugins.product_key_memory.values import merge_rows, repeat_first

# How many numbers of a table are updated at a time: enough to keep the device busy.
UPDATED_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
MOMENTS = ("exp_avg", "exp_avg_sq")


class Moments:
    """Adam's two moments of all rows, (K, d) in single precision, and the number of updates.

    ``master`` is a copy in single precision of values that have less.
    """

    def __init__(self, values: Tensor, columns: AllColumns) -> None:
        self.columns = columns
        self.step = 0
        self.master: Tensor | None = None
        self.start(values)

    def start(self, values: Tensor) -> None:
        """Start with moments of zero."""
        self.exp_avg, self.exp_avg_sq = (
            torch.zeros_like(values, dtype=torch.float32) for _ in MOMENTS
        )

    def update(self, values: Tensor, grad: Tensor, **numbers: Any) -> None:
        """Take a step with ``grad``, sparse (K, d); ``numbers`` go to :func:`update_rows`."""
        if values.dtype != torch.float32 and self.master is None:
            self.master = values.detach().float()
        exact = values if self.master is None else self.master
        rule = choose_rule(exact, not grad.is_coalesced(), numbers)
        for rows, grads in split_rows(grad._indices()[0], grad._values()):
            rule(exact, self.exp_avg, self.exp_avg_sq, rows, grads.float())
            if exact is not values:
                values.index_copy_(0, rows, exact.index_select(0, rows).to(values.dtype))

    def save(self) -> dict[str, Any]:
        """Return the state for a checkpoint, all columns on worker 0; all workers must call it."""
        saved = {name: self.columns.gather(getattr(self, name)) for name in MOMENTS}
        if self.master is not None:
            saved["master"] = self.columns.gather(self.master)
        return {"step": self.step, **saved}

    def load(self, values: Tensor, saved: dict[str, Any]) -> None:
        """Load what :meth:`save` has saved."""
        copied = "master" in saved and values.dtype != torch.float32
        for name in (*MOMENTS, "master") if copied else MOMENTS:
            # take this worker's columns first: all columns may not fit on the device
            value = self.columns.own(saved[name])
            setattr(self, name, value.to(values.device, torch.float32, copy=True))


class MomentsOfReadRows(Moments):
    """Moments of the rows of a bfloat16 table that were ever read, in the order of first reads."""

    def start(self, values: Tensor) -> None:
        """Start without moments."""
        self.exp_avg, self.exp_avg_sq = (
            torch.empty(0, values.size(1), device=values.device) for _ in MOMENTS
        )
        self.count = 0
        self._places = torch.full((len(values),), -1, dtype=torch.int32, device=values.device)

    def update(self, values: Tensor, grad: Tensor, **numbers: Any) -> None:
        """Take a step with ``grad``, as :class:`Moments` does."""
        if not grad.is_coalesced():
            grad = merge_rows(grad)
        read = grad._indices()[0]
        places_of_read = self.places(read)
        rule = choose_rule(self.exp_avg, False, numbers)
        for rows, places, grads in split_rows(read, places_of_read, grad._values()):
            value = values.index_select(0, rows).float()
            mean, square = (x.index_select(0, places) for x in (self.exp_avg, self.exp_avg_sq))
            every = torch.arange(len(rows), device=rows.device)
            rule(value, mean, square, every, grads.float())
            self.exp_avg.index_copy_(0, places, mean)
            self.exp_avg_sq.index_copy_(0, places, square)
            rounded = round_at_random(value, rows, self.step, self.columns.start)
            values.index_copy_(0, rows, rounded)

    def places(self, rows: Tensor) -> Tensor:
        """Return the places (U,) of the moments of distinct ``rows`` (U,).

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
        if count <= len(self.exp_avg):
            return
        slots = len(self._places)
        # A CPU only allocates memory that is written to. Elsewhere, reserve a little more than is
        # needed, since each growth copies everything.
        on_cpu = self._places.device.type == "cpu"
        size = slots if on_cpu else min(count + count // 4, slots)
        for name in MOMENTS:
            old = getattr(self, name)
            new = old.new_empty(size, old.size(1))
            new[: self.count] = old[: self.count]
            setattr(self, name, new)

    def save(self) -> dict[str, Any]:
        """Return the state: ``rows`` (T,), rising, and their moments (T, d)."""
        # workers agree on which rows were read, except where a gradient is rounded to 0
        rows = self.columns.rows_of_any_worker(self._places >= 0).nonzero().flatten()
        places = self._places[rows].long()
        missing = (places < 0).unsqueeze(1)
        saved = {
            name: self.columns.gather(
                getattr(self, name)[places.clamp(min=0)].masked_fill_(missing, 0)
            )
            for name in MOMENTS
        }
        return {"step": self.step, "slots": len(self._places), "rows": rows, **saved}

    def load(self, values: Tensor, saved: dict[str, Any]) -> None:
        """Load what :meth:`save` has saved."""
        places = self.places(saved["rows"].to(self._places.device))
        for name in MOMENTS:
            getattr(self, name)[places] = self.columns.own(saved[name]).to(self.exp_avg)


def split_rows(rows: Tensor, *lists: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of U rows, the last one (U, d), into parts to update one at a time."""
    numbers = UPDATED_AT_ONCE.get(rows.device.type, UPDATED_AT_ONCE["cuda"])
    length = max(1, numbers // lists[-1].size(1))
    return zip(*(x.split(length) for x in (rows, *lists)), strict=True)


def choose_rule(exact: Tensor, padded: bool, numbers: dict[str, Any]) -> Callable[..., None]:
    """Return the fastest rule for values like ``exact``, in single precision."""
    if use_numba(exact) and not padded:
        return functools.partial(cpu_kernels.update_rows, **numbers)
    return functools.partial(update_rows, padded=padded, **numbers)


def update_rows(
    values: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    betas: tuple[float, float],
    scale: Tensor,
    decay: float,
    step_size: float,
    eps: float,
    padded: bool = False,
) -> None:
    """Update the ``rows`` (U,), which rise, of ``values`` and both moments, (K, d) in fp32.

    Gradients ``grads`` (U, d) are multiplied by ``scale``. ``decay`` is the part of the values that
    is subtracted first, ``step_size`` is lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ). If ``padded``, a row may
    occur several times, and rows whose gradient is zero stay as they are.
    """
    read = None
    if padded:
        grads = repeat_first(rows, grads)
        read = grads.ne(0).any(-1, keepdim=True)

    def write(table: Tensor, new: Tensor) -> None:
        if read is not None:
            new = torch.where(read, new, table.index_select(0, rows))
        table.index_copy_(0, rows, new)

    grads = grads * scale
    mean, square, value = (x.index_select(0, rows) for x in (exp_avg, exp_avg_sq, values))
    mean.mul_(betas[0]).add_(grads, alpha=1 - betas[0])
    square.mul_(betas[1]).addcmul_(grads, grads, value=1 - betas[1])
    write(exp_avg, mean)
    write(exp_avg_sq, square)
    if decay > 0:
        value.add_(value, alpha=-decay)
    value.addcdiv_(mean, square.sqrt_().add_(eps), value=-step_size)
    write(values, value)


def round_at_random(x: Tensor, rows: Tensor, update: int, first_column: int = 0) -> Tensor:
    """Round ``x`` (U, d), fp32, up or down to bfloat16 at random, so that the mean is ``x``.

    ``x`` has the ``rows`` (U,) of the table, from ``first_column`` on.
    """
    columns = torch.arange(first_column, first_column + x.size(1), device=x.device)
    of_rows = _mix((rows * 0x9E3779B1 + update * 0x85EBCA77).int())
    bits = _mix(of_rows.unsqueeze(1) + (columns * 0xC2B2AE3D).int())
    # bfloat16 is the upper half of the bits; adding to the lower half carries or does not
    bits.bitwise_and_(0xFFFF).add_(x.view(torch.int32)).bitwise_and_(-0x10000)
    return bits.view(torch.float32).bfloat16()


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers (the last steps of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B - (1 << 32)), (13, 0xC2B2AE35 - (1 << 32))):
        x = x.bitwise_xor((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
