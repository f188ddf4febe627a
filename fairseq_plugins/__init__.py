"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models with fairseq.
"""

import argparse

import torch

try:
    import fairseq
except ModuleNotFoundError as error:
    if error.name != "fairseq":
        raise
    raise ModuleNotFoundError(
        "fairseq_plugins needs fairseq 0.12, which is not installed: "
        "pip install --no-build-isolation 'fairseq-fixed==0.12.3.1'",
        name="fairseq",
    ) from None

if tuple(int(part) for part in fairseq.__version__.split(".")[:2]) < (0, 12):
    raise ImportError(
        f"fairseq_plugins needs fairseq 0.12, and {fairseq.__version__} is installed: "
        "pip install --no-build-isolation 'fairseq-fixed==0.12.3.1'"
    )

# Checkpoints of models that are built from parsed arguments (fairseq's translation transformer)
# hold this class, a plain container; torch's safe loader refuses classes it has not been told of.
torch.serialization.add_safe_globals([argparse.Namespace])

from fairseq_plugins.criterions import exact_adaptive_loss  # noqa: E402, F401
from fairseq_plugins.models import all_attention  # noqa: E402, F401
from fairseq_plugins.tasks import segment_language_modeling  # noqa: E402, F401
