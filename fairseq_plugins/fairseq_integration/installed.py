"""Whether fairseq is installed: without it the package has its layers alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

REMEDY = "pip install --no-build-isolation 'fairseq-fixed==0.12.3.1'"


def _find_fairseq() -> bool:
    """Return whether fairseq is installed; raise ``ImportError`` for one that is too old."""
    try:
        import fairseq
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        return False
    if tuple(int(part) for part in fairseq.__version__.split(".")[:2]) < (0, 12):
        raise ImportError(
            f"fairseq_plugins needs fairseq 0.12, and {fairseq.__version__} is installed: {REMEDY}"
        )
    return True


HAS_FAIRSEQ = _find_fairseq()


def refuse_without_fairseq(package: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a package that lacks those of its names that take fairseq.

    It raises ``ModuleNotFoundError`` with the remedy for a name in the package's ``__all__``, and
    ``AttributeError`` for any other.
    """

    def refuse(name: str) -> NoReturn:
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        raise ModuleNotFoundError(
            f"{package}.{name} needs fairseq 0.12, which is not installed: {REMEDY}", name="fairseq"
        )

    return refuse
