"""Options of the Weighted Transformer, and the options of fairseq that it refuses."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.fairseq_integration.options import check_range, flag, option
from fairseq_plugins.fairseq_integration.transformer_options import TransformerOptions
from fairseq_plugins.weighted_transformer.branch_weights import (
    LEARNED,
    NEAR_UNIFORM,
    PARAMETERIZATIONS,
    REPLACEMENTS,
    SIMPLEX,
    STARTS,
)
from fairseq_plugins.weighted_transformer.layers import SUBLAYERS, VARIANTS

SUMS = ONE, BRANCHES = ("one", "branches")
SHAKE = "shake"
OPTIMIZER = "adam_with_branch_weights"
# which attentions of a decoder layer have branches
ATTENTIONS = {"encoder": ("encoder",), "self": ("self",), "both": ("encoder", "self")}


@dataclass
class BranchOptions(FairseqDataclass):
    """Options of ``weighted_transformer`` that fairseq's ``transformer`` does not have."""

    branch_residual: ChoiceEnum(list(VARIANTS)) = option(
        SUBLAYERS,
        "place residual connections and norms around attention and around the feed-forward "
        "network (sublayers), or around both together (as-written)",
    )
    branch_sum: ChoiceEnum(list(SUMS)) = option(
        ONE,
        "what kappa and alpha each sum to when they are applied: 1, as published, or the number "
        "of branches, which keeps the scale of the plain transformer and continues one",
    )
    branch_start: ChoiceEnum(list(STARTS)) = option(
        NEAR_UNIFORM,
        "start kappa and alpha at a random point of the simplex, or near-uniform: near 1/M, the "
        "largest twice the smallest",
    )
    branch_training: ChoiceEnum([LEARNED, SHAKE]) = option(
        LEARNED,
        "learn kappa and alpha, or draw them anew in each forward pass of training and use 1/M "
        "in evaluation (shake, the Shake-Shake-like strategy of section 4.4)",
    )
    branch_decoder_attention: ChoiceEnum(list(ATTENTIONS)) = option(
        "encoder",
        "which attention of a decoder layer has branches: attention to the encoder, "
        "self-attention, or both",
    )
    branch_parameterization: ChoiceEnum(list(PARAMETERIZATIONS)) = option(
        SIMPLEX,
        "project kappa and alpha to the simplex after each update, or compute them as the softmax "
        "of logits",
    )
    branch_weights: ChoiceEnum(list(REPLACEMENTS)) = option(
        LEARNED,
        "the weights in evaluation, set by --model-overrides: learned, random (by --seed), or "
        "uniform, which is 1/M (table 3)",
    )
    branch_top_k: Optional[int] = option(
        None,
        "use only the heads with the K largest kappa of an attention and the slices with the K "
        "largest alpha of a feed-forward network; the variant as-written uses the branches with "
        "the K largest alpha (section 4.5; default: all)",
    )
    branch_lr: float = option(1.0, "factor of the published learning rate of kappa and alpha")
    branch_warmup_updates: int = option(400, "updates in which this learning rate rises")
    freeze_branch_weights_after: Optional[int] = option(
        None,
        "number of updates after which kappa and alpha stay as they are; the paper freezes them "
        "for the last 10,000 updates (section 4.1; default: never)",
    )


@dataclass
class WeightedTransformerConfig(BranchOptions, TransformerOptions):
    """Options of ``weighted_transformer``: those of fairseq's ``transformer``, and of branches."""

    # evaluation has no optimizer
    branch_optimizer: Optional[str] = II("oc.select:optimizer._name,null")


# options of fairseq's transformer that the layers here do not have
_NOT_SUPPORTED = (
    *("cross_self_attention", "no_cross_attention", "quant_noise_pq", "quant_noise_scalar"),
    *("encoder_xformers_att_config", "decoder_xformers_att_config", "base_layers"),
)


def check_options(options: BranchOptions, args: Namespace) -> None:
    """Refuse values that branches cannot have, and options of fairseq's that they lack."""
    check_range(options, 0, "branch_lr", "freeze_branch_weights_after")
    check_range(options, 1, "branch_warmup_updates")
    optimizer = getattr(args, "branch_optimizer", getattr(args, "optimizer", None))
    if options.branch_training != SHAKE and optimizer not in (None, OPTIMIZER):
        raise ValueError(
            f"--optimizer is {optimizer}: it would train kappa and alpha like all other weights, "
            f"without their learning rate and their simplex: give --optimizer {OPTIMIZER}"
        )
    for name in _NOT_SUPPORTED:
        value = getattr(args, name, None)
        if value:
            raise ValueError(
                f"{flag(name)} is {value}: weighted_transformer does not have it; leave it out, "
                "or take --arch transformer"
            )
