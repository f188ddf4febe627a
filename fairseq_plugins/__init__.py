"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Its tasks and models are registered as soon as both this package and fairseq are imported. From
Python, ``fairseq_plugins.load`` loads a trained model, and :mod:`fairseq_plugins.modules` holds the
layers, which do not need fairseq.
"""

from typing import Any

from fairseq_plugins.fairseq_integration.registration import (
    register,
    register_when_fairseq_is_imported,
)

__all__ = ["load"]
__version__ = "1.0.0"

register_when_fairseq_is_imported()


def __getattr__(name: str) -> Any:
    """Import ``load``, which needs fairseq, on first use."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    from fairseq_plugins.python_interface.loading import load

    return load
