"""Lazy Adam: the rows of a table that were read take a step of Adam, all others rest.

The rule is the one that torch calls SparseAdam: ::

    of the rows that were read:  m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
                                 p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)
    of all others:               nothing

where t counts the updates, of whichever rows. A row of a padded gradient (:mod:`.values`), as
accelerators have it, counts as read if its gradient is not zero. Where every row is read at each
update this is fairseq's Adam: bit for bit by torch's operations (:func:`update_rows`), up to
rounding in the loop that a CPU runs. Weight decay acts on the rows that were read.

Shapes: K rows of a table, d width, U rows of a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.bf16_values import RowMoments, update_rounded_rows
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba
from fairseq_plugins.product_key_memory.sharding import (
    MemoryTable,
    gather_columns,
    rows_of_any_worker,
)
from fairseq_plugins.product_key_memory.values import merge_rows, repeat_first

# Numbers of a table that are updated at a time: enough to keep the device busy, with small copies.
UPDATED_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
# What of a table's state has its columns.
_OF_COLUMNS = ("exp_avg", "exp_avg_sq", "master")


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


class LazyAdam:
    """Updates tables of values with sparse gradients, and keeps their moments.

    The state of a table is ``step``, ``exp_avg`` and ``exp_avg_sq`` (K, d), in single precision,
    and for a table of lower precision ``master``, its values in single precision. A table that is
    rounded (see :mod:`.bf16_values`) has ``step`` and ``moments``, a :class:`.RowMoments`, which
    :meth:`state_dict` turns into ``rows`` (T,), rising, ``exp_avg`` and ``exp_avg_sq`` (T, d). That
    of a sharded table (see :mod:`.sharding`) is of its own columns.

    Args:
        tables: their values (K, d) have sparse gradients, coalesced or padded.
        lr: learning rate.
        weight_decay: of the rows that were read.
    """

    def __init__(self, tables: list[MemoryTable], lr: float, weight_decay: float) -> None:
        self.tables = tables
        self.lr = lr
        self.weight_decay = weight_decay
        self.state: list[dict[str, Any]] = [{} for _ in tables]
        self._gathered: list[dict[str, Any]] | None = None

    @torch.no_grad()
    def update(self, betas: tuple[float, float], eps: float, scale: Tensor) -> None:
        """Take a step with the gradients of the tables, multiplied by ``scale``, and clear them."""
        for table, state in zip(self.tables, self.state, strict=True):
            values = table.values
            grad, values.grad = values.grad, None
            if grad is not None:
                self._start(state, table)
                self._update_rows(table, state, grad, betas, eps, scale.to(values.device))
                if table.spare is not None:
                    table.spare.give_back(grad._values())

    def _start(self, state: dict[str, Any], table: MemoryTable) -> None:
        values = table.values
        if table.rounded:
            if not state:
                state.update(step=0, moments=RowMoments(*values.shape, values.device))
            return
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(values, dtype=torch.float32)
        if values.dtype != torch.float32 and "master" not in state:
            state["master"] = values.detach().float()

    def _update_rows(
        self,
        table: MemoryTable,
        state: dict[str, Any],
        grad: Tensor,
        betas: tuple[float, float],
        eps: float,
        scale: Tensor,
    ) -> None:
        state["step"] += 1
        correction1, correction2 = (1 - beta ** state["step"] for beta in betas)
        values, moments = table.values, state.get("moments")
        padded = not grad.is_coalesced()
        if moments is not None and padded:
            grad, padded = merge_rows(grad), False
        # the values in single precision, or what has their precision during an update
        exact = state.get("master", values) if moments is None else moments.exp_avg
        rule = functools.partial(update_rows, padded=padded)
        if use_numba(exact) and not padded:
            rule = cpu_kernels.update_rows
        rule = functools.partial(
            rule,
            betas=betas,
            scale=scale,
            decay=self.weight_decay * self.lr,
            step_size=self.lr * correction2**0.5 / correction1,
            eps=eps,
        )
        numbers = UPDATED_AT_ONCE.get(values.device.type, UPDATED_AT_ONCE["cuda"])
        length = max(1, numbers // values.size(1))
        listed, of_listed = grad._indices()[0], grad._values()
        if moments is not None:
            column = 0 if table.shard is None else table.shard.start
            update_rounded_rows(
                values, moments, listed, of_listed, rule, state["step"], column, length
            )
            return
        for rows, grads in zip(listed.split(length), of_listed.split(length), strict=True):
            rule(exact, state["exp_avg"], state["exp_avg_sq"], rows, grads.float())
            if exact is not values:
                values.index_copy_(0, rows, exact.index_select(0, rows).to(values.dtype))

    def gather(self) -> None:
        """Gather sharded tables and their state on worker 0, for one ``state_dict()`` of each.

        All workers must call it.
        """
        self._gathered = []
        for table, state in zip(self.tables, self.state, strict=True):
            table.gather()
            if table.shard is not None:
                # where a row was read, all workers agree, but for gradients that are rounded to 0
                state = _saved(state, rows_of_any_worker)
                state = {
                    name: gather_columns(value) if name in _OF_COLUMNS else value
                    for name, value in state.items()
                }
            self._gathered.append(state)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each table, with all columns of sharded ones.

        Raises:
            ValueError: a table is sharded, and :meth:`gather` was not called.
        """
        if not any(table.shard is not None for table in self.tables):
            return [_saved(state) for state in self.state]
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise ValueError(
                "a memory's values are sharded over workers: call consolidate_state_dict() on all "
                "of them before state_dict() on worker 0"
            )
        return gathered

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the states of all tables, in single precision whatever the tables have.

        Raises:
            ValueError: it is of other tables.
        """
        if len(states) != len(self.tables):
            raise ValueError(
                f"the checkpoint's optimizer state is of {len(states)} memories, and the model has "
                f"{len(self.tables)}: give --reset-optimizer"
            )
        self.state = [
            self._loaded(saved, table) for saved, table in zip(states, self.tables, strict=True)
        ]

    def _loaded(self, saved: dict[str, Any], table: MemoryTable) -> dict[str, Any]:
        if not saved:
            return {}
        values, shard = table.values, table.shard
        length, width = saved["exp_avg"].shape
        shape = saved.get("slots", length), width
        if shape != table.shape:
            raise ValueError(
                "the checkpoint's optimizer state is of a memory with values of shape "
                f"{shape}, here {table.shape}: give --reset-optimizer"
            )
        state: dict[str, Any] = {"step": int(saved["step"])}
        # cut before they are moved: the whole may not fit on the device
        own = {
            name: saved[name] if shard is None else shard.of(saved[name])
            for name in _OF_COLUMNS
            if name in saved
        }
        rows = saved.get("rows")
        if table.rounded:
            if rows is None:
                rows = saved["exp_avg_sq"].any(-1).nonzero().flatten()
                own = {name: value[rows.to(value.device)] for name, value in own.items()}
            state["moments"] = RowMoments(*values.shape, values.device)
            state["moments"].set(rows, own["exp_avg"], own["exp_avg_sq"])
            return state
        for name, value in own.items():
            if rows is not None:
                value = value.new_zeros(values.shape).index_copy_(0, rows.to(value.device), value)
            if name != "master" or values.dtype != torch.float32:
                state[name] = value.to(values.device, torch.float32, copy=rows is None)
        return state


def _saved(
    state: dict[str, Any], choose: Callable[[Tensor], Tensor] = lambda read: read
) -> dict[str, Any]:
    """Return a table's state for a checkpoint.

    Args:
        state: of the table.
        choose: maps which rows have moments, (K,), to those that are to be saved.
    """
    if "moments" not in state:
        return state
    read = choose(state["moments"].read())
    rows = read.nonzero().flatten()
    mean, square = state["moments"].of(rows)
    return {
        "step": state["step"],
        "slots": len(read),
        "rows": rows,
        "exp_avg": mean,
        "exp_avg_sq": square,
    }
