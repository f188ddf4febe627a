"""Forward passes that are not the first one in training: recomputed ones, and inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def is_recomputed() -> bool:
    """Return whether activation checkpointing runs this forward pass a second time.

    Running statistics and counters of passes skip it: they counted the first time.
    """
    # the second time, a backward pass is under way; compilers cannot ask
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class InferenceCache(Generic[Value]):
    """Cache of a value that is computed from weights, as long as the weights stay as they are.

    A weight has changed when autograd counts a change in place, or when its data lies elsewhere, as
    after ``.half()`` or on another device. fairseq's optimizers write weights behind autograd's
    back: the owner calls :meth:`clear` when training begins. Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple:
        return type(self), ()

    def get(self, weights: Iterable[Tensor], compute: Callable[[], Value]) -> Value:
        """Return the value for the present contents of ``weights``.

        Args:
            weights: all that the value depends on, in the same order at each call.
            compute: returns the value; called only where a weight has changed since the last call.
        """
        weights = list(weights)
        if any(weight.is_inference() for weight in weights):
            return compute()  # nobody counts the changes of such tensors
        state = [(weight.data_ptr(), weight._version) for weight in weights]
        if state != self._state:
            self._value = compute()
            self._state = state
            # the address of data that is let go of may be that of other data by the next call
            self._held = [weight.untyped_storage() for weight in weights]
        return self._value

    def clear(self) -> None:
        """Forget the value."""
        self._value: Value | None = None
        self._state: list[tuple[int, int]] | None = None
        self._held: list[torch.UntypedStorage] = []
