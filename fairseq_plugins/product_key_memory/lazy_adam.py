"""Values that only lazy Adam sees, and its steps, which change only the rows that were read.

It is the rule of torch's SparseAdam with the weight decay of fairseq's Adam; t is the number of
updates so far, of any rows: ::

    m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
    p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

If every row is read, :func:`adam_step` equals fairseq's Adam bit for bit, and the CPU's loop up to
rounding.

Shapes: N tokens, R rows read by a token, K rows of a table, d width, U rows of a gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.search import cpu_loops, needs_plain_operations
from fairseq_plugins.product_key_memory.values import NO_ROW, Values, rows_as_gradient

# How many numbers of a table are updated at a time: enough to keep the device busy.
UPDATED_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
MOMENTS = ("exp_avg", "exp_avg_sq")


class LazyValues(Values):
    """Values that require no gradient, and still get a sparse one in training.

    A backward pass adds it to ``weight.grad``. Once this is None again, the next gradient may use
    its memory: copy a gradient to keep it.
    """

    def __init__(self, slots: int, width: int, kernel: str = "fast", sparse: bool = True) -> None:
        super().__init__(slots, width, kernel, sparse=True)
        self.weight.requires_grad_(False)
        # For gradients of rows: a CPU takes longer to get new memory than to compute the gradient
        # (a fifth of a training step with 512² slots).
        self.buffer: Tensor | None = None

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sums (N, d) of equation 3; ``rows`` and ``weights`` are (N, R)."""
        table = self.weight
        if self.training and torch.is_grad_enabled():
            # a leaf of autograd that stands for the values in this pass
            table = table.detach().requires_grad_()
            plain = needs_plain_operations(self.kernel, weights)
            table.register_post_accumulate_grad_hook(partial(self._add_gradient, plain))
        return self.weighted_sum(table, rows, weights)

    def _add_gradient(self, plain: bool, leaf: Tensor) -> None:
        """Add the sparse gradient of ``leaf`` to that of the values."""
        grad, leaf.grad = leaf.grad, None
        rows, grads = grad._indices()[0], grad._values()
        if plain and not grad.is_meta:
            # a row for each read, also of tokens without a gradient
            rows = rows.masked_fill(grads.eq(0).all(-1), NO_ROW)
            rows, grads = self.row_gradients(rows[:, None], grads.new_ones(len(rows), 1), grads)
        if self.weight.grad is not None:
            # on a GPU torch would only concatenate them, and soon hold more rows than the table
            rows = torch.cat([self.weight.grad._indices()[0], rows])
            grads = torch.cat([self.weight.grad._values(), grads])
            rows, grads = self.row_gradients(rows[:, None], grads.new_ones(len(rows), 1), grads)
        self.weight.grad = rows_as_gradient(rows, grads, grad.shape)

    def segment_sum(self, grad: Tensor, tokens: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
        """Do what :meth:`.Values.segment_sum` does, on a CPU in the buffer if it is free."""
        loops, count, room = cpu_loops(grad), len(starts), self.buffer
        if loops is None:
            return super().segment_sum(grad, tokens, weights, starts)
        free = self.weight.grad is None and room is not None and room.dtype == grad.dtype
        if room is None or not free or len(room) < count:
            # free the old memory first; the new one has some rows to spare
            self.buffer = room = None
            room = grad.new_empty(min(count + count // 8, len(self.weight)), grad.size(1))
            self.buffer = room
        ends = F.pad(starts, (0, 1), value=len(tokens))
        loops.run("segment_sum", grad, tokens, weights, ends, room[:count])
        return room[:count]


class LazyMemory(ProductKeyMemory):
    """A memory with :class:`LazyValues`, to which ``optim_overrides`` of its keys leads."""

    values_class = LazyValues

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mark_keys()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; torch copies parameters without their attributes."""
        super().__setstate__(state)
        self._mark_keys()

    def _mark_keys(self) -> None:
        # Optimizers see only parameters that require a gradient, and every memory has keys.
        # fairseq's copies in single precision have this attribute, too.
        keys = next(self.keys.parameters())
        keys.optim_overrides = {"optimizer": {"memory_values": self.values}}


class LazyAdam:
    """Adam's moments of a table of values, (K, d) in single precision, and the number of updates.

    ``master`` is a copy in single precision of values that have less.
    """

    def __init__(self, values: Tensor) -> None:
        self.step = 0
        self.exp_avg, self.exp_avg_sq = (
            torch.zeros_like(values, dtype=torch.float32) for _ in MOMENTS
        )
        self.master = None if values.dtype == torch.float32 else values.detach().float()

    def update(
        self,
        values: Tensor,
        grad: Tensor,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        scale: Tensor,
    ) -> None:
        """Take a step with ``scale`` times ``grad``, sparse (K, d)."""
        self.step += 1
        correction1, correction2 = (1 - beta**self.step for beta in betas)
        exact = values if self.master is None else self.master
        decay, step_size = weight_decay * lr, lr * correction2**0.5 / correction1
        device, loops = grad.device, cpu_loops(exact)
        length = max(1, UPDATED_AT_ONCE.get(device.type, UPDATED_AT_ONCE["cuda"]) // grad.size(1))
        parts = grad._indices()[0].split(length), grad._values().split(length)
        for rows, grads in zip(*parts, strict=True):
            tensors = exact, self.exp_avg, self.exp_avg_sq, rows, grads.float()
            if loops is None:
                adam_step(*tensors, scale.to(device), betas, decay, step_size, eps)
            else:
                factors = [factor for beta in betas for factor in (beta, 1 - beta)]
                numbers = [*factors, scale.item(), decay, step_size, eps]
                loops.run("adam_step", *tensors, torch.tensor(numbers, dtype=torch.float32))
            if exact is not values:
                values.index_copy_(0, rows, exact.index_select(0, rows).to(values.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        names = MOMENTS if self.master is None else (*MOMENTS, "master")
        return {"step": self.step, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors stay in single precision."""
        shape = tuple(state_dict["exp_avg"].shape)
        if shape != tuple(self.exp_avg.shape):
            raise ValueError(
                f"the checkpoint's optimizer state has a memory with values of shape {shape}, and "
                f"the model has {tuple(self.exp_avg.shape)}: give --reset-optimizer"
            )
        self.step = int(state_dict["step"])
        for name in (*MOMENTS, "master"):
            if name in state_dict and getattr(self, name) is not None:
                getattr(self, name).copy_(state_dict[name])


def adam_step(
    values: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    scale: Tensor,
    betas: tuple[float, float],
    decay: float,
    step_size: float,
    eps: float,
) -> None:
    """Update the ``rows`` (U,), which rise, of ``values`` and both moments, (K, d) in fp32.

    Gradients ``grads`` (U, d) are multiplied by ``scale``. ``decay`` is the part of the values that
    is subtracted first, ``step_size`` is lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ).
    """
    grads = grads * scale
    mean, square, value = (x.index_select(0, rows) for x in (exp_avg, exp_avg_sq, values))
    mean.mul_(betas[0]).add_(grads, alpha=1 - betas[0])
    square.mul_(betas[1]).addcmul_(grads, grads, value=1 - betas[1])
    exp_avg.index_copy_(0, rows, mean)
    exp_avg_sq.index_copy_(0, rows, square)
    if decay > 0:
        value.add_(value, alpha=-decay)
    value.addcdiv_(mean, square.sqrt_().add_(eps), value=-step_size)
    values.index_copy_(0, rows, value)
