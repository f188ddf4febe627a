"""Lazy Adam for a table of values: a step changes only the rows that were read.

It is the rule of torch's SparseAdam with the weight decay of fairseq's Adam; t is the number of
updates so far, of any rows: ::

    m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
    p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

If every row is read, :func:`adam_step` equals fairseq's Adam bit for bit, and the CPU's loop up to
rounding.

Shapes: K rows of a table, d width, U rows of a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.product_key_memory import cpu_kernels

# How many numbers of a table are updated at a time: enough to keep the device busy.
UPDATED_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
MOMENTS = ("exp_avg", "exp_avg_sq")


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
        take_step = cpu_kernels.adam_step if cpu_kernels.use_numba(exact) else adam_step
        device = grad.device
        length = max(1, UPDATED_AT_ONCE.get(device.type, UPDATED_AT_ONCE["cuda"]) // grad.size(1))
        parts = grad._indices()[0].split(length), grad._values().split(length)
        for rows, grads in zip(*parts, strict=True):
            take_step(
                exact,
                self.exp_avg,
                self.exp_avg_sq,
                rows,
                grads.float(),
                betas=betas,
                scale=scale.to(device),
                decay=weight_decay * lr,
                step_size=lr * correction2**0.5 / correction1,
                eps=eps,
            )
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
    betas: tuple[float, float],
    scale: Tensor,
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
