"""All-attention: persistent vectors in place of feed-forward layers, and adaptive attention span.

Sukhbaatar et al. 2019 (arXiv:1907.01470 and arXiv:1905.07799).
"""

from fairseq_plugins.fairseq_integration.registration import register_with_room

<<<<<<< HEAD
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
=======
REGISTERS = ("adagrad_with_clip", "model")

register_with_room()
>>>>>>> main
