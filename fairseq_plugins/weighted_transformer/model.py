"""The Weighted Transformer: fairseq's translation transformer with weighted branches.

Ahmed, Keskar, Socher: Weighted Transformer Network for Machine Translation (2017,
arXiv:1711.02132).
"""

import argparse
from collections.abc import Sequence
from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.fairseq_integration.transformer_options import (
    BuiltOnTransformer,
    options_from,
    parsed,
)
from fairseq_plugins.weighted_transformer.as_written_layers import (
    BranchedDecoderLayer,
    BranchedEncoderLayer,
)
from fairseq_plugins.weighted_transformer.branch_weights import (
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
    check_options,
    check_parts,
    check_reading,
    encode_reading,
)


def _make_preset(layers: int, width: int, heads: int, dropout: float) -> dict[str, Any]:
    """Return the values of a preset (section 4.1), with one dropout for residuals and attention."""
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
    "weighted_transformer_wmt_2l": _make_preset(2, 512, 8, 0.1),
    "weighted_transformer_wmt_4l": _make_preset(4, 512, 8, 0.1),
    "weighted_transformer_wmt_base": _make_preset(6, 512, 8, 0.1),
    "weighted_transformer_wmt_8l": _make_preset(8, 512, 8, 0.3),
    "weighted_transformer_wmt_big": _make_preset(6, 1024, 16, 0.3),
    # seconds on a CPU
    "weighted_transformer_tiny": _make_preset(2, 128, 4, 0.1),
}


@register_model("weighted_transformer", dataclass=WeightedTransformerConfig)
class WeightedTransformer(BuiltOnTransformer, TransformerModel):
    """fairseq's translation transformer with branched attention in each layer."""

    own_options = BranchOptions
    # Whether train() was called, as fairseq does before each update. ``training`` cannot tell: a
    # model that is loaded to translate has it set, too, until eval().
    _is_trained = False

    @classmethod
    def build_model(
        cls, cfg: WeightedTransformerConfig | argparse.Namespace, task: Any
    ) -> "WeightedTransformer":
        """Build the model for the task's dictionaries."""
        args = parsed(cfg)
        options = options_from(BranchOptions, args)
        check_options(options)
        check_parts(TransformerConfig.from_namespace(args))
        model = super().build_model(args, task)
        # fairseq has completed the arguments
        cfg = TransformerConfig.from_namespace(args)
        _put_branches(model.encoder, cfg, options, "encoder")
        _put_branches(model.decoder, cfg, options, "decoder")
        # averaging skips integers, and --store-ema skips names with "version"
        model.register_buffer("reading_version", encode_reading(options))
        attach_digest(model, task)
        return model

    def train(self, mode: bool = True) -> "WeightedTransformer":
        """Set training mode, and remember it."""
        self._is_trained = mode
        return super().train(mode)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Check the reading; add equal κ and α to a plain transformer's weights, in place."""
        super().upgrade_state_dict_named(state_dict, name)
        check_reading(
            self.reading_version, state_dict.setdefault("reading_version", self.reading_version)
        )
        if any(".kappa" in key for key in state_dict):
            return
        if self.reading_version[0] != READINGS.index(SUBLAYERS):
            raise ValueError(
                f"--branch-residual is {AS_WRITTEN}, and the checkpoint is a plain transformer's, "
                f"which has more norms: give --branch-residual {SUBLAYERS}"
            )
        for at, module in self.named_modules():
            if isinstance(module, WeightedLinear):
                if module.weights.applied_sum != module.weights.branches:
                    raise ValueError(
                        f"--branch-sum is {ONE}, and the checkpoint is a plain transformer's, "
                        f"whose sublayers it would scale down: give --branch-sum {BRANCHES}"
                    )
                equal = module.weights.equal().items()
                state_dict.update({f"{at}.weights.{key}": value for key, value in equal})

    def set_num_updates(self, num_updates: int) -> None:
        """Check before each update that κ and α are trained correctly."""
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
        schedules = [weights.schedule for weights in branch_weights]
        if not all(schedule is None or schedule.followed for schedule in schedules):
            raise ValueError(
                "this --optimizer would let kappa and alpha leave the simplex, at the learning "
                "rate of all weights: give --optimizer adam_with_branch_weights"
            )


def _put_branches(
    stack: nn.Module, cfg: TransformerConfig, options: BranchOptions, part: str
) -> None:
    """Replace the layers of the "encoder" or "decoder" by branched layers."""
    of_part = getattr(cfg, part)
    attentions = {"encoder": ("self",), "decoder": ATTENTIONS}[part]
    if part == "decoder" and options.branch_decoder_attention != BOTH:
        attentions = (options.branch_decoder_attention,)
    for number in range(len(stack.layers)):
        schedule = BranchSchedule(
            options.branch_lr * (of_part.embed_dim / len(stack.layers)) ** -0.5,
            options.branch_warmup_updates,
            options.freeze_branch_weights_after,
            projected=options.branch_parameterization == "simplex",
        )
        layer = _build_layer(cfg, options, part, schedule, attentions)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        # iterating over the list may drop layers (--encoder-layerdrop)
        stack.layers[number] = layer


def _build_layer(
    cfg: TransformerConfig,
    options: BranchOptions,
    part: str,
    schedule: BranchSchedule,
    attentions: Sequence[str],
) -> nn.Module:
    """Return a branched layer."""
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

    if options.branch_residual == AS_WRITTEN:
        weights = {name: draw_weights("kappa", "alpha") for name in attentions}
        if part == "encoder":
            return BranchedEncoderLayer(cfg, weights["self"])
        return BranchedDecoderLayer(cfg, weights)
    kappas = {name: draw_weights("kappa") for name in attentions}
    alpha = draw_weights("alpha")
    if part == "encoder":
        return WeightedEncoderLayer(cfg, kappas["self"], alpha)
    return WeightedDecoderLayer(cfg, kappas, alpha)


register_presets("weighted_transformer", PRESETS)
