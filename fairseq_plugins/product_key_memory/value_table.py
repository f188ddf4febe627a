"""The table of values that one or several memories read: what is stored, read, learned and saved.

Whether a worker holds all columns or a shard (:mod:`.sharding`), and whether values stay in
bfloat16, is known here and in :mod:`.lazy_adam`'s choice of moments; the layer and the optimizer
work the same way with all of them.

Shapes: K rows, d width, c columns of this worker, N tokens, R rows read by a token.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.forward_passes import is_recomputed
from fairseq_plugins.fairseq_integration.parameters import UpdateRule
from fairseq_plugins.product_key_memory.sharding import GATHERED_AT_ONCE, choose_columns
from fairseq_plugins.product_key_memory.values import (
    SpareRows,
    add_row_gradients,
    gradient_to_keep,
    plain_weighted_sum,
)


class ValueTable(UpdateRule):
    """Values (K, d) drawn from N(0, std²), or this worker's columns of them.

    Args:
        slots: K.
        width: d.
        std: 0 for zeros.
        shard: hold some of the columns if there are several workers.
        dtype: ``torch.bfloat16`` for values that stay in it; None for torch's default.

    Attributes:
        values: the memory's parameter, (K, c).
        columns: which columns these are.
        stays_bf16: an update rounds the values at random.
        readers: the keys of the memories that read the table.
    """

    def __init__(
        self,
        slots: int,
        width: int,
        std: float,
        shard: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.columns = choose_columns(width, shard)
        self.stays_bf16 = dtype is not None
        own = self.columns.stop - self.columns.start
        self.values = nn.Parameter(torch.empty(slots, own, dtype=dtype))
        if self.columns.sharded or self.stays_bf16:
            self._draw(std)
        else:
            nn.init.normal_(self.values, std=std)
        self.readers: list[nn.Module] = []
        self._spare: SpareRows | None = None
        self._gathered: Tensor | None = None

    @torch.no_grad()
    def _draw(self, std: float) -> None:
        """Draw the table that one worker draws, part by part: the whole of it never exists."""
        width = self.columns.width
        # torch draws parts of a multiple of 16 numbers as it would all at once
        rows = max(16, GATHERED_AT_ONCE // width // 16 * 16)
        for part in self.values.split(rows):
            part.copy_(self.columns.own(torch.empty(len(part), width).normal_(std=std)))

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole table, (K, d)."""
        return len(self.values), self.columns.width

    def keep_gradient_beside_autograd(self) -> None:
        """Hide the values from autograd, see :class:`.ProductKeyMemory`."""
        self.values.requires_grad_(False)
        self._spare = SpareRows(len(self.values))

    def read(
        self,
        rows: Tensor,
        weights: Tensor,
        plain: bool,
        sparse: bool,
        frozen: Tensor | None,
        training: bool,
    ) -> Tensor:
        """Return the weighted sums (N, d) of ``rows`` (N, R) with ``weights`` (N, R) (equation 3).

        By :func:`.plain_weighted_sum` if ``plain``, where the whole table is here. A gradient
        beside autograd is sparse in any case, and is kept while ``training``. Rows that are
        ``frozen`` (K,) get no gradient.
        """
        plain = plain and not self.columns.sharded
        values, beside = self.values, self._spare is not None
        if beside and training and torch.is_grad_enabled():
            values = self._leaf(plain)
        sparse = sparse or beside
        if plain:
            return plain_weighted_sum(values, rows, weights, sparse, frozen)
        return self.columns.weighted_sum(
            values, rows, weights, sparse=sparse, spare=self._spare, frozen=frozen
        )

    def _leaf(self, plain: bool) -> Tensor:
        """Return a leaf of autograd that stands for the values in this pass."""
        # training code may clear only the gradients that it knows of: where no keys have one, a
        # pass that failed has left this one
        of_keys = [next(keys.parameters()) for keys in self.readers]
        learned = [parameter for parameter in of_keys if parameter.requires_grad]
        cleared = learned and all(parameter.grad is None for parameter in learned)
        if cleared and not is_recomputed():
            self.values.grad = None
        leaf = self.values.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(functools.partial(self._add_gradient, plain))
        return leaf

    def _add_gradient(self, plain: bool, leaf: Tensor) -> None:
        """Add the gradient of ``leaf`` to that of the values: coalesced, or padded."""
        grad, leaf.grad = leaf.grad, None
        grad = gradient_to_keep(grad, plain)
        if self.values.grad is not None:
            grad = add_row_gradients(self.values.grad, grad)
        self.values.grad = grad

    def take_gradient(self) -> Tensor | None:
        """Return the gradient, sparse (K, c), which the values have no longer; None without one."""
        grad, self.values.grad = self.values.grad, None
        return grad

    def give_back(self, grad: Tensor) -> None:
        """Use the buffer of ``grad`` for the next gradient; nobody may use it any longer."""
        if self._spare is not None:
            self._spare.give_back(grad._values())

    def average_gradient(self) -> None:
        """Average the gradient over the workers, all of which must call it."""
        self.values.grad = self.columns.average(self.values, self.values.grad)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole table's gradient in single precision; all must call it."""
        return self.columns.norm(
            torch.linalg.vector_norm(self.values.grad._values(), dtype=torch.float32)
        )

    def gather(self) -> None:
        """Gather the columns of a shard on worker 0, for one ``saved()``; all must call it."""
        if self.columns.sharded:
            self._gathered = self.columns.gather(self.values)

    def saved(self, values: Tensor) -> Tensor:
        """Return all columns for a checkpoint, given ``values`` as torch would save them."""
        if not self.columns.sharded:
            return values
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise ValueError(
                "the values are sharded over workers, and have not been gathered: call "
                "gather_values() on all workers before state_dict() on worker 0"
            )
        return gathered

    def loaded(self, values: Tensor) -> Tensor:
        """Return this worker's columns of ``values`` of a checkpoint."""
        whole = values.dim() == 2 and values.size(1) == self.columns.width
        return self.columns.own(values) if self.columns.sharded and whole else values
