"""Registers the models, tasks, losses and optimizers of this package with fairseq."""

import importlib
import logging

MODULES = (
    "segment_language_model.loss",
    "segment_language_model.task",
    "transformer_xl.model",
    "all_attention.optimizer",
    "all_attention.model",
    "product_key_memory.model",
    "product_key_memory.optimizer",
    "weighted_transformer.model",
    "weighted_transformer.optimizer",
)


def register() -> None:
    """Register everything, and change fairseq as docs/fairseq.md says.

    A second call changes nothing. Raises ``ModuleNotFoundError`` without fairseq.
    """
    _import_fairseq()
    from fairseq_plugins.fairseq_integration.changes import change_fairseq

    for name in MODULES:
        importlib.import_module(f"fairseq_plugins.{name}")
    change_fairseq()


def _import_fairseq() -> None:
    """Import fairseq, and restore the logging set-up, which some of its tasks change."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise ModuleNotFoundError(
            "this part of fairseq_plugins needs fairseq 0.12, which is not installed: "
            "pip install --no-build-isolation 'fairseq-fixed==0.12.3.1'",
            name="fairseq",
        ) from error
    root.setLevel(level)
    root.handlers[:] = handlers
