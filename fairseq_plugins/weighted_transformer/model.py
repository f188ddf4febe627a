"""The Weighted Transformer (Ahmed, Keskar, Socher 2017, arXiv:1711.02132) in fairseq."""

from argparse import Namespace
from typing import Any

import torch
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.fairseq_integration.transformer_options import (
    BuiltOnTransformer,
    options_from,
    parsed,
)
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, uniform_weights
from fairseq_plugins.weighted_transformer.fairseq_layers import build_layer
from fairseq_plugins.weighted_transformer.layers import SUBLAYERS, VARIANTS, Attention
from fairseq_plugins.weighted_transformer.optimizer import schedule_branches
from fairseq_plugins.weighted_transformer.options import (
    BRANCHES,
    SUMS,
    BranchOptions,
    WeightedTransformerConfig,
    check_options,
)


def _make_preset(layers: int, width: int, heads: int, dropout: float) -> dict[str, Any]:
    """Return the values of a preset (section 4.1), with one dropout for residuals and attention."""
    values: dict[str, Any] = {"dropout": dropout, "attention_dropout": dropout}
    for part in ("encoder", "decoder"):
        values |= {f"{part}_layers": layers, f"{part}_attention_heads": heads}
        values |= {f"{part}_embed_dim": width, f"{part}_ffn_embed_dim": 4 * width}
    return {**values, "share_all_embeddings": True}


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

    added_options = BranchOptions

    @classmethod
    def build_model(
        cls, cfg: WeightedTransformerConfig | Namespace, task: Any
    ) -> "WeightedTransformer":
        """Build the model for the task's dictionaries."""
        args = parsed(cfg)
        options = options_from(BranchOptions, args)
        check_options(options, args)
        model = super().build_model(args, task)
        # fairseq has completed the arguments
        cfg = TransformerConfig.from_namespace(args)
        for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            # iterating over the list may drop layers (--encoder-layerdrop)
            for number in range(len(stack.layers)):
                stack.layers[number] = build_layer(cfg, options, part)
        model.branch_options = options
        model.schedule_branches()
        # averaging skips integers, and --store-ema skips names with "version"
        variant = VARIANTS.index(options.branch_residual), SUMS.index(options.branch_sum)
        model.register_buffer("variant_version", torch.tensor(variant))
        attach_digest(model, task)
        return model

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; torch copies parameters without the optimizer's options."""
        super().__setstate__(state)
        self.schedule_branches()

    def schedule_branches(self) -> None:
        """Give κ and α of each layer their schedule, which adam_with_branch_weights follows."""
        for stack, cfg in (
            (self.encoder, self.encoder.cfg.encoder),
            (self.decoder, self.decoder.cfg.decoder),
        ):
            schedule_branches(stack.layers, cfg.embed_dim, self.branch_options)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Check the variant; add equal κ and α to a plain transformer's weights, in place."""
        super().upgrade_state_dict_named(state_dict, name)
        modules = dict(self.named_modules())
        for path, module in modules.items():
            if isinstance(module, Attention):
                # of old plain transformers
                MultiheadAttention.upgrade_state_dict_named(module, state_dict, path)
        variant: Tensor = self.variant_version
        if not any(".kappa" in key for key in state_dict):
            variant = torch.tensor([VARIANTS.index(SUBLAYERS), SUMS.index(BRANCHES)])
            for path, module in modules.items():
                if isinstance(module, BranchWeights):
                    # equal logits are equal weights, too
                    state_dict[f"{path}.{module.name}"] = uniform_weights(module.branches)
        theirs = state_dict.setdefault("variant_version", variant).tolist()
        if theirs != self.variant_version.tolist():
            raise ValueError(
                f"the checkpoint computes what --branch-residual {VARIANTS[theirs[0]]} "
                f"--branch-sum {SUMS[theirs[1]]} does: give these"
            )


register_presets("weighted_transformer", PRESETS)
