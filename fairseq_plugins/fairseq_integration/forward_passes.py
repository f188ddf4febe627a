"""Which kind of forward pass this is: one that is recomputed, or inference with fixed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def is_recomputed() -> bool:
    """Return whether activation checkpointing runs this forward pass a second time.

    What counts passes, such as running statistics, counted this one the first time.
    """
    return torch._C._current_graph_task_id() != -1


class InferenceCache(Generic[Value]):
    """A value computed from weights, kept until a weight changes.

    Its owner calls :meth:`clear` when training begins: fairseq's optimizers for half precision
    write weights behind autograd's back.
    """

    def __init__(self) -> None:
        self._weights: list[tuple[int, int]] = []
        self._value: Value | None = None

    def __reduce__(self) -> tuple:
        return InferenceCache, ()

    def get(self, weights: Iterable[Tensor], compute: Callable[[], Value]) -> Value:
        """Return the value of ``compute()`` for the present contents of ``weights``."""
        now = [(weight.data_ptr(), weight._version) for weight in weights]
        if self._value is None or self._weights != now:
            self._weights, self._value = now, compute()
        return self._value

    def clear(self) -> None:
        """Forget the value."""
        self._value = None
