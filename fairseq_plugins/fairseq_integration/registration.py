"""Registers this package with fairseq as soon as both are imported, in either order.

The layers alone do not import fairseq, which takes longer than torch.
"""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

PACKAGE = "fairseq_plugins"
# REGISTERS of each lists its files with models, tasks, losses or optimizers
SUBPACKAGES = (
    "segment_language_model",
    "transformer_xl",
    "all_attention",
    "product_key_memory",
    "weighted_transformer",
)
REMEDY = "pip install --no-build-isolation 'fairseq-fixed==0.12.3.1'"
_registered = False


def register() -> None:
    """Register models, tasks, losses and optimizers, and change fairseq as docs/fairseq.md says."""
    global _registered
    if _registered:
        return
    sys.meta_path[:] = [hook for hook in sys.meta_path if not isinstance(hook, _AfterFairseq)]
    fairseq = _import_fairseq()
    if tuple(int(part) for part in fairseq.__version__.split(".")[:2]) < (0, 12):
        raise ImportError(
            f"{PACKAGE} needs fairseq 0.12, and {fairseq.__version__} is installed: {REMEDY}"
        )
    _registered = True
    # --sample-break-mode eos and fairseq-interactive read numpy.compat.long; numpy 2 lacks it
    numpy: Any = importlib.import_module("numpy")
    if not hasattr(numpy, "compat"):
        numpy.compat = SimpleNamespace(long=int)
    for subpackage in SUBPACKAGES:
        for file in importlib.import_module(f"{PACKAGE}.{subpackage}").REGISTERS:
            importlib.import_module(f"{PACKAGE}.{subpackage}.{file}")
    changes = {
        "safe_loading": ("allow_option_containers", "read_checkpoints_safely"),
        "checkpoint_files": ("write_checkpoints_whole",),
        "dictionaries": ("keep_dictionaries",),
        "resuming": ("resume_as_if_unbroken",),
        "presets": ("apply_presets", "keep_bf16_off_tpus"),
        "error_messages": ("print_errors_as_sentences",),
        "command_options": ("explain_and_check_options",),
        "distributed": ("check_devices",),
    }
    for file, functions in changes.items():
        module = importlib.import_module(f"{PACKAGE}.fairseq_integration.{file}")
        for function in functions:
            getattr(module, function)()


def register_with_subpackage() -> None:
    """Register when a subpackage is imported, unless ``modules`` was imported before."""
    if f"{PACKAGE}.modules" not in sys.modules:
        try:
            register()
        except ModuleNotFoundError as error:
            if error.name != "fairseq":
                raise


def register_when_fairseq_is_imported() -> None:
    """Register now if fairseq is imported, otherwise right after its import."""
    if "fairseq" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterFairseq())


def _import_fairseq() -> ModuleType:
    """Import fairseq, and restore the logging setup, which some of its tasks change."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    was_imported = "fairseq" in sys.modules
    try:
        return importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise ModuleNotFoundError(
            f"this part of {PACKAGE} needs fairseq 0.12, which is not installed: {REMEDY}",
            name="fairseq",
        ) from error
    finally:
        if not was_imported:
            root.setLevel(level)
            root.handlers[:] = handlers


class _AfterFairseq(MetaPathFinder):
    """Registers this package after the import of fairseq."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find fairseq with the other finders."""
        if name != "fairseq":
            return None
        others = (hook for hook in sys.meta_path if hook is not self and hasattr(hook, "find_spec"))
        spec = next(filter(None, (hook.find_spec(name, path, target) for hook in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                # registering would import a half-executed file of this package again
                if not _imports_fairseq_itself():
                    register()

            spec.loader.exec_module = execute_and_register
        return spec


def _imports_fairseq_itself() -> bool:
    """Return whether a file of this package is being imported."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "<module>" and name.startswith(f"{PACKAGE}."):
            return True
        frame = frame.f_back
    return False
