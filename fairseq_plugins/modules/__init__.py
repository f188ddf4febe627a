"""The layers for use on their own, under one import and without fairseq."""

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import AllAttention, AllAttentionBlock
from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors
from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory
from fairseq_plugins.segment_language_model.attention import (
    FeedForward,
    PositionBiases,
    RelativeAttention,
    SegmentLayer,
)
from fairseq_plugins.segment_language_model.attention_blocks import Clamped, Window
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    RelativeKeyProjection,
    SharedRelativeKeys,
    SinusoidalRelativePositions,
)
from fairseq_plugins.transformer_xl.layers import TransformerXLBlock
from fairseq_plugins.weighted_transformer.as_written_attention import (
    AttentionHeads,
    BranchedAttention,
    BranchedFeedForward,
)
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, project_to_simplex

__all__ = [
    "AdaptiveSpan",
    "AllAttention",
    "AllAttentionBlock",
    "AttentionHeads",
    "BranchWeights",
    "BranchedAttention",
    "BranchedFeedForward",
    "Clamped",
    "FeedForward",
    "HiddenStates",
    "LearnedRelativePositions",
    "MemorySublayer",
    "PersistentVectors",
    "PositionBiases",
    "ProductKeyMemory",
    "RelativeAttention",
    "RelativeKeyProjection",
    "SegmentLayer",
    "SharedRelativeKeys",
    "SinusoidalRelativePositions",
    "TransformerXLBlock",
    "Window",
    "project_to_simplex",
]
