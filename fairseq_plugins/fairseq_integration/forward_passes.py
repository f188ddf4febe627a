"""Forward passes outside of plain training: recomputed ones, inference and validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    # layers import this file without fairseq
    from fairseq.logging.meters import MetersDict

Value = TypeVar("Value")
# a priority that places a figure behind the loss in fairseq's log
AFTER_THE_LOSS = 50


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


def validation_pass(model: nn.Module) -> MetersDict | None:
    """Return the meters of the current pass over a validation set.

    Each pass has a new object; None in training, evaluation and generation.
    """
    from fairseq.logging import metrics

    # fairseq opens an aggregator for each pass over a validation set, which all workers read once
    # at the end; otherwise the first aggregator is the default one
    root = next(iter(metrics.get_active_aggregators()), None)
    return None if model.training or root is metrics.get_meters("default") else root


class ValidationWatcher:
    """Base class of objects that watch a model's forward passes in validation and log figures.

    The model's hooks hold the object, so it is copied and pickled with the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pass: Any = None
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        # fairseq's meters cannot be copied
        return {**vars(self), "_pass": None}

    def _before(self, model: nn.Module, inputs: tuple) -> None:
        current = validation_pass(model)
        if current is not None:
            begins = current is not self._pass
            self._pass = current
            self.before_batch(begins)

    def _after(self, model: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
        self.after_batch(inputs[0] if inputs else next(iter(named.values()), None))

    def before_batch(self, begins: bool) -> None:
        """Prepare for a batch of validation; ``begins`` is true for the first of a pass."""

    def after_batch(self, tokens: Any) -> None:
        """Collect after each forward pass, even in training or after an error."""

    @staticmethod
    def log(name: str, figure: Callable[[MetersDict], float]) -> None:
        """Log the result of ``figure``, which fairseq calls when it prints the meters."""
        from fairseq.logging import metrics

        metrics.log_derived(name, figure, AFTER_THE_LOSS)
