"""κ and α of each layer, in fairseq's log and in TensorBoard.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.logging import metrics
from torch import nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights

# behind the loss and what comes with it
_PRIORITY = 50


def log_branch_weights(model: nn.Module, weights: Mapping[str, BranchWeights]) -> None:
    """Have validation log the κ and α that ``model`` has learned, by the names of ``weights``.

    Each branch of each logs ``NAME_kappa1``, ``NAME_kappa2``, … and ``NAME_alpha1``, …
    """
    model.register_forward_pre_hook(_Logging(weights))


class _Logging:
    """A hook before a model's forward pass, which can be pickled with the model."""

    def __init__(self, weights: Mapping[str, BranchWeights]) -> None:
        self._weights = weights
        self._logged_in: Any = None

    def __reduce__(self) -> tuple:
        return _Logging, (self._weights,)

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        # fairseq opens an aggregator for each pass over a validation set: once in each is enough,
        # as it waits for a GPU
        root = next(iter(metrics.get_active_aggregators()), None)
        if model.training or root is self._logged_in:
            return
        self._logged_in = root
        for name, of_layer in self._weights.items():
            for kind, values in zip(("kappa", "alpha"), of_layer.learned(), strict=True):
                for number, value in enumerate(values.tolist(), start=1):
                    key = f"{name}_{kind}{number}"
                    metrics.log_derived(key, lambda _, value=value: round(value, 4), _PRIORITY)
