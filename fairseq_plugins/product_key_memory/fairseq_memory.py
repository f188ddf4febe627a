"""Memories whose values fairseq does not see: ``--optimizer adam_with_memory`` alone updates them.

fairseq would hold a dense gradient of all values, and average, scale and clip all of it.

Shapes: N tokens, R rows read by a token, K rows, d width, U rows read at least once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.search import needs_plain_operations
from fairseq_plugins.product_key_memory.values import Values, rows_as_gradient


class LazyValues(Values):
    """Values that require no gradient, and still get a sparse one in training.

    A backward pass adds it to ``weight.grad``. The next update reuses its memory: copy it to keep
    it.
    """

    def __init__(self, slots: int, width: int, kernel: str = "fast", sparse: bool = True) -> None:
        super().__init__(slots, width, kernel, sparse)
        self.sparse = True
        self.weight.requires_grad_(False)
        # For the next gradient of rows: a CPU takes longer to get new memory than to compute the
        # gradient (a fifth of a training step with 512² slots).
        self.buffer: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffer out of copies and files."""
        return {**vars(self), "buffer": None}

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
            # a row for each read, also of tokens without a gradient; the host waits
            grad = grad.coalesce()
            used = grad.values().ne(0).any(-1)
            rows, grads = grad.indices()[0, used], grad.values()[used]
        if self.weight.grad is not None:
            # on a GPU torch would only concatenate them, and soon hold more rows than the table
            rows = torch.cat([self.weight.grad._indices()[0], rows])
            grads = torch.cat([self.weight.grad._values(), grads])
            rows, grads = self.row_gradients(rows.unsqueeze(1), grads.new_ones(len(rows), 1), grads)
        self.weight.grad = rows_as_gradient(rows, grads, grad.shape)

    def segment_sum(self, grad: Tensor, tokens: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
        """Do what :meth:`.Values.segment_sum` does, on a CPU in the buffer."""
        if not cpu_kernels.use_numba(grad):
            return super().segment_sum(grad, tokens, weights, starts)
        sums = self._take_buffer(len(starts), grad)
        ends = F.pad(starts, (0, 1), value=len(tokens))
        cpu_kernels.segment_sum(grad, tokens, weights, ends, sums)
        return sums

    def _take_buffer(self, count: int, like: Tensor) -> Tensor:
        """Return an uninitialised tensor (count, d) with the dtype and width of ``like``."""
        rows, self.buffer = self.buffer, None
        kind = (like.dtype, like.size(1))
        if rows is not None and (rows.dtype, rows.size(1)) == kind and len(rows) >= count:
            return rows[:count]
        # free the old buffer first; the new one has some room to spare
        del rows
        room = min(count + count // 8, len(self.weight))
        return like.new_empty(room, like.size(1))[:count]

    def reuse(self, grad: Tensor) -> None:
        """Take the memory of ``grad``, sparse (K, d), for the next gradient; nobody may use it."""
        rows = grad._values()
        if cpu_kernels.use_numba(rows):
            width, numbers = rows.size(1), rows.untyped_storage().nbytes() // rows.element_size()
            self.buffer = rows.detach().as_strided((numbers // width, width), (width, 1), 0)


class FairseqMemory(ProductKeyMemory):
    """A memory with :class:`LazyValues`; its keys lead the optimizer to them.

    It notices updates that leave the values out.
    """

    values_class = LazyValues
    last_update = 0

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._mark_keys()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; torch copies parameters without their attributes."""
        super().__setstate__(state)
        self._mark_keys()

    def _mark_keys(self) -> None:
        # optimizers only see parameters that require a gradient; every memory has keys. fairseq's
        # copies in single precision have this attribute too
        keys = next(self.keys.parameters())
        keys.optim_overrides = {"optimizer": {"memory_values": self.values}}

    def set_num_updates(self, num_updates: int) -> None:
        """Check before each batch that the last update used the gradient of the values."""
        if self.values.weight.grad is not None and num_updates > self.last_update:
            raise ValueError(
                "an update was made without the values of a product-key memory: --optimizer "
                "adam_with_memory has to see the model's parameters one by one; give "
                "--fp16-no-flatten-grads with --fp16, and do not wrap the optimizer"
            )
        self.last_update = num_updates


def lazy_values(params: Iterable[nn.Parameter]) -> list[LazyValues]:
    """Return the values of the memories whose keys are among ``params``, each table once."""
    overrides = (getattr(param, "optim_overrides", {}).get("optimizer", {}) for param in params)
    tables = [each["memory_values"] for each in overrides if "memory_values" in each]
    return list({table.weight: table for table in tables}.values())


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
