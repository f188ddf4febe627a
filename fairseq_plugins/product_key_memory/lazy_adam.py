"""Lazy Adam: the rows of a table that were read take a step of Adam, all others rest.

The rule is the one that torch calls SparseAdam: ::

    of the rows that were read:  m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
                                 p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)
    of all others:               nothing

where t counts the updates, of whichever rows. A row of a padded gradient (:mod:`.values`), as
accelerators have it, counts as read if its gradient is not zero. Where every row is read at each
update this is fairseq's Adam: bit for bit by torch's operations (:func:`update_rows`), up to
rounding in the loop that a CPU runs. Weight decay acts on the rows that were read.

Values that stay in bfloat16 are rounded at random. A step is often smaller than half of what
bfloat16 can add to a value (1/256 of it); rounding to the nearest number would drop it, each time.
Rounding up or down at random, up as often as the number is near to the upper one, keeps the sum of
many steps on average, without a copy in single precision. The random bits are a hash of row, column
and update: the same on all workers, for the columns of a shard, on every device, and when a
training resumes.

Shapes: K rows of a table, d width, U rows of a gradient, T rows that were read at least once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba
from fairseq_plugins.product_key_memory.value_table import ValueTable
from fairseq_plugins.product_key_memory.values import merge_rows, repeat_first

# Numbers of a table that are updated at a time: enough to keep the device busy, with small copies.
UPDATED_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}

# updates values, both moments (K, d), and takes rows (U,) and gradients (U, d)
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


class LazyAdam:
    """Updates tables with sparse gradients, coalesced or padded, and keeps their moments."""

    def __init__(self, tables: list[ValueTable], lr: float, weight_decay: float) -> None:
        self.tables = tables
        self.lr = lr
        self.weight_decay = weight_decay
        # None for a table before its first update
        self.moments: list[Moments | None] = [None] * len(tables)
        self._gathered: list[dict[str, Any]] | None = None

    @torch.no_grad()
    def update(self, betas: tuple[float, float], eps: float, scale: Tensor) -> None:
        """Take a step with the gradients of the tables, multiplied by ``scale``, and clear them."""
        for number, table in enumerate(self.tables):
            grad = table.take_gradient()
            if grad is None:
                continue
            if self.moments[number] is None:
                self.moments[number] = start_moments(table)
            moments = self.moments[number]
            moments.step += 1
            correction1, correction2 = (1 - beta**moments.step for beta in betas)
            moments.update(
                grad,
                betas=betas,
                scale=scale.to(grad.device),
                decay=self.weight_decay * self.lr,
                step_size=self.lr * correction2**0.5 / correction1,
                eps=eps,
            )
            table.give_back(grad)

    def gather(self) -> None:
        """Gather the columns of sharded tables and their state on worker 0, for one save.

        All workers must call it.
        """
        for table in self.tables:
            table.gather()
        self._gathered = self._saved()

    def _saved(self) -> list[dict[str, Any]]:
        return [{} if moments is None else moments.save() for moments in self.moments]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each table, with all columns."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            if any(table.columns.sharded for table in self.tables):
                raise ValueError(
                    "a memory's values are sharded over workers: call consolidate_state_dict() on "
                    "all of them before state_dict() on worker 0"
                )
            gathered = self._saved()
        return gathered

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the states of all tables, in single precision whatever the tables have."""
        if len(states) != len(self.tables):
            raise ValueError(
                f"the checkpoint's optimizer state is of {len(states)} memories, and the model has "
                f"{len(self.tables)}: give --reset-optimizer"
            )
        self.moments = [
            start_moments(table, saved) if saved else None
            for saved, table in zip(states, self.tables, strict=True)
        ]


def start_moments(table: ValueTable, saved: dict[str, Any] | None = None) -> Moments:
    """Return moments of a table: zero, or those that any kind of table has ``saved``."""
    moments = (RoundedRows if table.stays_bf16 else Moments)(table)
    if saved is None:
        moments.start()
        return moments
    length, width = saved["exp_avg"].shape
    shape = saved.get("slots", length), width
    if shape != table.shape:
        raise ValueError(
            "the checkpoint's optimizer state is of a memory with values of shape "
            f"{shape}, here {table.shape}: give --reset-optimizer"
        )
    moments.step = int(saved["step"])
    moments.load(saved)
    return moments


class Moments:
    """Both moments of Adam of all rows (K, d), in single precision.

    Values of lower precision also have ``master``, a copy in single precision.
    """

    def __init__(self, table: ValueTable) -> None:
        self.table = table
        self.step = 0
        self.master: Tensor | None = None

    def start(self) -> None:
        """Start with moments of zero."""
        for name in ("exp_avg", "exp_avg_sq"):
            setattr(self, name, torch.zeros_like(self.table.values, dtype=torch.float32))

    def update(self, grad: Tensor, **numbers: Any) -> None:
        """Take a step with ``grad``, sparse (K, d); see :func:`update_rows` for ``numbers``."""
        values = self.table.values
        if values.dtype != torch.float32 and self.master is None:
            self.master = values.detach().float()
        exact = values if self.master is None else self.master
        padded = not grad.is_coalesced()
        rule = choose_rule(exact, padded, numbers)
        for rows, grads in self._parts(grad._indices()[0], grad._values()):
            rule(exact, self.exp_avg, self.exp_avg_sq, rows, grads.float())
            if exact is not values:
                values.index_copy_(0, rows, exact.index_select(0, rows).to(values.dtype))

    def _parts(self, *lists: Tensor) -> Any:
        """Split ``lists``, of U each, into parts that are updated at a time."""
        values = self.table.values
        numbers = UPDATED_AT_ONCE.get(values.device.type, UPDATED_AT_ONCE["cuda"])
        length = max(1, numbers // values.size(1))
        return zip(*(x.split(length) for x in lists), strict=True)

    def save(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with all columns: on worker 0, all must call it."""
        saved = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "master": self.master}
        gather = self.table.columns.gather
        return {
            "step": self.step,
            **{name: gather(value) for name, value in saved.items() if value is not None},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`save` or that of :class:`RoundedRows` has saved."""
        values, rows = self.table.values, saved.get("rows")
        names = ["exp_avg", "exp_avg_sq"]
        if "master" in saved and values.dtype != torch.float32:
            names.append("master")
        for name in names:
            # cut before it is moved: the whole may not fit on the device
            value = self.table.loaded(saved[name])
            if rows is not None:
                value = value.new_zeros(values.shape).index_copy_(0, rows.to(value.device), value)
            setattr(self, name, value.to(values.device, torch.float32, copy=rows is None))


class RoundedRows(Moments):
    """Moments of a table that stays in bfloat16, of those rows alone that were read.

    Attributes:
        exp_avg: the first moment, of each row at its place; places beyond ``count`` are free.
        exp_avg_sq: the second one.
        count: T.
    """

    def start(self) -> None:
        """Start without moments."""
        values = self.table.values
        self.exp_avg, self.exp_avg_sq = (
            torch.empty(0, values.size(1), device=values.device) for _ in range(2)
        )
        self.count = 0
        self._places = torch.full((len(values),), -1, dtype=torch.int32, device=values.device)

    def update(self, grad: Tensor, **numbers: Any) -> None:
        """Take a step with ``grad``, sparse (K, d); see :func:`update_rows` for ``numbers``."""
        if not grad.is_coalesced():
            grad = merge_rows(grad)
        values, touched = self.table.values, grad._indices()[0]
        places_of = self.places(touched)
        rule = choose_rule(self.exp_avg, False, numbers)
        for rows, places, grads in self._parts(touched, places_of, grad._values()):
            value = values.index_select(0, rows).float()
            mean, square = (x.index_select(0, places) for x in (self.exp_avg, self.exp_avg_sq))
            every = torch.arange(len(rows), device=rows.device)
            rule(value, mean, square, every, grads.float())
            self.exp_avg.index_copy_(0, places, mean)
            self.exp_avg_sq.index_copy_(0, places, square)
            rounded = round_at_random(value, rows, self.step, self.table.columns.start)
            values.index_copy_(0, rows, rounded)

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
        if count <= len(self.exp_avg):
            return
        slots = len(self._places)
        # on a CPU the system gives memory where it is first written; elsewhere take somewhat more
        # than needed, since all must be copied then
        on_cpu = self._places.device.type == "cpu"
        size = slots if on_cpu else min(count + count // 4, slots)
        for name in ("exp_avg", "exp_avg_sq"):
            old = getattr(self, name)
            new = old.new_empty(size, old.size(1))
            new[: self.count] = old[: self.count]
            setattr(self, name, new)

    def save(self) -> dict[str, Any]:
        """Return the state, of ``rows`` (T,), rising: moments (T, d)."""
        columns = self.table.columns
        # where a row was read all workers agree, but for gradients that are rounded to 0
        rows = columns.rows_of_any_worker(self._places >= 0).nonzero().flatten()
        places = self._places[rows].long()
        missing = (places < 0).unsqueeze(1)
        mean, square = (
            columns.gather(x[places.clamp(min=0)].masked_fill_(missing, 0))
            for x in (self.exp_avg, self.exp_avg_sq)
        )
        return {
            "step": self.step,
            "slots": len(self._places),
            "rows": rows,
            "exp_avg": mean,
            "exp_avg_sq": square,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`save` or that of :class:`Moments` has saved."""
        self.start()
        rows = saved.get("rows")
        moments = [self.table.loaded(saved[name]) for name in ("exp_avg", "exp_avg_sq")]
        if rows is None:
            rows = saved["exp_avg_sq"].any(-1).nonzero().flatten()
            moments = [moment[rows.to(moment.device)] for moment in moments]
        places = self.places(rows.to(self._places.device))
        self.exp_avg[places], self.exp_avg_sq[places] = (x.to(self.exp_avg) for x in moments)


def choose_rule(exact: Tensor, padded: bool, numbers: dict[str, Any]) -> Rule:
    """Return the rule for values in single precision like ``exact``, with its ``numbers``."""
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
    """Update ``values``, ``exp_avg`` and ``exp_avg_sq``, all (K, d), in the rows that were read.

    Args:
        values: in single precision, as all are.
        exp_avg: the first moment.
        exp_avg_sq: the second.
        rows: (U,), rising, each once unless they are padded.
        grads: (U, d).
        betas: β₁ and β₂.
        scale: factor of the gradients, a tensor of one number.
        decay: part of the values that is taken off before the step.
        step_size: lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ).
        eps: ε.
        padded: rows may occur again, and those whose gradient is zero rest.
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
    """Return ``x`` (U, d) in bfloat16: one of the two numbers next to each, ``x`` on average.

    ``x`` are ``rows`` (U,) of the table, in single precision, from its ``first_column`` on.
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
