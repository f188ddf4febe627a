"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models with fairseq. ``load`` is for use from Python:
``from fairseq_plugins import load``.
"""

from typing import Any

REMEDY = "pip install --no-build-isolation 'fairseq-fixed==0.12.3.1'"

try:
    import fairseq
except ModuleNotFoundError as error:
    if error.name != "fairseq":
        raise
    raise ModuleNotFoundError(
        f"fairseq_plugins needs fairseq 0.12, which is not installed: {REMEDY}", name="fairseq"
    ) from None

if tuple(int(part) for part in fairseq.__version__.split(".")[:2]) < (0, 12):
    raise ImportError(
        f"fairseq_plugins needs fairseq 0.12, and {fairseq.__version__} is installed: {REMEDY}"
    )

# each registers its models, tasks, losses and optimizers
from fairseq_plugins import (
    all_attention,
    product_key_memory,
    segment_language_model,
    transformer_xl,
    weighted_transformer,
)
from fairseq_plugins.fairseq_integration.checkpoint_files import keep_checkpoints_whole
from fairseq_plugins.fairseq_integration.presets import apply_presets, keep_bf16_off_tpus
from fairseq_plugins.fairseq_integration.safe_loading import allow_option_containers

allow_option_containers()
apply_presets()
keep_bf16_off_tpus()
keep_checkpoints_whole()


def __getattr__(name: str) -> Any:
    """Return ``load``, which fairseq's commands have no use for, when it is asked for."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq_plugins.python_interface.loading import load

    return load
