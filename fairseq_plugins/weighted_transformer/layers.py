"""fairseq's transformer layers, with branched attention for attention and feed-forward network.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), section 3 and figure 1. Branched attention is one
sublayer: one residual connection, and one normalisation before or after it. Branches may have
residual connections of their own beside it.

Shapes: B sentences, T target tokens, S source tokens, M branches, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.branched_attention import (
    BranchedAttention,
    BranchedFeedForward,
    attention_heads,
)
from fairseq_plugins.weighted_transformer.residual_branches import (
    NormalizedBranches,
    ResidualBranches,
)

# where branches have residual connections and norms of their own
NOWHERE, IN_NETWORKS, IN_BRANCHES = ("as-written", "networks", "branches")
_NETWORKS = {
    NOWHERE: BranchedFeedForward,
    IN_NETWORKS: NormalizedBranches,
    IN_BRANCHES: ResidualBranches,
}


class FairseqAttentionHeads(MultiheadAttention):
    """:class:`.AttentionHeads` called as fairseq's attention, with its incremental states.

    A class that sets ``out_proj`` again has an output projection. The arguments are those of
    fairseq's attention.

    Raises:
        ValueError: ``add_bias_kv`` or ``add_zero_attn`` is set.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in [
            ("add_bias_kv", self.bias_k is not None),
            ("add_zero_attn", self.add_zero_attn),
        ]:
            if value:
                raise ValueError(
                    f"`{name}` is {value}: heads see the given keys alone, leave it out"
                )
        self.out_proj = nn.Identity()
        # otherwise fairseq would hand the projection's weights to torch
        self.skip_embed_dim_check = True

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads side by side, (T, B, d), and the weights that are asked for.

        The arguments are those of fairseq's attention.
        """
        if incremental_state is None and not (need_weights or need_head_weights or before_softmax):
            projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
            module = self.dropout_module
            dropout = module.p if module.training or module.apply_during_inference else 0.0
            heads = attention_heads(
                *projected, self.num_heads, key_padding_mask, attn_mask, dropout
            )
            return self.out_proj(heads), None
        return super().forward(
            query,
            key,
            value,
            key_padding_mask,
            incremental_state,
            need_weights,
            static_kv,
            attn_mask,
            before_softmax,
            need_head_weights,
        )


class BranchedEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with one sublayer, branched self-attention.

    Args:
        cfg: fairseq's configuration of the model.
        weights: κ and α of as many branches as there are heads.
        residual: "as-written" for branches without residual connections of their own, "networks"
            for :class:`NormalizedBranches`, "branches" for :class:`ResidualBranches`.
        shared: whether one network is that of all branches.

    Raises:
        ValueError: ``residual`` is unknown, or the branches cannot share the feed-forward width, or
            have norms of their own in a model whose norms are before its sublayers.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        weights: BranchWeights,
        residual: str = NOWHERE,
        shared: bool = False,
    ) -> None:
        super().__init__(cfg)
        width = cfg.encoder.ffn_embed_dim
        network = _networks(self, cfg, width, weights, residual, shared)
        self.self_attn = _branched(self, cfg, network, self_attention=True)
        del self.fc1, self.fc2, self.final_layer_norm

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output, (S, B, d).

        Args:
            x: (S, B, d).
            encoder_padding_mask: (B, S), true for padding.
            attn_mask: (S, S), true or 1 where a query does not see a key.
        """
        if attn_mask is not None:
            attn_mask = x.new_zeros(attn_mask.shape).masked_fill(attn_mask.bool(), -1e4)
        x, _ = _residual_sublayer(
            self,
            self.self_attn,
            self.self_attn_layer_norm,
            x,
            key_padding_mask=encoder_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
        )
        return x


class BranchedDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with two sublayers, of which one or both are branched attention.

    Args:
        cfg: fairseq's configuration of the model.
        weights: κ and α of as many branches as there are heads, for each attention that is
            branched: that to the "encoder", which a feed-forward network follows in the plain
            transformer, or masked "self"-attention. If both are, each has half the feed-forward
            width.
        residual: "as-written" for branches without residual connections of their own, "networks"
            for :class:`NormalizedBranches`, "branches" for :class:`ResidualBranches`.
        shared: whether one network is that of all branches of an attention.

    Raises:
        ValueError: ``residual`` is unknown, or the branches cannot share the feed-forward width, or
            have norms of their own in a model whose norms are before its sublayers.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        weights: Mapping[str, BranchWeights],
        residual: str = NOWHERE,
        shared: bool = False,
    ) -> None:
        super().__init__(cfg)
        width = cfg.decoder.ffn_embed_dim
        if width % len(weights):
            raise ValueError(
                f"`ffn_embed_dim` is {width}: both attentions are branched and share it, so it "
                "must be even"
            )
        networks = {
            name: _networks(self, cfg, width // len(weights), of_attention, residual, shared)
            for name, of_attention in weights.items()
        }
        if "self" in networks:
            self.self_attn = _branched(self, cfg, networks["self"], self_attention=True)
        if "encoder" in networks:
            self.encoder_attn = _branched(
                self,
                cfg,
                networks["encoder"],
                encoder_decoder_attention=True,
                kdim=cfg.encoder.embed_dim,
                vdim=cfg.encoder.embed_dim,
            )
        del self.fc1, self.fc2, self.final_layer_norm

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return the layer's output, (T, B, d), and the weights of the attention to the encoder.

        Args:
            x: (T, B, d); with ``incremental_state`` the last token of each sentence alone.
            encoder_out: (S, B, d).
            encoder_padding_mask: (B, S), true for padding.
            incremental_state: keys and values of the tokens before.
            prev_self_attn_state: ignored; fairseq's layer has it for its export to ONNX.
            prev_attn_state: ignored.
            self_attn_mask: (T, T), added to the scores.
            self_attn_padding_mask: (B, T), true for padding.
            need_attn: whether to return the weights averaged over the heads, (B, T, S).
            need_head_weights: whether to return those of each head, (M, B, T, S).

        Returns:
            Output; weights, or None where they are not asked for; and None, as fairseq's layer does
            outside of that export.
        """
        x, _ = _residual_sublayer(
            self,
            self.self_attn,
            self.self_attn_layer_norm,
            x,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        if encoder_out is None:
            return x, None, None
        x, weights = _residual_sublayer(
            self,
            self.encoder_attn,
            self.encoder_attn_layer_norm,
            x,
            encoder_out,
            key_padding_mask=encoder_padding_mask,
            incremental_state=incremental_state,
            static_kv=True,
            need_weights=need_attn or (not self.training and self.need_attn),
            need_head_weights=need_head_weights,
        )
        return x, weights, None


def _residual_sublayer(
    layer: nn.Module,
    attention: nn.Module,
    norm: nn.Module,
    x: Tensor,
    keys: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return x (T, B, d) after attention with residual connection and norm, and its weights.

    Args:
        layer: for its dropout and the place of its norms.
        attention: branched or fairseq's.
        norm: the sublayer's.
        x: (T, B, d).
        keys: (S, B, d); None for self-attention.
        **options: of fairseq's attention.
    """
    query = norm(x) if layer.normalize_before else x
    keys = query if keys is None else keys
    out, weights = attention(query, keys, keys, **options)
    if not (isinstance(attention, BranchedAttention) and attention.feed_forward.adds_residual):
        out = x + layer.dropout_module(out)
    return (out if layer.normalize_before else norm(out)), weights


def _networks(
    layer: nn.Module,
    cfg: TransformerConfig,
    width: int,
    weights: BranchWeights,
    residual: str,
    shared: bool,
) -> BranchedFeedForward:
    """Return the networks of the branches of one attention.

    Args:
        layer: the layer, for its width, activation and dropout.
        cfg: fairseq's configuration of the model.
        width: inner width of all networks together, or of a shared one.
        weights: κ and α.
        residual: where branches have residual connections.
        shared: whether there is one network.
    """
    if residual not in _NETWORKS:
        raise ValueError(f"`residual` is {residual!r}: there are {', '.join(_NETWORKS)}")
    options = {} if residual == NOWHERE else {"dropout": cfg.dropout}
    if options and layer.normalize_before:
        raise ValueError(
            f"`normalize_before` is True, and `residual` {residual} has norms behind residual "
            "connections: leave out one of the two"
        )
    networks = _NETWORKS[residual]
    # fairseq may keep it outside of training, by this name (make_generation_fast_)
    activation_dropout = FairseqDropout(layer.activation_dropout_module.p, networks.__name__)
    return networks(
        layer.embed_dim,
        width,
        weights,
        layer.activation_fn,
        activation_dropout,
        shared,
        **options,
    )


def _branched(
    layer: nn.Module, cfg: TransformerConfig, networks: BranchedFeedForward, **attention: Any
) -> BranchedAttention:
    """Return branched attention for a layer of the encoder or the decoder.

    Args:
        layer: the layer, for its width.
        cfg: fairseq's configuration of the model.
        networks: of the branches.
        **attention: further arguments of fairseq's MultiheadAttention.
    """
    dropout = cfg.attention_dropout
    heads = FairseqAttentionHeads(layer.embed_dim, networks.branches, dropout=dropout, **attention)
    return BranchedAttention(heads, networks)
