"""Forward passes that differ from the first one in training: recomputed, inference, validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    # layers import this file, and need no fairseq
    from fairseq.logging.meters import MetersDict

Value = TypeVar("Value")
# The priority with which fairseq's log has something behind the loss and what comes with it.
AFTER_THE_LOSS = 50


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
        self._kept: tuple[list[tuple[int, int]], Value, list[torch.UntypedStorage]] | None = None

    def __reduce__(self) -> tuple:
        return type(self), ()

    def get(self, weights: Iterable[Tensor], compute: Callable[[], Value]) -> Value:
        """Return the value for the present contents of ``weights``, always in the same order."""
        weights = list(weights)
        if any(weight.is_inference() for weight in weights):
            return compute()  # nobody counts the changes of such tensors
        state = [(weight.data_ptr(), weight._version) for weight in weights]
        if self._kept is None or state != self._kept[0]:
            # the address of data that is let go of may be that of other data by the next call
            self._kept = state, compute(), [weight.untyped_storage() for weight in weights]
        return self._kept[1]

    def clear(self) -> None:
        """Forget the value."""
        self._kept = None


def validation_pass(model: nn.Module) -> MetersDict | None:
    """Return the meters of the pass over a validation set that a forward pass is part of.

    They are another object in each such pass; None in training, evaluation and generation.
    """
    from fairseq.logging import metrics

    # fairseq opens an aggregator for each pass over a validation set, which all workers read once,
    # at the end; elsewhere the first aggregator is the default one
    root = next(iter(metrics.get_active_aggregators()), None)
    return None if model.training or root is metrics.get_meters("default") else root


class ValidationWatcher:
    """Base class of what watches a model's forward passes in validation and logs figures.

    The model's hooks hold it, and it is copied and pickled with the model.
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
        """Prepare for a batch of validation, the first of a pass over the set if ``begins``."""

    def after_batch(self, tokens: Any) -> None:
        """Collect after a forward pass, in training too, which an error may have ended."""

    @staticmethod
    def log(name: str, figure: Callable[[MetersDict], float]) -> None:
        """Log what ``figure`` returns when fairseq prints the meters."""
        from fairseq.logging import metrics

        metrics.log_derived(name, figure, AFTER_THE_LOSS)
