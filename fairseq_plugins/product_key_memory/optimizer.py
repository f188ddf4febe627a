"""Adam, and beside it a lazy Adam of its own learning rate for the values of product-key memories.

Lample et al. 2019 (arXiv:1907.05242), section 4.3: "since the memory values are learned with sparse
updates, we found it beneficial to learn them with a higher Adam learning rate", 1e-3 and constant
where the paper's code is followed. The rule for the values is in :mod:`.lazy_adam`.

A memory keeps its values out of fairseq's sight (see
:meth:`.memory_layer.ProductKeyMemory.keep_gradient_beside_autograd`): fairseq would hold gradients
of the table's size, and exchange them between workers. Here they join in again: in the norm of all
gradients and its clipping, in scaling and averaging, and in checkpoints.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fairseq.optim import register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.optimizers import (
    AmpScaledStep,
    adam_options,
    update_rule,
)
from fairseq_plugins.fairseq_integration.option_names import errors_name_options
from fairseq_plugins.product_key_memory.lazy_adam import LazyAdam
from fairseq_plugins.product_key_memory.sharding import MemoryTable

logger = logging.getLogger(__name__)


class AdamWithMemory(Adam):
    """fairseq's Adam for parameters, lazy Adam for tables that have sparse gradients.

    fairseq's wrappers for ``--fp16``, ``--bf16`` and ``--amp`` multiply the gradients of all
    parameters by loss scales, numbers of tokens and what clipping asks for, each in its own way.
    ``scale`` is a parameter like others to them, whose gradient starts as 1: what becomes of it is
    what the tables' gradients are still to be multiplied by. No pass over them is spent on it.

    Args:
        params: parameters with dense gradients.
        tables: of the memories, whose values have sparse, coalesced gradients, or none.
        memory_lr: learning rate of the tables, which no schedule changes.
        memory_weight_decay: of the rows that were read.
        options: of fairseq's Adam: ``lr``, ``betas``, ``eps``, ``weight_decay``; the tables have
            the same betas and eps.

    Raises:
        ValueError: ``memory_lr`` or ``memory_weight_decay`` is negative.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        tables: list[MemoryTable],
        memory_lr: float = 1e-3,
        memory_weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        for name, value in [("memory_lr", memory_lr), ("memory_weight_decay", memory_weight_decay)]:
            if not value >= 0:
                raise ValueError(f"`{name}` is {value}: it must be 0 or more")
        super().__init__(params, **options)
        self.lazy = LazyAdam(tables, memory_lr, memory_weight_decay)
        if tables:
            device = self.param_groups[0]["params"][0].device
            self.scale = nn.Parameter(torch.ones((), device=device), requires_grad=False)
            self.add_param_group({"params": [self.scale]})
            self.start_scale()

    @property
    def tables(self) -> list[MemoryTable]:
        """Return the tables with sparse gradients."""
        return self.lazy.tables

    @property
    def supports_flat_params(self) -> bool:
        """Return False: a flat copy of the parameters would not say which memory they are of."""
        return False

    def start_scale(self) -> None:
        """Have the tables' gradients count as they are."""
        if self.tables:
            self.scale.grad = torch.ones_like(self.scale)

    def take_scale(self) -> Tensor:
        """Return what the tables' gradients are to be multiplied by; ``scale`` has no gradient."""
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
        """Update the parameters and the rows that have a gradient.

        Args:
            closure: computes the loss and the gradients, if they are not there yet.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.tables:
            options = self.param_groups[0]
            self.lazy.update(options["betas"], options["eps"], self.take_scale())
        # it passes over parameters without a gradient, and so over the scale
        super().step()
        self.start_scale()
        return loss

    def consolidate_state_dict(self) -> None:
        """Gather what is sharded over workers; fairseq calls it on all before worker 0 saves."""
        self.lazy.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, that of the tables as ``tables``.

        Raises:
            ValueError: a table is sharded, and :meth:`consolidate_state_dict` was not called.
        """
        return {**super().state_dict(), "tables": self.lazy.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: it is of other tables.
        """
        others = {name: value for name, value in state_dict.items() if name != "tables"}
        self.lazy.load_state_dict(state_dict.get("tables", []))
        super().load_state_dict(others)
        self.start_scale()


@dataclass
class AdamWithMemoryConfig(FairseqAdamConfig):
    """Options of ``--optimizer adam_with_memory``: those of ``adam``, and the memories' own."""

    memory_lr: float = field(
        default=1e-3, metadata={"help": "learning rate of the memories' values, always the same"}
    )
    memory_weight_decay: float = field(
        default=0.0, metadata={"help": "weight decay of the memories' values, where they were read"}
    )


@register_optimizer("adam_with_memory", dataclass=AdamWithMemoryConfig)
class FairseqAdamWithMemory(AmpScaledStep):
    """:class:`AdamWithMemory` as fairseq's ``--optimizer adam_with_memory``.

    Args:
        cfg: the options.
        params: the model's parameters, or fairseq's copies of them in single precision. The
            update rule of some is the :class:`.MemoryTable` of the memory that they belong to.

    Raises:
        ValueError: an option is negative, or one of ``adam`` that does not go with memories.
    """

    def __init__(self, cfg: AdamWithMemoryConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        if cfg.fp16_adam_stats:
            raise ValueError("--fp16-adam-stats with --optimizer adam_with_memory: leave it out")
        params = list(params)
        rules = (update_rule(param, MemoryTable) for param in params)
        tables = {id(table): table for table in rules if table is not None}
        with errors_name_options(lambda argument: "--" + argument.replace("_", "-")):
            self._optimizer = AdamWithMemory(params, list(tables.values()), **self.optimizer_config)
        if tables:
            sizes = (table.values.shape for table in self.tables)
            shapes = ", ".join(f"{rows:,} x {columns:,}" for rows, columns in sizes)
            logger.info("lazy Adam updates the values of memories: %s numbers", shapes)
        else:
            logger.info("no parameter belongs to a memory: this is fairseq's Adam")

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithMemory`."""
        return {
            **adam_options(self.cfg),
            "memory_lr": self.cfg.memory_lr,
            "memory_weight_decay": self.cfg.memory_weight_decay,
        }

    @property
    def tables(self) -> list[MemoryTable]:
        """Return the memories' tables."""
        return self._optimizer.tables

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Average the gradients over the workers; of tables the rows that any of them read."""
        super().all_reduce_grads(module)
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        # a criterion with parameters comes in a call of its own
        in_module = {id(parameter) for parameter in module.parameters()}
        for table in self.tables:
            if id(table.values) in in_module:
                table.average_gradient()

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Shorten all gradients together to ``max_norm``, 0 for no limit; return their norm.

        Where it is not finite there are no gradients afterwards: fairseq skips the update, and
        ``--fp16`` would clear only those that it knows.
        """
        if not self.tables:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        scale = self._optimizer.take_scale()
        norm = super().clip_grad_norm(0, aggregate_norm_fn)
        for table in self.tables:
            if table.values.grad is not None:
                norm = torch.hypot(norm, table.gradient_norm().to(norm.device) * scale)
        self._optimizer.scale.grad = scale
        if not norm.isfinite():
            self.zero_grad()
        elif max_norm > 0:
            self.multiply_grads((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm
