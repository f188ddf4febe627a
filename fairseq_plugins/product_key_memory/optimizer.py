"""fairseq's Adam, and lazy Adam for the values of product-key memories.

Lample et al. 2019 (arXiv:1907.05242), section 4.3: values learn with "a higher Adam learning rate",
constant and 1e-3 in the published code. Lazy Adam updates only rows that were read, by the rule of
torch's SparseAdam with the weight decay of fairseq's Adam; t is the number of updates so far, of
any rows: ::

    m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
    p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

If every row is read, :func:`update_rows` equals fairseq's Adam bit for bit, and the CPU's loop up
to rounding.

A memory hides its values from fairseq. This optimizer includes them in the gradient norm, clipping,
scaling, averaging and checkpoints.

Shapes: K rows of a table, d width, U rows of a gradient.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.options import option
from fairseq_plugins.fairseq_integration.parameters import (
    OwnRulesStep,
    UpdateRule,
    adam_options,
    set_update_rule,
    update_rule,
)
from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.values import Values, rows_as_gradient

logger = logging.getLogger(__name__)

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
        rule = cpu_kernels.update_rows if cpu_kernels.use_numba(exact) else update_rows
        device = grad.device
        length = max(1, UPDATED_AT_ONCE.get(device.type, UPDATED_AT_ONCE["cuda"]) // grad.size(1))
        parts = grad._indices()[0].split(length), grad._values().split(length)
        for rows, grads in zip(*parts, strict=True):
            rule(
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


class AdamWithMemory(Adam):
    """fairseq's Adam for parameters, lazy Adam for ``tables``, whose gradients are sparse.

    fairseq's wrappers for ``--fp16``, ``--bf16`` and ``--amp`` multiply the gradients of all
    parameters by loss scales, token counts and the clipping factor. ``scale`` is a parameter whose
    gradient starts as 1, so that it collects these factors. The update multiplies the tables'
    gradients by it.

    No schedule changes ``memory_lr``; betas and eps are those of fairseq's Adam.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        tables: list[Values],
        memory_lr: float = 1e-3,
        memory_weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        for name, value in [("memory_lr", memory_lr), ("memory_weight_decay", memory_weight_decay)]:
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is {value}: it must be 0 or more, and finite")
        super().__init__(params, **options)
        self.tables = tables
        self.moments: list[LazyAdam | None] = [None for _ in tables]
        self.memory_lr = memory_lr
        self.memory_weight_decay = memory_weight_decay
        if tables:
            device = self.param_groups[0]["params"][0].device
            self.scale = nn.Parameter(torch.ones((), device=device), requires_grad=False)
            self.add_param_group({"params": [self.scale]})
            self.start_scale()

    def start_scale(self) -> None:
        """Start to collect the factor of the tables' gradients: set it to 1."""
        if self.tables:
            self.scale.grad = torch.ones_like(self.scale)

    def take_scale(self) -> Tensor:
        """Return the factor of the tables' gradients, and remove it from ``scale``."""
        scale, self.scale.grad = self.scale.grad, None
        return scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        super().zero_grad(set_to_none)
        self.clear_tables()
        self.start_scale()

    def clear_tables(self) -> None:
        """Clear the tables' gradients."""
        for table in self.tables:
            table.weight.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the parameters and the rows that have a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.tables:
            self._update_tables(self.take_scale())
        # Adam skips parameters without a gradient, such as the scale now
        super().step()
        self.start_scale()
        return loss

    def _update_tables(self, scale: Tensor) -> None:
        betas, eps = self.param_groups[0]["betas"], self.param_groups[0]["eps"]
        rates = self.memory_lr, self.memory_weight_decay
        for number, table in enumerate(self.tables):
            grad, table.weight.grad = table.weight.grad, None
            if grad is None:
                continue
            moments = self.moments[number] or LazyAdam(table.weight)
            self.moments[number] = moments
            moments.update(table.weight, grad, *rates, betas, eps, scale)
            if cpu_kernels.use_numba(grad._values()):
                table.reuse(grad)

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state, and the tables' states as ``tables``, {} before the first update."""
        tables = [{} if each is None else each.state_dict() for each in self.moments]
        return {**super().state_dict(), "tables": tables}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the moments are in single precision, whatever the tables are in."""
        others = {name: value for name, value in state_dict.items() if name != "tables"}
        states = state_dict.get("tables", [])
        if len(states) != len(self.tables):
            raise ValueError(
                f"the checkpoint's optimizer state has {len(states)} memories, and the model has "
                f"{len(self.tables)}: give --reset-optimizer"
            )
        for number, (table, state) in enumerate(zip(self.tables, states, strict=True)):
            moments = self.moments[number] = LazyAdam(table.weight) if state else None
            if moments is not None:
                moments.load_state_dict(state)
        super().load_state_dict(others)
        self.start_scale()


# --- in fairseq


class LazyAdamRule(UpdateRule):
    """Marks a memory's keys, so that the optimizer finds its values, which fairseq does not see."""

    def __init__(self, values: Values) -> None:
        self.values = values


def hide_from_fairseq(memory: ProductKeyMemory) -> None:
    """Hide the values of ``memory`` from fairseq, and let ``adam_with_memory`` find them."""
    memory.values.keep_gradient_beside_autograd()
    # optimizers only see parameters that require a gradient; every memory has keys
    set_update_rule(next(memory.keys.parameters()), LazyAdamRule(memory.values))


@dataclass
class AdamWithMemoryConfig(FairseqAdamConfig):
    """Options of ``--optimizer adam_with_memory``."""

    memory_lr: float = option(1e-3, "learning rate of the memories' values, always the same")
    memory_weight_decay: float = option(
        0.0, "weight decay of the memories' values, where they were read"
    )


@register_optimizer("adam_with_memory", dataclass=AdamWithMemoryConfig)
class FairseqAdamWithMemory(OwnRulesStep, FairseqOptimizer):
    """:class:`AdamWithMemory` in fairseq; the marks of the keys lead to its tables, each once."""

    def __init__(self, cfg: AdamWithMemoryConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        params = list(params)
        rules = (update_rule(param, LazyAdamRule) for param in params)
        tables = {rule.values.weight: rule.values for rule in rules if rule is not None}
        self.tables = list(tables.values())
        self._optimizer = AdamWithMemory(params, self.tables, **self.optimizer_config)
        sizes = ", ".join(" x ".join(f"{size:,}" for size in table.shape) for table in tables)
        logger.info("lazy Adam updates the values of memories: %s", sizes or "there are none")

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithMemory`."""
        return {
            **adam_options(self.cfg),
            "memory_lr": self.cfg.memory_lr,
            "memory_weight_decay": self.cfg.memory_weight_decay,
        }

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Average the gradients of ``module``, tables included, over the workers."""
        super().all_reduce_grads(module)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        # fairseq calls this for the model, and again for a criterion with parameters
        in_module = set(module.modules())
        for table in self.tables:
            if table in in_module:
                table.weight.grad = average_rows(table.weight)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Clip all gradients together to ``max_norm``, 0 for no limit; return the norm before.

        fairseq skips an update whose norm is not finite, and then clears only the gradients that it
        knows. Under ``--amp`` torch's scaler decides this and does not see the tables' gradients,
        so their factor becomes NaN, which it sees.
        """
        if not self.tables:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        scale = self._optimizer.take_scale()
        # with --fp16 a skipped update leaves NaN
        scale = torch.where(scale.isfinite(), scale, 1.0)
        norm = super().clip_grad_norm(0, aggregate_norm_fn)
        for table in self.tables:
            if table.weight.grad is not None:
                grads = table.weight.grad._values()
                row_norm = torch.linalg.vector_norm(grads, dtype=torch.float32)
                norm = torch.hypot(norm, row_norm.to(norm.device) * scale)
        if not norm.isfinite():
            self._optimizer.clear_tables()
        self._optimizer.scale.grad = torch.where(norm.isfinite(), scale, math.nan)
        if max_norm > 0:
            self.multiply_grads((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm


def average_rows(values: Tensor) -> Tensor | None:
    """Return the mean over the workers of the sparse gradients of ``values``; None if empty.

    The gradient is None on a worker that read nothing.
    """
    if values.grad is None:
        rows = torch.empty(0, dtype=torch.long, device=values.device)
        grads = values.new_empty(0, values.size(1))
    else:
        rows, grads = values.grad._indices()[0], values.grad._values()
    union = _gather_rows(rows).unique()
    if len(union) == 0:
        return None
    shared = grads.new_zeros(len(union), grads.size(1))
    shared.index_copy_(0, torch.searchsorted(union, rows), grads)
    shared /= dist.get_world_size()
    dist.all_reduce(shared)
    return rows_as_gradient(union, shared, values.shape)


def _gather_rows(rows: Tensor) -> Tensor:
    """Return the ``rows`` (U,) of all workers, one worker's after another's."""
    lengths = [
        torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=rows.device))
    counts = torch.cat(lengths).tolist()
    # gloo only gathers tensors of equal size
    padded = rows.new_zeros(max(counts))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
