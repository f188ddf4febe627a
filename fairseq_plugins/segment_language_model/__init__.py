"""Language models that read parallel streams of text, segment by segment, with recurrence.

Shared by Transformer-XL and all-attention: task, streams, decoder, layer, attention and its kernel.
"""

from fairseq_plugins.fairseq_integration.registration import register_with_room

<<<<<<< HEAD
if HAS_FAIRSEQ:
    from fairseq_plugins.segment_language_model.adaptive_softmax import BiasedAdaptiveSoftmax
    from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
    from fairseq_plugins.segment_language_model.loss import SegmentLoss
    from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
    from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = [
    "BiasedAdaptiveSoftmax",
    "Clamped",
    "FeedForward",
    "PositionBiases",
    "Recurrence",
    "RelativeAttention",
    "SegmentDecoder",
    "SegmentLanguageModel",
    "SegmentLanguageModelingTask",
    "SegmentLayer",
    "SegmentLoss",
    "Window",
    "plain_attention",
    "window_attention",
]
=======
REGISTERS = ("loss", "task")

register_with_room()
>>>>>>> main
