"""Which forward passes are fairseq's validation, for what is logged in it alone."""

from __future__ import annotations

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
