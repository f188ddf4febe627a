"""fairseq's Adam, and lazy Adam (:mod:`.lazy_adam`) for the values of product-key memories.

Lample et al. 2019 (arXiv:1907.05242), section 4.3: values learn with "a higher Adam learning rate",
constant and 1e-3 in the published code.

A memory hides its values from fairseq. This optimizer includes them in the gradient norm, clipping,
scaling, averaging and checkpoints.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.options import option
from fairseq_plugins.fairseq_integration.parameters import OwnRulesStep, adam_options, update_rule
from fairseq_plugins.product_key_memory.sharding import several_workers
from fairseq_plugins.product_key_memory.value_table import ValueTable

logger = logging.getLogger(__name__)


class AdamWithMemory(Adam):
    """fairseq's Adam for parameters, lazy Adam for tables, whose gradients are sparse.

    fairseq's wrappers for ``--fp16``, ``--bf16`` and ``--amp`` multiply the gradients of all
    parameters by loss scales, token counts and the clipping factor. ``scale`` is a parameter whose
    gradient starts as 1, so that it collects these factors. The update multiplies the tables'
    gradients by it.

    No schedule changes ``memory_lr``; betas and eps are those of fairseq's Adam.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        tables: list[ValueTable],
        memory_lr: float = 1e-3,
        memory_weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        for name, value in [("memory_lr", memory_lr), ("memory_weight_decay", memory_weight_decay)]:
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is {value}: it must be 0 or more, and finite")
        super().__init__(params, **options)
        self.tables = tables
        self.memory_lr = memory_lr
        self.memory_weight_decay = memory_weight_decay
        for table in tables:
            # an earlier optimizer may have left its moments
            table.moments = None
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
        for table in self.tables:
            table.values.grad = None
        self.start_scale()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the parameters and the rows that have a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.tables:
            options, scale = self.param_groups[0], self.take_scale()
            rates = self.memory_lr, self.memory_weight_decay
            for table in self.tables:
                table.update(*rates, options["betas"], options["eps"], scale)
        # Adam skips parameters without a gradient, such as the scale now
        super().step()
        self.start_scale()
        return loss

    def consolidate_state_dict(self) -> None:
        """Gather sharded tables; fairseq calls this on all workers before worker 0 saves."""
        for table in self.tables:
            table.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state, and the tables' states as ``tables``."""
        return {**super().state_dict(), "tables": [table.state() for table in self.tables]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the moments are in single precision, whatever the tables are in."""
        others = {name: value for name, value in state_dict.items() if name != "tables"}
        states = state_dict.get("tables", [])
        if len(states) != len(self.tables):
            raise ValueError(
                f"the checkpoint's optimizer state has {len(states)} memories, and the model has "
                f"{len(self.tables)}: give --reset-optimizer"
            )
        for table, state in zip(self.tables, states, strict=True):
            try:
                table.load_state(state)
            except ValueError as error:
                raise ValueError(f"{error}: give --reset-optimizer") from None
        super().load_state_dict(others)
        self.start_scale()


@dataclass
class AdamWithMemoryConfig(FairseqAdamConfig):
    """Options of ``--optimizer adam_with_memory``."""

    memory_lr: float = option(1e-3, "learning rate of the memories' values, always the same")
    memory_weight_decay: float = option(
        0.0, "weight decay of the memories' values, where they were read"
    )


@register_optimizer("adam_with_memory", dataclass=AdamWithMemoryConfig)
class FairseqAdamWithMemory(OwnRulesStep, FairseqOptimizer):
    """:class:`AdamWithMemory` in fairseq; it finds the tables as update rules of parameters."""

    def __init__(self, cfg: AdamWithMemoryConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        params = list(params)
        rules = (update_rule(param, ValueTable) for param in params)
        tables = {id(table): table for table in rules if table is not None}
        self._optimizer = AdamWithMemory(params, list(tables.values()), **self.optimizer_config)
        if not tables:
            logger.info("no parameter belongs to a memory: this is fairseq's Adam")
            return
        sizes = (table.values.shape for table in self.tables)
        logger.info(
            "lazy Adam updates the values of memories: %s numbers, which fairseq does not count "
            "as trained",
            ", ".join(f"{rows:,} x {columns:,}" for rows, columns in sizes),
        )

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithMemory`."""
        return {
            **adam_options(self.cfg),
            "memory_lr": self.cfg.memory_lr,
            "memory_weight_decay": self.cfg.memory_weight_decay,
        }

    @property
    def tables(self) -> list[ValueTable]:
        """Return the memories' tables."""
        return self._optimizer.tables

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Average the gradients of ``module``, tables included, over the workers."""
        super().all_reduce_grads(module)
        if not several_workers():
            return
        # fairseq calls this for the model, and again for a criterion with parameters
        in_module = {id(parameter) for parameter in module.parameters()}
        for table in self.tables:
            if id(table.values) in in_module:
                table.average_gradient()

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Clip all gradients together to ``max_norm``, 0 for no limit; return the norm before.

        fairseq skips an update whose norm is not finite. Under ``--amp`` torch's scaler decides
        this and does not see the tables' gradients, so their factor becomes NaN, which it sees.
        """
        if not self.tables:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        scale = self._optimizer.take_scale()
        # a skipped update left NaN: with --fp16 fairseq clears only the gradients that it knows
        scale = torch.where(scale.isfinite(), scale, 1.0)
        norm = super().clip_grad_norm(0, aggregate_norm_fn)
        for table in self.tables:
            if table.values.grad is not None:
                norm = torch.hypot(norm, table.gradient_norm().to(norm.device) * scale)
        self._optimizer.scale.grad = torch.where(norm.isfinite(), scale, math.nan)
        if max_norm > 0:
            self.multiply_grads((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm
