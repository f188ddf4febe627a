"""Options of the Weighted Transformer, and which values and options of fairseq it refuses."""

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from fairseq_plugins.fairseq_integration.error_messages import flag, option
from fairseq_plugins.fairseq_integration.transformer_options import TransformerOptions
from fairseq_plugins.weighted_transformer.branch_weights import (
    LEARNED,
    NEAR_UNIFORM,
    PARAMETERIZATIONS,
    REPLACEMENTS,
    STARTS,
)

READINGS = SUBLAYERS, AS_WRITTEN = ("sublayers", "as-written")
SUMS = ONE, BRANCHES = ("one", "branches")
SHAKE = "shake"
# of a decoder layer
ATTENTIONS, BOTH = ("encoder", "self"), "both"


@dataclass
class BranchOptions(FairseqDataclass):
    """Options of ``weighted_transformer`` that fairseq's ``transformer`` does not have."""

    branch_residual: ChoiceEnum(list(READINGS)) = option(
        SUBLAYERS,
        "where residual connections and norms are: around attention and feed-forward network "
        "each (sublayers), or around both together (as-written)",
    )
    branch_sum: ChoiceEnum(list(SUMS)) = option(
        BRANCHES,
        "the sum of kappa, and of alpha, as they are applied: 1 as published, or the number of "
        "branches, which keeps the plain transformer's scale",
    )
    branch_start: ChoiceEnum(list(STARTS)) = option(
        NEAR_UNIFORM,
        "kappa and alpha start at a random place of the simplex, or near-uniform: near 1/M, the "
        "largest twice the smallest",
    )
    branch_training: ChoiceEnum([LEARNED, SHAKE]) = option(
        LEARNED,
        "kappa and alpha are learned, or drawn anew in each forward pass of training and 1/M "
        "outside of it (shake, the Shake-Shake-like strategy of section 4.4)",
    )
    branch_decoder_attention: ChoiceEnum([*ATTENTIONS, BOTH]) = option(
        "encoder",
        "which attention of a decoder layer is branched: that to the encoder, masked "
        "self-attention, or both",
    )
    branch_parameterization: ChoiceEnum(list(PARAMETERIZATIONS)) = option(
        "simplex",
        "kappa and alpha are projected to the simplex after each update, or are the softmax of "
        "logits",
    )
    branch_weights: ChoiceEnum(list(REPLACEMENTS)) = option(
        LEARNED,
        "what evaluation weighs branches by, through --model-overrides: the learned kappa and "
        "alpha, random ones (by --seed), or 1/M (table 3)",
    )
    branch_top_k: Optional[int] = option(
        None,
        "only the heads with the K largest kappa of an attention and the slices with the K "
        "largest alpha of a feed-forward network contribute; in the reading as-written the "
        "branches with the K largest alpha (section 4.5; default: all)",
    )
    branch_lr: float = option(1.0, "what multiplies the published learning rate of kappa and alpha")
    branch_warmup_updates: int = option(400, "updates until that learning rate falls")
    freeze_branch_weights_after: Optional[int] = option(
        None,
        "updates after which kappa and alpha stay as they are: 10,000 before the last (section "
        "4.1; default: never)",
    )


@dataclass
class WeightedTransformerConfig(BranchOptions, TransformerOptions):
    """Options of ``weighted_transformer``: fairseq's of ``transformer``, and the branches'."""


# with another value of these, the same weights compute something else
_READING = {"branch_residual": READINGS, "branch_sum": SUMS}


def reading_of(options: BranchOptions) -> Tensor:
    """Return a reading as a checkpoint holds it: each option's place among its values, (2,)."""
    return torch.tensor([known.index(getattr(options, name)) for name, known in _READING.items()])


def check_reading(asked: Tensor, saved: Tensor) -> None:
    """Refuse a checkpoint of another reading than the model's, both as :func:`reading_of`."""
    given, trained = [], []
    for (name, known), here, there in zip(
        _READING.items(), asked.tolist(), saved.tolist(), strict=True
    ):
        if here != there:
            given.append(f"{flag(name)} is {known[here]}")
            trained.append(f"{flag(name)} {known[there]}")
    if given:
        remedy = " ".join(trained)
        raise ValueError(
            f"{' and '.join(given)}, and the checkpoint was trained with {remedy}: give {remedy}"
        )


def check_options(options: BranchOptions) -> None:
    """Refuse values that the branches cannot have."""
    for field in dataclasses.fields(BranchOptions):
        if not (isinstance(field.type, type) and issubclass(field.type, Enum)):
            continue
        value, known = getattr(options, field.name), [choice.value for choice in field.type]
        if value not in known:
            raise ValueError(f"{flag(field.name)} is {value!r}: there are {', '.join(known)}")
    if not options.branch_lr > 0:
        raise ValueError(f"--branch-lr is {options.branch_lr}: it must be above 0")
    if options.branch_warmup_updates < 1:
        raise ValueError(
            f"--branch-warmup-updates is {options.branch_warmup_updates}: it must be at least 1"
        )
    freeze_after = options.freeze_branch_weights_after
    if freeze_after is not None and freeze_after < 0:
        raise ValueError(f"--freeze-branch-weights-after is {freeze_after}: it must be 0 or more")


def check_parts(cfg: TransformerConfig) -> None:
    """Refuse what fairseq's own layers can do and branched ones cannot."""
    for name, value in [
        ("cross_self_attention", cfg.cross_self_attention),
        ("no_cross_attention", cfg.no_cross_attention),
        ("quant_noise_pq", cfg.quant_noise.pq),
        ("quant_noise_scalar", cfg.quant_noise.scalar),
        ("encoder_xformers_att_config", cfg.encoder.xformers_att_config),
        ("decoder_xformers_att_config", cfg.decoder.xformers_att_config),
    ]:
        if value:
            raise ValueError(
                f"{flag(name)} is {value}: weighted_transformer does not have it; leave it out, "
                "or take --arch transformer"
            )
