"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models with fairseq.
"""

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

from fairseq_plugins.checkpoint_safety import allow_option_containers
from fairseq_plugins.criterions import exact_adaptive_loss  # noqa: F401
from fairseq_plugins.models import all_attention  # noqa: F401
from fairseq_plugins.tasks import segment_language_modeling  # noqa: F401

allow_option_containers()
