"""The layers for use on their own, under one import and without fairseq."""

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.all_attention.network import AllAttentionBlock, AllAttentionNetwork
from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors
from fairseq_plugins.product_key_memory.memory import MemoryOutput, ProductKeyMemory
from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import Clamped, Window
from fairseq_plugins.segment_language_model.network import (
    FeedForward,
    SegmentLayer,
    SegmentNetwork,
)
from fairseq_plugins.segment_language_model.past import HiddenStates, KeyValues, Past
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)
from fairseq_plugins.transformer_xl.network import TransformerXL, TransformerXLBlock
from fairseq_plugins.weighted_transformer.branch_weights import (
    BranchWeights,
    WeightedLinear,
    project_to_simplex,
)
from fairseq_plugins.weighted_transformer.layers import (
    WeightedAttention,
    WeightedDecoderLayer,
    WeightedEncoderLayer,
)

__all__ = [
    "AdaptiveSpan",
    "AllAttention",
    "AllAttentionBlock",
    "AllAttentionNetwork",
    "BranchWeights",
    "Clamped",
    "FeedForward",
    "HiddenStates",
    "KeyValues",
    "LearnedRelativePositions",
    "MemoryOutput",
    "Past",
    "PersistentVectors",
    "PositionBiases",
    "ProductKeyMemory",
    "QueryNetwork",
    "RelativeAttention",
    "RelativeKeyProjection",
    "SegmentLayer",
    "SegmentNetwork",
    "SinusoidalRelativePositions",
    "TransformerXL",
    "TransformerXLBlock",
    "WeightedAttention",
    "WeightedDecoderLayer",
    "WeightedEncoderLayer",
    "WeightedLinear",
    "Window",
    "project_to_simplex",
]
