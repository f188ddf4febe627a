"""The Weighted Transformer: translation with weighted branches of attention.

Ahmed, Keskar, Socher: Weighted Transformer Network for Machine Translation (2017,
arXiv:1711.02132). What is not branched is fairseq's own transformer.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn

from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.weighted_transformer.branch_statistics import log_branch_weights
from fairseq_plugins.weighted_transformer.branch_weights import (
    LEARNED,
    PARAMETERIZATIONS,
    REPLACEMENTS,
    BranchSchedule,
    BranchWeights,
)
from fairseq_plugins.weighted_transformer.layers import (
    BranchedDecoderLayer,
    BranchedEncoderLayer,
)
from fairseq_plugins.weighted_transformer.presets import PRESETS

# The optimizer that knows the schedule of κ and α.
OPTIMIZER = "adam_with_branch_weights"


@dataclass
class BranchOptions(FairseqDataclass):
    """Options of ``weighted_transformer`` that fairseq's ``transformer`` does not have."""

    branch_decoder_attention: ChoiceEnum(["encoder", "self"]) = field(
        default="encoder",
        metadata={
            "help": "which attention of a decoder layer is branched: that to the encoder, or "
            "masked self-attention"
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
            "help": "only the branches with the K largest alpha contribute (section 4.5; default: "
            "all)"
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


@register_model("weighted_transformer")
class WeightedTransformer(TransformerModel):
    """fairseq's translation transformer with branched attention in each layer.

    It takes fairseq's options as its parent does, as parsed arguments: fairseq's configuration of
    this model has parts in parts, which its command line cannot fill.
    """

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add fairseq's options and those of branches to ``parser``, without defaults."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, BranchOptions(), delete_default=True)

    @classmethod
    def build_model(cls, args: argparse.Namespace, task: Any) -> "WeightedTransformer":
        """Build the model for the task's dictionaries.

        Raises:
            ValueError: an option has a value that no such model has, or two do not go together.
        """
        options = _branch_options(args)
        _check(options)
        _check_training(args)
        _check_parts(TransformerConfig.from_namespace(args))
        model = super().build_model(args, task)
        # fairseq has completed the arguments
        cfg = TransformerConfig.from_namespace(args)
        _check_widths(cfg)
        weights = {
            **_put_branches(model.encoder, cfg, options, "encoder"),
            **_put_branches(model.decoder, cfg, options, "decoder"),
        }
        log_branch_weights(model, weights)
        return model

    # whether someone has asked for training, as fairseq does before each update; a model that is
    # loaded to translate is in training too until it is told otherwise
    _is_trained = False

    def train(self, mode: bool = True) -> "WeightedTransformer":
        """Set the module, and all in it, in training mode or out of it."""
        self._is_trained = mode
        return super().train(mode)

    def set_num_updates(self, num_updates: int) -> None:
        """Note the number of updates; fairseq does so before each.

        Raises:
            ValueError: training has begun with an optimizer that knows nothing of κ and α, or with
                others in their place when it validates.
        """
        super().set_num_updates(num_updates)
        if not self._is_trained:
            return
        found = [module for module in self.modules() if isinstance(module, BranchWeights)]
        for weights in found:
            if weights.outside_training != LEARNED:
                raise ValueError(
                    f"--branch-weights is {weights.outside_training} in training, which would "
                    "validate with other weights than it learns: leave it out, and give it where "
                    "the model is evaluated, --model-overrides \"{'branch_weights': ...}\""
                )
        if not all(weights.schedule.taken for weights in found):
            raise ValueError(
                "this --optimizer would let kappa and alpha leave the simplex, at the learning "
                f"rate of all weights: give --optimizer {OPTIMIZER}"
            )


def _branch_options(args: argparse.Namespace) -> BranchOptions:
    """Return the branches' options, of which parsed arguments hold only those that were given."""
    names = [option.name for option in dataclasses.fields(BranchOptions)]
    return BranchOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _check(options: BranchOptions) -> None:
    if not options.branch_lr > 0:
        raise ValueError(f"--branch-lr is {options.branch_lr}: it must be above 0")
    if options.branch_warmup_updates < 1:
        raise ValueError(
            f"--branch-warmup-updates is {options.branch_warmup_updates}: it must be at least 1"
        )
    freeze_after = options.freeze_branch_weights_after
    if freeze_after is not None and freeze_after < 0:
        raise ValueError(f"--freeze-branch-weights-after is {freeze_after}: it must be 0 or more")


def _check_training(args: argparse.Namespace) -> None:
    # BMUF writes averages of the workers' weights behind the optimizer's back, and starts it anew;
    # sharding makes another optimizer of the same class, without the schedules
    for option, harmless in [("use_bmuf", False), ("zero_sharding", "none")]:
        value = getattr(args, option, harmless)
        if value != harmless:
            raise ValueError(
                f"--{option.replace('_', '-')} is {value}: kappa and alpha would leave the "
                "simplex or their schedule, leave it out"
            )


def _check_parts(cfg: TransformerConfig) -> None:
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


def _check_widths(cfg: TransformerConfig) -> None:
    for part in ("encoder", "decoder"):
        width, heads = getattr(cfg, part).ffn_embed_dim, getattr(cfg, part).attention_heads
        if width % heads:
            raise ValueError(
                f"--{part}-ffn-embed-dim is {width}: the {heads} branches share it, so it must be "
                f"a multiple of --{part}-attention-heads"
            )


def _put_branches(
    stack: nn.Module, cfg: TransformerConfig, options: BranchOptions, part: str
) -> Mapping[str, BranchWeights]:
    """Give the layers of a stack that fairseq has built branches; return their κ and α by name."""
    found = {}
    for number in range(len(stack.layers)):
        weights = BranchWeights(
            getattr(cfg, part).attention_heads,
            BranchSchedule(
                options.branch_lr * (getattr(cfg, part).embed_dim / len(stack.layers)) ** -0.5,
                options.branch_warmup_updates,
                options.freeze_branch_weights_after,
                projected=options.branch_parameterization == "simplex",
            ),
            options.branch_parameterization,
            options.branch_weights,
            options.branch_top_k,
        )
        if part == "encoder":
            layer = BranchedEncoderLayer(cfg, weights)
        else:
            layer = BranchedDecoderLayer(cfg, weights, options.branch_decoder_attention)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        # by its index: a walk over the list may drop layers (--encoder-layerdrop)
        stack.layers[number] = layer
        found[f"{part}{number + 1}"] = weights
    return found


register_presets("weighted_transformer", PRESETS)
