"""Weighted Transformer (Ahmed et al. 2017, arXiv:1711.02132).

Translation with branched attention: learned weights κ and α, on the simplex, weigh the heads and
slices of the feed-forward network; in readings other than the default a head has its own network.
"""

from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ, refuse_without_fairseq
from fairseq_plugins.weighted_transformer.branch_weights import (
    BranchSchedule,
    BranchWeights,
    project_to_simplex,
)
from fairseq_plugins.weighted_transformer.branched_attention import (
    AttentionHeads,
    BranchedAttention,
    BranchedFeedForward,
)

if HAS_FAIRSEQ:
    from fairseq_plugins.weighted_transformer.layers import (
        BranchedDecoderLayer,
        BranchedEncoderLayer,
    )
    from fairseq_plugins.weighted_transformer.model import WeightedTransformer
    from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights
    from fairseq_plugins.weighted_transformer.options import BranchOptions
    from fairseq_plugins.weighted_transformer.residual_branches import (
        NormalizedBranches,
        ResidualBranches,
    )
    from fairseq_plugins.weighted_transformer.weighted_sublayers import (
        WeightedAttention,
        WeightedDecoderLayer,
        WeightedEncoderLayer,
        WeightedLinear,
    )
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = [
    "AdamWithBranchWeights",
    "AttentionHeads",
    "BranchOptions",
    "BranchSchedule",
    "BranchWeights",
    "BranchedAttention",
    "BranchedDecoderLayer",
    "BranchedEncoderLayer",
    "BranchedFeedForward",
    "NormalizedBranches",
    "ResidualBranches",
    "WeightedAttention",
    "WeightedDecoderLayer",
    "WeightedEncoderLayer",
    "WeightedLinear",
    "WeightedTransformer",
    "project_to_simplex",
]
