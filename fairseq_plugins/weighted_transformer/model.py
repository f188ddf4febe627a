"""The Weighted Transformer: translation with weighted branches of attention.

Ahmed, Keskar, Socher: Weighted Transformer Network for Machine Translation (2017,
arXiv:1711.02132). What is not branched is fairseq's own transformer.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.logging import metrics
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.option_names import errors_name_options
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.fairseq_integration.transformer_options import parsed
from fairseq_plugins.fairseq_integration.validation import AFTER_THE_LOSS, validation_pass
from fairseq_plugins.weighted_transformer.as_written_layers import (
    BranchedDecoderLayer,
    BranchedEncoderLayer,
)
from fairseq_plugins.weighted_transformer.branch_weights import (
    KINDS,
    LEARNED,
    BranchSchedule,
    BranchWeights,
)
from fairseq_plugins.weighted_transformer.layers import (
    WeightedDecoderLayer,
    WeightedEncoderLayer,
    WeightedLinear,
)
from fairseq_plugins.weighted_transformer.options import (
    AS_WRITTEN,
    ATTENTIONS,
    BOTH,
    BRANCHES,
    ONE,
    READINGS,
    SHAKE,
    SUBLAYERS,
    BranchOptions,
    WeightedTransformerConfig,
    branch_options,
    check_options,
    check_parts,
    check_reading,
    reading_of,
)


def _published(layers: int, width: int, heads: int, dropout: float) -> dict[str, Any]:
    """Return the values of a preset: what the published models have in common, and what differs.

    There are as many branches as heads; one vocabulary and one embedding for both languages and the
    output (section 4.1). One probability for "attention dropout, and residual dropout".
    """
    return {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_embed_dim": width,
        "decoder_embed_dim": width,
        "encoder_ffn_embed_dim": 4 * width,
        "decoder_ffn_embed_dim": 4 * width,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "dropout": dropout,
        "attention_dropout": dropout,
        "share_all_embeddings": True,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # rows (C), N=4, (A), N=8 and (B) of table 2
    "weighted_transformer_wmt_2l": _published(2, 512, 8, 0.1),
    "weighted_transformer_wmt_4l": _published(4, 512, 8, 0.1),
    "weighted_transformer_wmt_base": _published(6, 512, 8, 0.1),
    "weighted_transformer_wmt_8l": _published(8, 512, 8, 0.3),
    "weighted_transformer_wmt_big": _published(6, 1024, 16, 0.3),
    # seconds on a CPU
    "weighted_transformer_tiny": _published(2, 128, 4, 0.1),
}


@register_model("weighted_transformer", dataclass=WeightedTransformerConfig)
class WeightedTransformer(TransformerModel):
    """fairseq's translation transformer with branched attention in each layer."""

    # whether train() was called, as fairseq does before each update: a model that is loaded to
    # translate has training set, too, until eval()
    _is_trained = False

    @classmethod
    def hub_models(cls) -> dict[str, str]:
        """Return no models to download: those of the parent are other models."""
        return {}

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add fairseq's options and those of branches to ``parser``, without defaults."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, BranchOptions(), delete_default=True)

    @classmethod
    def build_model(
        cls, cfg: WeightedTransformerConfig | argparse.Namespace, task: Any
    ) -> "WeightedTransformer":
        """Build the model for the task's dictionaries."""
        args = parsed(cfg)
        options = branch_options(args)
        check_options(options)
        check_parts(TransformerConfig.from_namespace(args))
        model = super().build_model(args, task)
        # fairseq has completed the arguments
        cfg = TransformerConfig.from_namespace(args)
        weights = [
            *_put_branches(model.encoder, cfg, options, "encoder"),
            *_put_branches(model.decoder, cfg, options, "decoder"),
        ]
        # an integer is not averaged, and fairseq's --store-ema leaves out names with "version"
        model.register_buffer("reading_version", reading_of(options))
        model.register_forward_pre_hook(_BranchWeightsLog(weights))
        return model

    def train(self, mode: bool = True) -> "WeightedTransformer":
        """Set the module, and all in it, in training mode or out of it."""
        self._is_trained = mode
        return super().train(mode)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Give a plain transformer's weights, which are changed in place, equal κ and α."""
        super().upgrade_state_dict_named(state_dict, name)
        check_reading(
            self.reading_version, state_dict.setdefault("reading_version", self.reading_version)
        )
        if any(".kappa" in key for key in state_dict):
            return
        if self.reading_version[0] != READINGS.index(SUBLAYERS):
            raise ValueError(
                f"--branch-residual is {AS_WRITTEN}, and the checkpoint is of a plain transformer, "
                f"which has norms more: give --branch-residual {SUBLAYERS}"
            )
        for at, module in self.named_modules():
            if isinstance(module, WeightedLinear):
                if module.weights.applied_sum != module.weights.branches:
                    raise ValueError(
                        f"--branch-sum is {ONE}, and the checkpoint is of a plain transformer, of "
                        f"which a part would be left: give --branch-sum {BRANCHES}"
                    )
                equal = module.weights.equal().items()
                state_dict.update({f"{at}.weights.{key}": value for key, value in equal})

    def set_num_updates(self, num_updates: int) -> None:
        """Check before each update that κ and α are trained as they must be."""
        super().set_num_updates(num_updates)
        if not self._is_trained:
            return
        branch_weights = [m for m in self.modules() if isinstance(m, BranchWeights)]
        for weights in branch_weights:
            if weights.outside_training != LEARNED:
                raise ValueError(
                    f"--branch-weights is {weights.outside_training} in training, which would "
                    "validate with other weights than it learns: leave it out, and give it where "
                    "the model is evaluated, --model-overrides \"{'branch_weights': ...}\""
                )
        schedules = [weights.schedule for weights in branch_weights if not weights.shake]
        if not all(schedule.followed for schedule in schedules):
            raise ValueError(
                "this --optimizer would let kappa and alpha leave the simplex, at the learning "
                "rate of all weights: give --optimizer adam_with_branch_weights"
            )


def _put_branches(
    stack: nn.Module, cfg: TransformerConfig, options: BranchOptions, part: str
) -> list[tuple[str, BranchWeights]]:
    """Replace the layers of fairseq's encoder or decoder by branched ones.

    Args:
        stack: the "encoder" or the "decoder", as fairseq has built it.
        cfg: fairseq's configuration of the model.
        options: of the branches.
        part: which of the two it is.

    Returns:
        κ and α of each layer: "encoder1", "encoder2", …; "decoder1_self", … are those of
        self-attention where both attentions of a decoder layer are branched.
    """
    of_part = getattr(cfg, part)
    option_of = {
        "parameterization": "--branch-parameterization",
        "outside_training": "--branch-weights",
        "start": "--branch-start",
        "top_k": "--branch-top-k",
        "branches": f"--{part}-attention-heads",
        "ffn_embed_dim": f"--{part}-ffn-embed-dim",
    }
    named = []
    for number in range(len(stack.layers)):
        name = f"{part}{number + 1}"
        schedule = BranchSchedule(
            options.branch_lr * (of_part.embed_dim / len(stack.layers)) ** -0.5,
            options.branch_warmup_updates,
            options.freeze_branch_weights_after,
            projected=options.branch_parameterization == "simplex",
        )
        with errors_name_options(option_of.get):
            layer, weights = _build_layer(cfg, options, part, schedule)
        named += [(name + suffix, of_attention) for suffix, of_attention in weights]
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        # by its index: an iteration over the list may drop layers (--encoder-layerdrop)
        stack.layers[number] = layer
    return named


def _build_layer(
    cfg: TransformerConfig, options: BranchOptions, part: str, schedule: BranchSchedule
) -> tuple[nn.Module, list[tuple[str, BranchWeights]]]:
    """Return a branched layer of the encoder or the decoder, and its κ and α.

    Those of masked self-attention are named "_self" where both attentions are branched, others "".
    """
    branches = getattr(cfg, part).attention_heads

    def draw_weights(*kinds: str) -> BranchWeights:
        return BranchWeights(
            branches,
            schedule,
            options.branch_parameterization,
            options.branch_weights,
            options.branch_top_k,
            options.branch_start,
            applied_sum=1 if options.branch_sum == ONE else branches,
            shake=options.branch_training == SHAKE,
            kinds=kinds,
        )

    asked = options.branch_decoder_attention if part == "decoder" else "self"
    attentions = ATTENTIONS if asked == BOTH else (asked,)
    two_sublayers = options.branch_residual == SUBLAYERS
    kinds = ("kappa",) if two_sublayers else KINDS
    by_attention = {name: draw_weights(*kinds) for name in attentions}
    named = [
        ("_self" if name == "self" and asked == BOTH else "", weights)
        for name, weights in by_attention.items()
    ]
    if two_sublayers:
        alpha = draw_weights("alpha")
        named.append(("", alpha))
        if part == "encoder":
            return WeightedEncoderLayer(cfg, by_attention["self"], alpha), named
        return WeightedDecoderLayer(cfg, by_attention, alpha), named
    if part == "encoder":
        return BranchedEncoderLayer(cfg, by_attention["self"]), named
    return BranchedDecoderLayer(cfg, by_attention), named


class _BranchWeightsLog:
    """A hook before the model's forward pass by which validation logs κ and α (figure 3).

    fairseq's log and TensorBoard get ``NAME_kappa1``, ``NAME_kappa2``, … and ``NAME_alpha1``, … of
    each name. The hook can be pickled and copied with the model.

    Args:
        weights: κ and α of layers, with their names.
    """

    def __init__(self, weights: Sequence[tuple[str, BranchWeights]]) -> None:
        self._weights = weights
        self._logged_in: Any = None

    def __reduce__(self) -> tuple:
        return _BranchWeightsLog, (self._weights,)

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        current = validation_pass(model)
        # once in each pass is enough, as it waits for a GPU
        if current is None or current is self._logged_in:
            return
        self._logged_in = current
        for name, of_layer in self._weights:
            for kind, values in zip(of_layer.kinds, of_layer.learned(), strict=True):
                for number, value in enumerate(values.tolist(), start=1):
                    metrics.log_derived(
                        f"{name}_{kind}{number}",
                        lambda _, value=value: round(value, 4),
                        AFTER_THE_LOSS,
                    )


register_presets("weighted_transformer", PRESETS)
