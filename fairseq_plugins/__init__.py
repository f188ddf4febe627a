"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models as soon as fairseq is imported, too. For use
from Python, ``from fairseq_plugins import load`` loads a trained model, and
:mod:`fairseq_plugins.modules` holds the layers, which need no fairseq.
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
