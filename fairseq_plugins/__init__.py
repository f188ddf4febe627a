"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

If fairseq is imported already, as under its commands, importing this package registers tasks and
models. Otherwise :func:`load`, which loads a trained model, or :func:`register` does it.
:mod:`fairseq_plugins.modules` holds the layers, which do not need fairseq.
"""

import sys
from typing import Any

from fairseq_plugins.fairseq_integration.registration import register

__all__ = ["load", "register"]
__version__ = "1.0.0"

if sys.modules.get("fairseq") is not None:
    register()


def __getattr__(name: str) -> Any:
    """Import ``load``, which needs fairseq, on first use."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    from fairseq_plugins.python_interface.loading import load

    return load
