"""The Weighted Transformer: fairseq's translation transformer with weighted branches.

Ahmed, Keskar, Socher: Weighted Transformer Network for Machine Translation (2017,
arXiv:1711.02132).

Shapes: B sentences, T queries, S keys, M branches, d model width, h head width (d/M).
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.options import warn_amp_without_gpu
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.fairseq_integration.transformer_options import (
    BuiltOnTransformer,
    options_from,
    parsed,
)
from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward
from fairseq_plugins.weighted_transformer.branch_weights import (
    LEARNED,
    BranchSchedule,
    BranchWeights,
)
from fairseq_plugins.weighted_transformer.layers import WeightedLinear, start_projection
from fairseq_plugins.weighted_transformer.options import (
    ATTENTIONS,
    BOTH,
    BRANCHES,
    ONE,
    SHAKE,
    SUBLAYERS,
    SUMS,
    VARIANTS,
    BranchOptions,
    WeightedTransformerConfig,
    check_options,
    check_variant,
    encode_variant,
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
    # Whether train() was called, as fairseq does before each update. ``training`` cannot tell: a
    # model that is loaded to translate has it set, too, until eval().
    _is_trained = False

    @classmethod
    def build_model(
        cls, cfg: WeightedTransformerConfig | argparse.Namespace, task: Any
    ) -> "WeightedTransformer":
        """Build the model for the task's dictionaries."""
        args = parsed(cfg)
        warn_amp_without_gpu(args)
        options = options_from(BranchOptions, args)
        check_options(options, TransformerConfig.from_namespace(args))
        model = super().build_model(args, task)
        # fairseq has completed the arguments
        cfg = TransformerConfig.from_namespace(args)
        for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            # iterating over the list may drop layers (--encoder-layerdrop)
            for number in range(len(stack.layers)):
                layer = _build_layer(cfg, options, part, len(stack.layers))
                if cfg.checkpoint_activations:
                    layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
                stack.layers[number] = layer
        # averaging skips integers, and --store-ema skips names with "version"
        model.register_buffer("variant_version", encode_variant(options))
        attach_digest(model, task)
        return model

    def train(self, mode: bool = True) -> "WeightedTransformer":
        """Set training mode, and remember it."""
        self._is_trained = mode
        return super().train(mode)

    def set_num_updates(self, num_updates: int) -> None:
        """Check before each update that κ and α are trained correctly."""
        super().set_num_updates(num_updates)
        if not self._is_trained:
            return
        for weights in (m for m in self.modules() if isinstance(m, BranchWeights)):
            if weights.outside_training != LEARNED:
                raise ValueError(
                    f"--branch-weights is {weights.outside_training} in training, which would "
                    "validate with other weights than it learns: leave it out, and give it where "
                    "the model is evaluated, --model-overrides \"{'branch_weights': ...}\""
                )
            if weights.schedule is not None and not weights.schedule.followed:
                raise ValueError(
                    "this --optimizer would let kappa and alpha leave the simplex, at the learning "
                    "rate of all weights: give --optimizer adam_with_branch_weights"
                )

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Check the variant; add equal κ and α to a plain transformer's weights, in place."""
        super().upgrade_state_dict_named(state_dict, name)
        check_variant(
            self.variant_version, state_dict.setdefault("variant_version", self.variant_version)
        )
        if any(".kappa" in key for key in state_dict):
            return
        if self.variant_version.tolist() != [VARIANTS.index(SUBLAYERS), SUMS.index(BRANCHES)]:
            raise ValueError(
                "the checkpoint is a plain transformer's, which other variants than the default "
                f"do not compute: give --branch-residual {SUBLAYERS} --branch-sum {BRANCHES}"
            )
        for prefix, module in self.named_modules():
            if isinstance(module, BranchWeights):
                # equal logits are equal weights, too
                state_dict[f"{prefix}.{module.name}"] = module.uniform()


def _build_layer(
    cfg: TransformerConfig, options: BranchOptions, part: str, layers: int
) -> nn.Module:
    """Return one of the ``layers`` layers of the "encoder" or "decoder", with branches."""
    stack = getattr(cfg, part)
    schedule = BranchSchedule(
        options.branch_lr * (stack.embed_dim / layers) ** -0.5,
        options.branch_warmup_updates,
        options.freeze_branch_weights_after,
        projected=options.branch_parameterization == "simplex",
    )

    def draw(name: str, top_k: int | None = options.branch_top_k) -> BranchWeights:
        return BranchWeights(
            stack.attention_heads,
            name,
            schedule,
            parameterization=options.branch_parameterization,
            start=options.branch_start,
            total=1 if options.branch_sum == ONE else stack.attention_heads,
            top_k=top_k,
            shake=options.branch_training == SHAKE,
            outside_training=options.branch_weights,
        )

    attentions: tuple[str, ...] = ("self",)
    if part == "decoder":
        chosen = options.branch_decoder_attention
        attentions = ATTENTIONS if chosen == BOTH else (chosen,)
    if options.branch_residual == SUBLAYERS:
        kappas, alpha = {name: draw("kappa") for name in attentions}, draw("alpha")
        kind = TransformerEncoderLayerBase if part == "encoder" else TransformerDecoderLayerBase
        layer = kind(cfg)
        for name, attention in _replace_attentions(layer, cfg, part, attentions):
            out_proj = WeightedLinear(stack.embed_dim, stack.embed_dim, kappas[name])
            attention.out_proj = start_projection(out_proj)
        layer.fc2 = WeightedLinear(stack.ffn_embed_dim, stack.embed_dim, alpha)
        return layer
    # only α says which branches count
    weights = {name: (draw("kappa", top_k=None), draw("alpha")) for name in attentions}
    layer = (AsWrittenEncoderLayer if part == "encoder" else AsWrittenDecoderLayer)(cfg)
    width, remainder = divmod(stack.ffn_embed_dim, len(attentions))
    if remainder:
        raise ValueError(
            f"--decoder-ffn-embed-dim is {stack.ffn_embed_dim}: both attentions are branched and "
            "share it, so it must be even"
        )
    networks = {}
    for name, (kappa, alpha) in weights.items():
        # --retain-dropout-modules names dropout by its module
        dropout = FairseqDropout(layer.activation_dropout_module.p, BranchedFeedForward.__name__)
        networks[name] = BranchedFeedForward(
            stack.embed_dim, width, kappa, alpha, layer.activation_fn, dropout
        )
    for name, attention in _replace_attentions(layer, cfg, part, attentions):
        attention.out_proj = networks[name]
    del layer.fc1, layer.fc2, layer.final_layer_norm
    return layer


def _replace_attentions(
    layer: nn.Module, cfg: TransformerConfig, part: str, names: Iterable[str]
) -> Iterator[tuple[str, "FusedAttention"]]:
    """Replace attentions of a layer, "self" before "encoder", and yield them with their names."""
    stack, width = getattr(cfg, part), cfg.encoder.embed_dim
    options = {
        "self": {"self_attention": True},
        "encoder": {"encoder_decoder_attention": True, "kdim": width, "vdim": width},
    }
    for name in sorted(names, reverse=True):
        attention = FusedAttention(
            stack.embed_dim, stack.attention_heads, dropout=cfg.attention_dropout, **options[name]
        )
        setattr(layer, f"{name}_attn", attention)
        yield name, attention


class FusedAttention(MultiheadAttention):
    """fairseq's attention, which uses torch's fused attention if no attention weights are needed.

    ``out_proj`` may be any module.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # otherwise fairseq would hand the projection's weights to torch, without calling it
        self.skip_embed_dim_check = True

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (T, B, d) and the weights that are asked for, as fairseq does."""
        wants_scores = options.get("need_head_weights") or options.get("before_softmax")
        if need_weights or wants_scores or options.get("incremental_state") is not None:
            options |= {"need_weights": need_weights, "attn_mask": attn_mask}
            return super().forward(query, key, value, key_padding_mask, **options)
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        # (T, B, d) -> (B, M, T, h)
        queries, keys, values = (
            x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3) for x in projected
        )
        mask = merge_masks(key_padding_mask, attn_mask, queries.dtype)
        module = self.dropout_module
        dropout = module.p if module.training or module.apply_during_inference else 0.0
        heads = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        # (B, M, T, h) -> (T, B, d)
        return self.out_proj(heads.permute(2, 0, 1, 3).flatten(2)), None


def merge_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return what both masks add to the scores (B, M, T, S); None if there are none.

    ``key_padding_mask`` (B, S) is true for padding; ``attn_mask`` (T, S) is added to the scores.
    """
    mask = attn_mask
    if key_padding_mask is not None:
        # (B, S) -> (B, 1, 1, S)
        padding = key_padding_mask[:, None, None].bool()
        mask = torch.zeros_like(padding, dtype=dtype) if mask is None else mask
        mask = mask.masked_fill(padding, float("-inf"))
    return None if mask is None else mask.to(dtype)


class AsWrittenEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with one sublayer: ``y = LN(x + Σ α_i F_i(κ_i b_i))``."""

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Map ``x`` (S, B, d) to (S, B, d), with fairseq's masks."""
        if attn_mask is not None:
            attn_mask = x.new_zeros(attn_mask.shape).masked_fill(attn_mask.bool(), -1e4)
        masks = {"key_padding_mask": encoder_padding_mask, "attn_mask": attn_mask}
        return _apply_sublayer(self, "self", x, None, need_weights=False, **masks)[0]


class AsWrittenDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with two sublayers, its attentions; one or both have branches."""

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return output (T, B, d), the weights of attention to the encoder or None, and None."""
        state = {"incremental_state": incremental_state}
        masks = {"key_padding_mask": self_attn_padding_mask, "attn_mask": self_attn_mask}
        x, _ = _apply_sublayer(self, "self", x, None, need_weights=False, **state, **masks)
        x, weights = _apply_sublayer(
            self,
            "encoder",
            x,
            encoder_out,
            key_padding_mask=encoder_padding_mask,
            static_kv=True,
            need_weights=need_attn or (not self.training and self.need_attn),
            need_head_weights=need_head_weights,
            **state,
        )
        return x, weights, None


def _apply_sublayer(
    layer: nn.Module, name: str, x: Tensor, keys: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` (T, B, d) after attention, residual connection and norm, and the weights.

    ``keys`` are (S, B, d); None for self-attention. The ``options`` go to attention.
    """
    attention, norm = getattr(layer, f"{name}_attn"), getattr(layer, f"{name}_attn_layer_norm")
    query = norm(x) if layer.normalize_before else x
    keys = query if keys is None else keys
    out, weights = attention(query, keys, keys, **options)
    out = x + layer.dropout_module(out)
    return (out if layer.normalize_before else norm(out)), weights


register_presets("weighted_transformer", PRESETS)
