"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models with fairseq.
"""

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

from fairseq_plugins.checkpoint_safety import allow_option_containers
from fairseq_plugins.criterions import exact_adaptive_loss, latter_half_loss, span_loss
from fairseq_plugins.models import (
    all_attention,
    product_key_memory,
    transformer_xl,
    weighted_transformer,
)
from fairseq_plugins.optim import adagrad_with_clip, adam_with_branch_weights, adam_with_memory
from fairseq_plugins.tasks import segment_language_modeling

allow_option_containers()
