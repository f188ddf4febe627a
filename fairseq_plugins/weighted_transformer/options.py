"""Options of the Weighted Transformer, and what is refused of them and of fairseq's own."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from fairseq_plugins.fairseq_integration.transformer_options import TransformerOptions
from fairseq_plugins.weighted_transformer.branch_weights import (
    LEARNED,
    NEAR_UNIFORM,
    PARAMETERIZATIONS,
    REPLACEMENTS,
    STARTS,
    UNIFORM,
)
from fairseq_plugins.weighted_transformer.layers import IN_BRANCHES, IN_NETWORKS, NOWHERE

# the optimizer that knows the schedule of κ and α
OPTIMIZER = "adam_with_branch_weights"

SUBLAYERS = "sublayers"
ONE, BRANCHES = "one", "branches"
SLICES, SHARED = "slices", "shared"
SHAKE = "shake"
# with another value of these, the same weights compute something else
_READING = ("branch_residual", "branch_sum", "branch_feed_forward")
# of a decoder layer
ATTENTIONS, BOTH = ("encoder", "self"), "both"


@dataclass
class BranchOptions(FairseqDataclass):
    """Options of ``weighted_transformer`` that fairseq's ``transformer`` does not have.

    A checkpoint that lacks an option was trained with its default, or with ``older_checkpoints``.
    Of ``_READING`` it holds places among the choices, so further ones are to stand last.
    """

    branch_residual: ChoiceEnum([NOWHERE, SUBLAYERS, IN_NETWORKS, IN_BRANCHES]) = field(
        default=SUBLAYERS,
        metadata={
            "help": "where residual connections and norms are: around attention and networks "
            "together (as-written), around each (sublayers), in the branches' networks as well, or "
            "around each branch as well",
            "older_checkpoints": NOWHERE,
        },
    )
    branch_sum: ChoiceEnum([ONE, BRANCHES]) = field(
        default=BRANCHES,
        metadata={
            "help": "the sum of kappa, and of alpha, as they are applied: 1 as published, or the "
            "number of branches, which keeps the plain transformer's scale",
            "older_checkpoints": ONE,
        },
    )
    branch_start: ChoiceEnum(list(STARTS)) = field(
        default=NEAR_UNIFORM,
        metadata={
            "help": "kappa and alpha start at a random place of the simplex, or near-uniform: "
            "near 1/M, the largest twice the smallest"
        },
    )
    branch_training: ChoiceEnum([LEARNED, SHAKE]) = field(
        default=LEARNED,
        metadata={
            "help": "kappa and alpha are learned, or drawn anew in each forward pass of training "
            "and 1/M outside of it (shake, the Shake-Shake-like strategy of section 4.4)"
        },
    )
    branch_feed_forward: ChoiceEnum([SLICES, SHARED]) = field(
        default=SLICES,
        metadata={
            "help": "each branch has a slice of the feed-forward network, or all branches share "
            "the whole"
        },
    )
    branch_decoder_attention: ChoiceEnum([*ATTENTIONS, BOTH]) = field(
        default="encoder",
        metadata={
            "help": "which attention of a decoder layer is branched: that to the encoder, masked "
            "self-attention, or both"
        },
    )
    branch_parameterization: ChoiceEnum(list(PARAMETERIZATIONS)) = field(
        default="simplex",
        metadata={
            "help": "kappa and alpha are projected to the simplex after each update, or are the "
            "softmax of logits"
        },
    )
    branch_weights: ChoiceEnum(list(REPLACEMENTS)) = field(
        default=LEARNED,
        metadata={
            "help": "what evaluation weighs branches by, through --model-overrides: the learned "
            "kappa and alpha, random ones (by --seed), or 1/M (table 3)"
        },
    )
    branch_top_k: Optional[int] = field(
        default=None,
        metadata={
            "help": "only the branches with the K largest alpha contribute; in the reading "
            "sublayers the heads with the K largest kappa of an attention, and the slices with the "
            "K largest alpha of a feed-forward network (section 4.5; default: all)"
        },
    )
    branch_lr: float = field(
        default=1.0,
        metadata={"help": "what multiplies the published learning rate of kappa and alpha"},
    )
    branch_warmup_updates: int = field(
        default=400, metadata={"help": "updates until that learning rate falls"}
    )
    freeze_branch_weights_after: Optional[int] = field(
        default=None,
        metadata={
            "help": "updates after which kappa and alpha stay as they are: 10,000 before the last "
            "(section 4.1; default: never)"
        },
    )


@dataclass
class WeightedTransformerConfig(BranchOptions, TransformerOptions):
    """Options of ``weighted_transformer``: fairseq's of ``transformer``, and the branches'."""


def branch_options(args: argparse.Namespace) -> BranchOptions:
    """Return the branches' options; those that the arguments lack have their defaults."""
    names = [option.name for option in dataclasses.fields(BranchOptions)]
    return BranchOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _choices(name: str) -> list[str]:
    """Return the values that an option may have."""
    (option,) = (x for x in dataclasses.fields(BranchOptions) if x.name == name)
    return [choice.value for choice in option.type]


def reading_places(options: BranchOptions) -> Tensor:
    """Return a reading as a checkpoint holds it: the place of each option's value, (3,)."""
    return torch.tensor([_choices(name).index(getattr(options, name)) for name in _READING])


def check_reading(asked: Tensor, saved: Tensor) -> None:
    """Refuse a checkpoint of another reading than the model's.

    Args:
        asked: of the model, as :func:`reading_places` returns it.
        saved: of the checkpoint.

    Raises:
        ValueError: they differ.
    """
    given, right = [], []
    for name, *places in zip(_READING, asked.tolist(), saved.tolist(), strict=True):
        here, there = (_choices(name)[place] for place in places)
        if here != there:
            option = f"--{name.replace('_', '-')}"
            given.append(f"{option} is {here}")
            right.append(f"{option} {there}")
    if right:
        remedy = " ".join(right)
        raise ValueError(
            f"{' and '.join(given)}, and the checkpoint was trained with {remedy}: give {remedy}"
        )


def check_options(options: BranchOptions) -> None:
    """Refuse values that the branches cannot have.

    Raises:
        ValueError: an option has a value that no such model has, or two do not go together.
    """
    for option in dataclasses.fields(BranchOptions):
        value = getattr(options, option.name)
        if isinstance(option.type, type) and issubclass(option.type, Enum):
            known = _choices(option.name)
            if value not in known:
                name = option.name.replace("_", "-")
                raise ValueError(f"--{name} is {value!r}: there are {', '.join(known)}")
    if not options.branch_lr > 0:
        raise ValueError(f"--branch-lr is {options.branch_lr}: it must be above 0")
    if options.branch_warmup_updates < 1:
        raise ValueError(
            f"--branch-warmup-updates is {options.branch_warmup_updates}: it must be at least 1"
        )
    freeze_after = options.freeze_branch_weights_after
    if freeze_after is not None and freeze_after < 0:
        raise ValueError(f"--freeze-branch-weights-after is {freeze_after}: it must be 0 or more")
    if options.branch_residual == SUBLAYERS and options.branch_feed_forward == SHARED:
        raise ValueError(
            f"--branch-feed-forward is {SHARED} with --branch-residual {SUBLAYERS}: all branches "
            "would compute the same, and alpha could not tell them apart; leave out one of the two"
        )
    if options.branch_training == SHAKE and options.branch_top_k is not None:
        raise ValueError(
            f"--branch-training {SHAKE} with --branch-top-k: no weight is larger than another "
            "outside of training; leave out one of the two"
        )
    # the layer refuses it too, but knows of no command
    if options.branch_top_k is not None and options.branch_weights == UNIFORM:
        raise ValueError(
            "--branch-weights uniform with --branch-top-k: no weight is larger than another; "
            "leave out one of the two (that of a trained model by --model-overrides "
            "\"{'branch_weights': 'uniform', 'branch_top_k': None}\")"
        )


def check_parts(cfg: TransformerConfig) -> None:
    """Refuse what fairseq's own layers can do and branched ones cannot.

    Raises:
        ValueError: such a thing is asked for.
    """
    for option, value in [
        ("cross-self-attention", cfg.cross_self_attention),
        ("no-cross-attention", cfg.no_cross_attention),
        ("quant-noise-pq", cfg.quant_noise.pq),
        ("quant-noise-scalar", cfg.quant_noise.scalar),
        ("encoder-xformers-att-config", cfg.encoder.xformers_att_config),
        ("decoder-xformers-att-config", cfg.decoder.xformers_att_config),
    ]:
        if value:
            raise ValueError(
                f"--{option} is {value}: the weighted_transformer has no such thing, leave it out "
                "or take --arch transformer"
            )
