"""fairseq's Adam, and lazy Adam for the values of product-key memories.

Lample et al. 2019 (arXiv:1907.05242), section 4.3: values learn with "a higher Adam learning rate",
constant and 1e-3 in the published code. fairseq does not see the values. This optimizer includes
them in the gradient norm, clipping, scaling, averaging and checkpoints.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.options import option
from fairseq_plugins.fairseq_integration.parameters import OwnRulesStep, adam_options, parse_betas
from fairseq_plugins.product_key_memory.lazy_adam import LazyAdam, LazyValues
from fairseq_plugins.product_key_memory.values import rows_as_gradient
from fairseq_plugins.sizes import check_sizes

logger = logging.getLogger(__name__)


class AdamWithMemory(Adam):
    """fairseq's Adam for parameters, lazy Adam for ``tables``, whose gradients are sparse.

    fairseq's wrappers for ``--fp16``, ``--bf16`` and ``--amp`` multiply the gradients of all
    parameters by loss scales, token counts and the clipping factor. ``scale`` is a parameter whose
    gradient starts as 1, so that it collects these factors. The update multiplies the tables'
    gradients by it.

    Eps is that of fairseq's Adam. ``memory_betas`` are, too, if None. ``memory_lr`` stays constant,
    or with ``memory_scheduled`` has the same share of its value as Adam's rate has of ``lr``.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        tables: list[LazyValues],
        memory_lr: float = 1e-3,
        memory_weight_decay: float = 0.0,
        memory_betas: tuple[float, float] | None = None,
        memory_scheduled: bool = False,
        **options: Any,
    ) -> None:
        check_sizes(0, memory_lr=memory_lr, memory_weight_decay=memory_weight_decay)
        super().__init__(params, **options)
        self.tables = tables
        self.moments: list[LazyAdam | None] = [None for _ in tables]
        self.memory_lr = memory_lr
        self.memory_weight_decay = memory_weight_decay
        self.memory_betas = memory_betas
        self.full_lr = self.defaults["lr"] if memory_scheduled else None
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
        group = self.param_groups[0]
        betas, eps = self.memory_betas or group["betas"], group["eps"]
        share = 1.0 if self.full_lr is None else group["lr"] / (self.full_lr or math.inf)
        rates = share * self.memory_lr, self.memory_weight_decay
        for number, table in enumerate(self.tables):
            grad, table.weight.grad = table.weight.grad, None
            if grad is None:
                continue
            moments = self.moments[number] or LazyAdam(table.weight)
            self.moments[number] = moments
            moments.update(table.weight, grad, *rates, betas, eps, scale)

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


@dataclass
class AdamWithMemoryConfig(FairseqAdamConfig):
    """Options of ``--optimizer adam_with_memory``."""

    memory_lr: float = option(1e-3, "learning rate of the memories' values, constant by default")
    memory_scheduled: bool = option(
        False,
        "let --lr-scheduler change --memory-lr by the same factor as --lr, warm-up included (worse "
        "than a constant rate in our experiments)",
    )
    memory_betas: Optional[str] = option(
        None,
        "betas of the values' Adam, such as (0.9,0.999), which the published code has (default: "
        "--adam-betas)",
    )
    memory_weight_decay: float = option(
        0.0, "weight decay of the memories' values, where they were read"
    )


@register_optimizer("adam_with_memory", dataclass=AdamWithMemoryConfig)
class FairseqAdamWithMemory(OwnRulesStep, FairseqOptimizer):
    """:class:`AdamWithMemory` as fairseq's ``--optimizer adam_with_memory``."""

    def __init__(self, cfg: AdamWithMemoryConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        params = list(params)
        self.tables = lazy_values(params)
        self._optimizer = AdamWithMemory(params, self.tables, **self.optimizer_config)
        shapes = [table.weight.shape for table in self.tables]
        sizes = ", ".join(" x ".join(f"{size:,}" for size in shape) for shape in shapes)
        logger.info("lazy Adam updates the values of memories: %s", sizes or "there are none")

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithMemory`."""
        betas = self.cfg.memory_betas
        return {
            **adam_options(self.cfg),
            "memory_lr": self.cfg.memory_lr,
            "memory_scheduled": self.cfg.memory_scheduled,
            "memory_betas": betas and parse_betas("--memory-betas", betas),
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


def lazy_values(params: Iterable[nn.Parameter]) -> list[LazyValues]:
    """Return the values of the memories whose keys are among ``params``, each table once."""
    overrides = (getattr(param, "optim_overrides", {}).get("optimizer", {}) for param in params)
    tables = [each["memory_values"] for each in overrides if "memory_values" in each]
    return list({table.weight: table for table in tables}.values())


def average_rows(values: Tensor) -> Tensor | None:
    """Return the mean over the workers of the sparse gradients of ``values``; None if empty.

    The gradient is None on a worker that read nothing.
    """
    # a byte for each slot is little beside the gradients
    read = torch.zeros(len(values), dtype=torch.uint8, device=values.device)
    if values.grad is not None:
        read[values.grad._indices()[0]] = 1
    dist.all_reduce(read, dist.ReduceOp.MAX)
    rows = read.nonzero().flatten()
    if len(rows) == 0:
        return None
    shared = values.new_zeros(len(rows), values.size(1))
    if values.grad is not None:
        places = torch.searchsorted(rows, values.grad._indices()[0])
        shared.index_copy_(0, places, values.grad._values())
    shared /= dist.get_world_size()
    dist.all_reduce(shared)
    return rows_as_gradient(rows, shared, values.shape)
