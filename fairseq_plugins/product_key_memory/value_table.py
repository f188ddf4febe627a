"""The table of values that one or more memories read: storage, gradient, moments and update.

It hides from the layer and the optimizer whether a worker holds all columns or a shard
(:mod:`.sharding`), and whether values stay in bfloat16 (:mod:`.lazy_adam`).

Shapes: K rows, d width, c columns of this worker, N tokens, R rows read by a token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.forward_passes import is_recomputed
from fairseq_plugins.fairseq_integration.parameters import UpdateRule
from fairseq_plugins.product_key_memory.lazy_adam import Moments, MomentsOfReadRows
from fairseq_plugins.product_key_memory.sharding import GATHERED_AT_ONCE, choose_columns
from fairseq_plugins.product_key_memory.values import (
    SpareRows,
    add_row_gradients,
    plain_weighted_sum,
    prepare_gradient,
)


class ValueTable(UpdateRule):
    """Values (K, d) drawn from N(0, std²), or this worker's columns of them, (K, c).

    ``dtype`` is ``torch.bfloat16`` for values that stay in it. ``readers`` are the keys of the
    memories that read the table, ``moments`` are Adam's, None before the first update.
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
        self.moments: Moments | None = None
        self._spare: SpareRows | None = None
        # all columns and their state, between gather() and the save that follows
        self._gathered: Tensor | None = None
        self._gathered_state: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the moments out of copies and pickles: they belong to one training."""
        return {**vars(self), "moments": None}

    @torch.no_grad()
    def _draw(self, std: float) -> None:
        """Draw the same table as a single worker, part by part, to save memory."""
        width = self.columns.width
        # parts with a multiple of 16 numbers get the same draws as the whole
        rows = max(16, GATHERED_AT_ONCE // width // 16 * 16)
        for part in self.values.split(rows):
            part.copy_(self.columns.own(torch.empty(len(part), width).normal_(std=std)))

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole table, (K, d)."""
        return len(self.values), self.columns.width

    # --- reading, and the gradient

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

        Rows that are ``frozen`` (K,) get no gradient. A gradient beside autograd is always sparse,
        and only exists in ``training``.
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
        # Training code may clear only the gradients that it knows. If the keys have no gradient,
        # a pass that failed has left this one.
        of_keys = [next(keys.parameters()) for keys in self.readers]
        learned = [parameter for parameter in of_keys if parameter.requires_grad]
        cleared = learned and all(parameter.grad is None for parameter in learned)
        if cleared and not is_recomputed():
            self.values.grad = None
        leaf = self.values.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(functools.partial(self._add_gradient, plain))
        return leaf

    def _add_gradient(self, plain: bool, leaf: Tensor) -> None:
        """Add the gradient of ``leaf`` to the values' gradient."""
        grad, leaf.grad = prepare_gradient(leaf.grad, plain), None
        if self.values.grad is not None:
            grad = add_row_gradients(self.values.grad, grad)
        self.values.grad = grad

    def average_gradient(self) -> None:
        """Average the gradient over the workers; all must call this."""
        self.values.grad = self.columns.average(self.values, self.values.grad)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole table's gradient, in fp32; all workers must call this."""
        return self.columns.norm(
            torch.linalg.vector_norm(self.values.grad._values(), dtype=torch.float32)
        )

    # --- the update

    @torch.no_grad()
    def update(
        self, lr: float, decay: float, betas: tuple[float, float], eps: float, scale: Tensor
    ) -> None:
        """Take a step of lazy Adam with ``scale`` times the gradient, then clear the gradient."""
        grad, self.values.grad = self.values.grad, None
        if grad is None:
            return
        if self.moments is None:
            self.moments = self._new_moments()
        self.moments.step += 1
        correction1, correction2 = (1 - beta**self.moments.step for beta in betas)
        self.moments.update(
            self.values,
            grad,
            betas=betas,
            scale=scale.to(grad.device),
            decay=decay * lr,
            step_size=lr * correction2**0.5 / correction1,
            eps=eps,
        )
        if self._spare is not None:
            self._spare.give_back(grad._values())

    def _new_moments(self) -> Moments:
        return (MomentsOfReadRows if self.stays_bf16 else Moments)(self.values, self.columns)

    # --- checkpoints

    def gather(self) -> None:
        """Gather shards and their state on worker 0, for one save; all workers must call this."""
        if self.columns.sharded:
            self._gathered = self.columns.gather(self.values)
            self._gathered_state = {} if self.moments is None else self.moments.save()

    def saved(self, values: Tensor) -> Tensor:
        """Return all columns for a checkpoint; ``values`` are what torch would save."""
        if not self.columns.sharded:
            return values
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise ValueError(
                "the values are sharded over workers, and have not been gathered: call "
                "gather_values() on all workers before state_dict() on worker 0"
            )
        return gathered

    def state(self) -> dict[str, Any]:
        """Return the state of all columns for a checkpoint; {} before the first update."""
        if not self.columns.sharded:
            return {} if self.moments is None else self.moments.save()
        state, self._gathered_state = self._gathered_state, None
        if state is None:
            raise ValueError(
                "a memory's values are sharded over workers: call consolidate_state_dict() on "
                "all of them before state_dict() on worker 0"
            )
        return state

    def load_state(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`state` returned, in whole or sharded tables."""
        moments = None
        if saved:
            if ("rows" in saved) != self.stays_bf16:
                raise ValueError(
                    "the checkpoint's optimizer state belongs to values of another dtype"
                )
            length, width = saved["exp_avg"].shape
            shape = saved.get("slots", length), width
            if shape != self.shape:
                raise ValueError(
                    "the checkpoint's optimizer state has a memory with values of shape "
                    f"{shape}, and the model has {self.shape}"
                )
            moments = self._new_moments()
            moments.step = int(saved["step"])
            moments.load(self.values, saved)
        self.moments = moments
