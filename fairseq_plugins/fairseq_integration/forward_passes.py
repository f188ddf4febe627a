"""Forward passes outside of plain training: recomputed ones and inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def is_recomputed() -> bool:
    """Return whether activation checkpointing runs this forward pass a second time.

    Running statistics and counters must skip the second time.
    """
    # the second time, a backward pass is running; compilers cannot trace this query
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class InferenceCache(Generic[Value]):
    """Cache of a value that is computed from weights, until the weights change.

    It notices changes in place that autograd counts, and new data, such as after ``.half()``. It
    does not notice fairseq's optimizers, so the owner must call :meth:`clear` when training begins.
    Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[tuple[int, int]], Value, list[torch.UntypedStorage]] | None = None

    def __reduce__(self) -> tuple:
        return type(self), ()

    def get(self, weights: Iterable[Tensor], compute: Callable[[], Value]) -> Value:
        """Return the value for the current ``weights``, which come in the same order each time."""
        weights = list(weights)
        if any(weight.is_inference() for weight in weights):
            return compute()  # autograd does not count changes of these tensors
        state = [(weight.data_ptr(), weight._version) for weight in weights]
        if self._kept is None or state != self._kept[0]:
            # hold the data: otherwise new data could get the same address
            self._kept = state, compute(), [weight.untyped_storage() for weight in weights]
        return self._kept[1]

    def clear(self) -> None:
        """Forget the value."""
        self._kept = None
