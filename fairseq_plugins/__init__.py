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

from fairseq_plugins.all_attention import adagrad_with_clip, span_loss
from fairseq_plugins.all_attention import model as all_attention_model
from fairseq_plugins.fairseq_integration.safe_loading import allow_option_containers
from fairseq_plugins.product_key_memory import model as product_key_memory_model
from fairseq_plugins.product_key_memory import optimizer as product_key_memory_optimizer
from fairseq_plugins.segment_language_model import adaptive_softmax, task
from fairseq_plugins.transformer_xl import latter_half_loss
from fairseq_plugins.transformer_xl import model as transformer_xl_model
from fairseq_plugins.weighted_transformer import model as weighted_transformer_model
from fairseq_plugins.weighted_transformer import optimizer as weighted_transformer_optimizer

allow_option_containers()
