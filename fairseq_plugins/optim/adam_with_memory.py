"""Adam, and beside it a lazy Adam of its own learning rate for the values of product-key memories.

Lample et al. 2019 (arXiv:1907.05242), section 4.3: "since the memory values are learned with sparse
updates, we found it beneficial to learn them with a higher Adam learning rate", 1e-3 and constant
where the paper's code is followed. The update rule is the lazy Adam that torch calls SparseAdam: ::

    of the rows that were read:  m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²
                                 p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)
    of all others:               nothing

where t counts the updates, of whichever rows. Where every row is read at each update this is
fairseq's Adam, bit for bit. Weight decay, of its own amount, acts on the rows that were read.

A memory keeps its values out of fairseq's sight (see
:meth:`.memory_layer.ProductKeyMemory.keep_gradient_beside_autograd`): fairseq would hold gradients
of the table's size, and exchange them between workers. Here they join in again: in the norm of all
gradients and its clipping, in scaling and averaging, and in checkpoints.

Shapes: K rows of a table, d width, U rows that were read.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fairseq.optim import register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.modules.column_shards import gather_columns
from fairseq_plugins.modules.memory_values import rows_as_gradient
from fairseq_plugins.optim.amp_scaled_step import AmpScaledStep
from fairseq_plugins.optim.sparse_rows import average_over_workers, rows_of

# How many numbers of a table are updated at a time: few enough to stay in the caches on the way,
# enough that threads, which meet after each operation, do not wait for one another all the time.
UPDATED_AT_ONCE = 1 << 19


class AdamWithMemory(Adam):
    """fairseq's Adam for parameters, lazy Adam for tables that have sparse gradients.

    The state of a table is ``step``, ``exp_avg`` and ``exp_avg_sq`` (K, d), in single precision,
    and for a table of lower precision ``master``, its values in single precision. What the tables'
    gradients are still to be multiplied by stands in ``table_scale``, so that no pass over them is
    spent on it.

    Args:
        params: parameters with dense gradients.
        tables: parameters (K, d) with sparse gradients, or none.
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
        tables: list[nn.Parameter],
        memory_lr: float = 1e-3,
        memory_weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        for option, value in [
            ("memory-lr", memory_lr),
            ("memory-weight-decay", memory_weight_decay),
        ]:
            if not value >= 0:
                raise ValueError(f"--{option} is {value}: it must be 0 or more")
        super().__init__(params, **options)
        self.tables = tables
        self.memory_lr = memory_lr
        self.memory_weight_decay = memory_weight_decay
        self.table_scale: float | Tensor = 1.0
        self._gathered: dict[nn.Parameter, dict[str, Any]] = {}
        if tables:
            self.add_param_group({"params": tables})

    @property
    def supports_flat_params(self) -> bool:
        """Return False: a flat copy of the parameters would not say which memory they are of."""
        return False

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
        for table in self.tables:
            # fairseq's Adam passes over parameters that have no gradient
            grad, table.grad = table.grad, None
            if grad is not None:
                self._update_rows(table, *rows_of(grad))
        self.table_scale = 1.0
        super().step()
        return loss

    def _update_rows(self, table: nn.Parameter, rows: Tensor, grads: Tensor) -> None:
        """Apply the rule at the top of this file to ``rows`` (U,), whose gradients are (U, d)."""
        state = self._state_of(table)
        state["step"] += 1
        options = self.param_groups[0]
        (beta1, beta2), eps = options["betas"], options["eps"]
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        step_size = self.memory_lr * correction2**0.5 / correction1
        values = state.get("master", table)
        # parts of a few hundred kilobytes go through all operations while they are in the cache
        for part, grad in zip(*_in_parts(rows, grads), strict=True):
            grad = grad.float() * self.table_scale
            mean, square, value = (
                whole.index_select(0, part)
                for whole in (state["exp_avg"], state["exp_avg_sq"], values)
            )
            mean.mul_(beta1).add_(grad, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            state["exp_avg"].index_copy_(0, part, mean)
            state["exp_avg_sq"].index_copy_(0, part, square)
            if self.memory_weight_decay > 0:
                value.add_(value, alpha=-self.memory_weight_decay * self.memory_lr)
            value.addcdiv_(mean, square.sqrt_().add_(eps), value=-step_size)
            values.index_copy_(0, part, value)
            if values is not table:
                table.index_copy_(0, part, value.to(table.dtype))

    def _state_of(self, table: nn.Parameter) -> dict[str, Any]:
        state = self.state[table]
        if "step" not in state:
            state["step"] = 0
            # zeros take no memory before they are written
            state["exp_avg"] = torch.zeros_like(table, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(table, dtype=torch.float32)
        if table.dtype != torch.float32 and "master" not in state:
            state["master"] = table.detach().float()
        return state

    def consolidate_state_dict(self) -> None:
        """Gather sharded tables and their state in worker 0, for one ``state_dict()`` of each.

        fairseq calls it on all workers before worker 0 writes a checkpoint.
        """
        for table in self.tables:
            if hasattr(table, "shard"):
                table.gathered = gather_columns(table)
                self._gathered[table] = {
                    name: gather_columns(value) if isinstance(value, Tensor) else value
                    for name, value in self.state[table].items()
                }

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of sharded tables that of all columns.

        Raises:
            ValueError: there are some, and :meth:`consolidate_state_dict` was not called.
        """
        state_dict = super().state_dict()
        if not self.tables:
            return state_dict
        numbers = state_dict["param_groups"][-1]["params"]
        for number, table in zip(numbers, self.tables, strict=True):
            if hasattr(table, "shard"):
                if table not in self._gathered:
                    raise ValueError(
                        "a memory's values are sharded over workers: call "
                        "consolidate_state_dict() on all of them before state_dict() on worker 0"
                    )
                state_dict["state"][number] = self._gathered.pop(table)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; that of tables stays in single precision.

        Raises:
            ValueError: it is of tables of another shape.
        """
        super().load_state_dict(state_dict)
        if not self.tables:
            return
        for number, table in zip(
            state_dict["param_groups"][-1]["params"], self.tables, strict=True
        ):
            saved = state_dict["state"].get(number)
            if saved is None:
                continue
            shard = getattr(table, "shard", None)
            shape = (len(table), table.size(1) if shard is None else shard.width)
            if saved["exp_avg"].shape != shape:
                raise ValueError(
                    "the checkpoint's optimizer state is of a memory with values of shape "
                    f"{tuple(saved['exp_avg'].shape)}, here {shape}: give --reset-optimizer"
                )
            state = {"step": int(saved["step"])}
            for name in ("exp_avg", "exp_avg_sq", "master"):
                if name in saved and (name != "master" or table.dtype != torch.float32):
                    whole = saved[name] if shard is None else shard.of(saved[name])
                    state[name] = whole.to(table.device, torch.float32, copy=True)
            self.state[table] = state


def _in_parts(rows: Tensor, grads: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    length = max(1, UPDATED_AT_ONCE // grads.size(1))
    return rows.split(length), grads.split(length)


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
            attribute ``param_group`` of some is the table of the memory that they belong to.

    Raises:
        ValueError: an option is negative, or one of ``adam`` that does not go with memories.
    """

    def __init__(self, cfg: AdamWithMemoryConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        if cfg.fp16_adam_stats:
            raise ValueError("--fp16-adam-stats with --optimizer adam_with_memory: leave it out")
        params = list(params)
        linked = (getattr(param, "param_group", None) for param in params)
        tables = {id(table): table for table in linked if isinstance(table, nn.Parameter)}
        self._optimizer = AdamWithMemory(params, list(tables.values()), **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithMemory`."""
        betas = self.cfg.adam_betas
        if isinstance(betas, str):
            betas = tuple(float(beta) for beta in betas.strip("()[] ").split(","))
        return {
            "lr": self.cfg.lr[0],
            "betas": tuple(betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
            "memory_lr": self.cfg.memory_lr,
            "memory_weight_decay": self.cfg.memory_weight_decay,
        }

    @property
    def tables(self) -> list[nn.Parameter]:
        """Return the memories' values."""
        return self._optimizer.tables

    @property
    def params(self) -> Iterator[nn.Parameter]:
        """Return the parameters that fairseq scales and clips by itself: all but tables."""
        for group in self.param_groups[:1]:
            yield from group["params"]

    def zero_grad(self) -> None:
        """Clear the gradients of parameters and tables."""
        super().zero_grad()
        self._optimizer.table_scale = 1.0

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply all gradients by ``c``; those of the tables when they are used."""
        super().multiply_grads(c)
        self._optimizer.table_scale *= c

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Average the gradients over the workers; of tables the rows that any of them read."""
        super().all_reduce_grads(module)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for table in self.tables:
                if not hasattr(table, "shard"):
                    table.grad = average_over_workers(table, table.grad)
                elif table.grad is not None:
                    # the own columns' gradient is the sum over all workers' tokens already
                    rows, grads = rows_of(table.grad)
                    table.grad = rows_as_gradient(rows, grads / dist.get_world_size(), table.shape)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Shorten all gradients together to ``max_norm``, 0 for no limit; return their norm."""
        norm = super().clip_grad_norm(0, aggregate_norm_fn)
        for table in self.tables:
            if table.grad is not None:
                # gradients of several passes are added up once, here
                rows, grads = rows_of(table.grad)
                table.grad = rows_as_gradient(rows, grads, table.shape)
                of_table = torch.linalg.vector_norm(grads, dtype=torch.float32)
                if hasattr(table, "shard"):
                    squares = of_table.square()
                    dist.all_reduce(squares)
                    of_table = squares.sqrt()
                norm = torch.hypot(norm, of_table * self._optimizer.table_scale)
        if not norm.isfinite():
            # --fp16 skips the update then, and would clear only the gradients that it knows
            for table in self.tables:
                table.grad = None
            self._optimizer.table_scale = 1.0
        elif max_norm > 0:
            self.multiply_grads((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm
