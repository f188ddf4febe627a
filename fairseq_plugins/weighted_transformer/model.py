"""The Weighted Transformer (Ahmed, Keskar, Socher 2017, arXiv:1711.02132) in fairseq.

Shapes: B sentences, T queries, S keys, M branches, d model width.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from fairseq import utils
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.options import naming_options
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.fairseq_integration.transformer_options import (
    BuiltOnTransformer,
    options_from,
    parsed,
)
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, uniform_weights
from fairseq_plugins.weighted_transformer.layers import (
    SUBLAYERS,
    VARIANTS,
    Attention,
    WeightedDecoderLayer,
    WeightedEncoderLayer,
)
from fairseq_plugins.weighted_transformer.optimizer import schedule_branches
from fairseq_plugins.weighted_transformer.options import (
    ATTENTIONS,
    BRANCHES,
    ONE,
    SHAKE,
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
    ) -> WeightedTransformer:
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
        """Restore a copy; torch copies parameters without the optimizer's options."""
        super().__setstate__(state)
        self.schedule_branches()

    def schedule_branches(self) -> None:
        """Give κ and α of each layer their schedule, which adam_with_branch_weights follows."""
        for part, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            embed_dim = getattr(stack.cfg, part).embed_dim
            schedule_branches(stack.layers, embed_dim, self.branch_options)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Check the variant; add equal κ and α to a plain transformer's weights, in place."""
        super().upgrade_state_dict_named(state_dict, name)
        variant: Tensor = self.variant_version
        if not any(".kappa" in key for key in state_dict):
            variant = torch.tensor([VARIANTS.index(SUBLAYERS), SUMS.index(BRANCHES)])
            for path, module in self.named_modules():
                if isinstance(module, BranchWeights):
                    # equal logits are equal weights, too
                    state_dict[f"{path}.{module.name}"] = uniform_weights(module.branches)
        theirs = state_dict.setdefault("variant_version", variant).tolist()
        if theirs != self.variant_version.tolist():
            raise ValueError(
                f"the checkpoint computes what --branch-residual {VARIANTS[theirs[0]]} "
                f"--branch-sum {SUMS[theirs[1]]} does: give these"
            )


class FairseqEncoderLayer(WeightedEncoderLayer):
    """A layer of fairseq's encoder."""

    upgrade_state_dict_named = TransformerEncoderLayerBase.upgrade_state_dict_named

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None = None) -> Tensor:
        """Map (S, B, d) to (S, B, d); the mask (B, S) is true for padding."""
        return super().forward(x, _visible(encoder_padding_mask))


class FairseqDecoderLayer(WeightedDecoderLayer):
    """A layer of fairseq's decoder."""

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[Any, Any] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return output (T, B, d), the weights (M, B, T, S) of attention to the encoder or None.

        fairseq adds ``self_attn_mask`` (T, T) to scores, and gives none to decode token by token.
        """
        pasts, self_mask = None, _visible(self_attn_padding_mask)
        if self_attn_mask is not None:
            seen = self_attn_mask == 0
            self_mask = seen if self_mask is None else self_mask & seen
        if incremental_state is not None:
            pasts = incremental_state.setdefault(self, {"self": {}, "encoder": {}})
            # generation gives no padding
            self_mask = None
            if pasts["encoder"]:
                encoder_out = None
        mask, need_weights = _visible(encoder_padding_mask), need_attn or need_head_weights
        x, weights = self.decode(x, encoder_out, mask, self_mask, pasts, need_weights)
        return x, None if weights is None else weights.transpose(0, 1), None

    def reorder_incremental_state(self, incremental_state: dict[Any, Any], order: Tensor) -> None:
        """Let the pasts follow the beams, which continue those in ``order`` (B,)."""
        for name, past in incremental_state.get(self, {}).items():
            for which, kept in past.items():
                # beams of a sentence attend to the same source, and stay side by side
                if name == "self" or len(kept) != len(order):
                    past[which] = kept.index_select(0, order)


def _visible(padding_mask: Tensor | None) -> Tensor | None:
    """Return a mask (B, 1, 1, S) that is true for what is not padding, from fairseq's (B, S)."""
    return None if padding_mask is None else ~padding_mask[:, None, None].bool()


class RetainableDropout(FairseqDropout):
    """fairseq's dropout, which stays in training mode where --retain-dropout keeps it."""

    def train(self, mode: bool = True) -> RetainableDropout:
        """Set training mode, unless dropout is retained."""
        return super().train(mode or self.apply_during_inference)


def build_layer(cfg: TransformerConfig, options: BranchOptions, part: str) -> nn.Module:
    """Return a layer of the "encoder" or "decoder", with branches."""
    stack = getattr(cfg, part)
    arguments = {
        "variant": options.branch_residual,
        "attention_dropout": cfg.attention_dropout,
        "activation_dropout": cfg.activation_dropout or cfg.relu_dropout or 0.0,
        "activation": utils.get_activation_fn(cfg.activation_fn),
        "pre_norm": stack.normalize_before,
        "batch_first": False,
        "parameterization": options.branch_parameterization,
        "start": options.branch_start,
        "total": 1 if options.branch_sum == ONE else stack.attention_heads,
        "top_k": options.branch_top_k,
        "shake": options.branch_training == SHAKE,
        "outside_training": options.branch_weights,
    }
    kind: type[WeightedEncoderLayer] = FairseqEncoderLayer
    if part == "decoder":
        kind = FairseqDecoderLayer
        arguments["branched"] = ATTENTIONS[options.branch_decoder_attention]
        arguments["encoder_dim"] = cfg.encoder.embed_dim
    sizes = stack.embed_dim, stack.attention_heads, stack.ffn_embed_dim
    inner, top_k = f"{part}_ffn_embed_dim", "branch_top_k"
    with naming_options({"ffn_dim": inner, "in_features": inner, "top_k": top_k}):
        layer = kind(*sizes, cfg.dropout, **arguments)
    # the names that --retain-dropout-modules takes
    name = f"Transformer{part.title()}LayerBase"
    for module in list(layer.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                owner = "MultiheadAttention" if isinstance(module, Attention) else name
                setattr(module, child_name, RetainableDropout(child.p, owner))
    if cfg.checkpoint_activations:
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return layer


register_presets("weighted_transformer", PRESETS)
