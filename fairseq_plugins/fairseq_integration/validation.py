"""Which forward passes are fairseq's validation, for what is logged in it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from torch import nn

# The priority with which fairseq's log has something behind the loss and what comes with it.
AFTER_THE_LOSS = 50


def validation_pass(model: nn.Module) -> MetersDict | None:
    """Return what logs the pass over a validation set that this forward pass of a model is part of.

    It is another object in each such pass; None in training, evaluation and generation.
    """
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
        metrics.log_derived(name, figure, AFTER_THE_LOSS)
