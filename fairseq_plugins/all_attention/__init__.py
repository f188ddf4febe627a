"""All-attention: persistent vectors in place of feed-forward layers, and adaptive attention span.

Sukhbaatar et al. 2019 (arXiv:1907.01470 and arXiv:1905.07799).
"""

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors, SoftmaxFeedForward
from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ, refuse_without_fairseq

if HAS_FAIRSEQ:
    from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip
    from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = [
    "AdagradWithClip",
    "AdaptiveSpan",
    "AllAttention",
    "AllAttentionConfig",
    "AllAttentionLanguageModel",
    "PersistentVectors",
    "SoftmaxFeedForward",
]
