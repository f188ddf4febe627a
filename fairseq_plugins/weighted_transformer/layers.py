"""The default variant, ``sublayers``: a transformer's layers with weights κ and α for branches.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132, section 3): "layer normalization, and residual
connections … are retained". With S the sum of the weights ::

    h = LN(x + Σ κ_i b_i);    b_i = head_i W^{O_i} + b^O/S
    y = LN(h + Σ α_i F_i(h)); F_i(h) = relu(h W_1^i + b_1^i) W_2^i + b_2/S

κ scales columns of the output projection, α columns of the second feed-forward layer. If all κ_i
and α_i are 1, so that S = M, this is a layer of the plain transformer. fairseq_layers.py puts these
layers into fairseq's encoder and decoder.

Shapes: B sentences, T queries, S keys, M branches, d model width, h head width (d/M).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights


class WeightedLinear(nn.Module):
    """``Σ_i w_i (x_i W_i + b/S)``: a linear layer with a weight for each of M branches.

    Branch i has columns i·c to (i+1)·c of the matrix, where c is the input's width divided by M.
    This is not an ``nn.Linear``: the matrix is not all that the input is multiplied with.
    """

    def __init__(self, in_features: int, out_features: int, weights: BranchWeights) -> None:
        super().__init__()
        if in_features % weights.branches:
            raise ValueError(
                f"`in_features` is {in_features}, the inner width of a feed-forward network: it "
                f"must be a multiple of the number of branches, {weights.branches}"
            )
        linear = nn.Linear(in_features, out_features)
        self.weight, self.bias = linear.weight, linear.bias
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        weights = self.weights()
        bias = (self.bias * (weights.sum() / self.weights.total)).to(self.bias.dtype)
        if self.training:
            # a backward pass would need the input both scaled and unscaled
            return F.linear(x, scale_columns(self.weight, weights), bias)
        # a step of translation has fewer numbers than the matrix
        return F.linear(scale_columns(x, weights), self.weight, bias)


def scale_columns(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``x`` (…, M·c) with the i-th c columns times weight i, in its own precision."""
    by_branch = x.view(*x.shape[:-1], len(weights), x.size(-1) // len(weights))
    return (by_branch * weights[:, None]).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention of the plain transformer (equations 1 to 3).

    Queries are d wide, keys ``key_dim`` (default: d). Without ``batch_first``, inputs and outputs
    are (T, B, d) in place of (B, T, d).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        key_dim: int | None = None,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")
        self.num_heads = num_heads
        self.batch_first = batch_first
        key_dim = embed_dim if key_dim is None else key_dim
        self.k_proj = nn.Linear(key_dim, embed_dim)
        self.v_proj = nn.Linear(key_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj: nn.Module = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)
        # the initial values of fairseq's attention
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, 2**-0.5 if key_dim == embed_dim else 1.0)
        start_projection(self.out_proj)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        mask: Tensor | None = None,
        past: dict[str, Tensor] | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, T, d) for queries (B, T, d), and the attention weights (B, M, T, S) or None.

        Queries attend to ``key`` (B, S, key_dim) and to what ``past`` holds of earlier calls, to
        which keys and values are added. ``mask``, which may lack dimensions of (B, M, T, S), is
        true for keys that a query sees, or is added to the scores.
        """
        past = {} if past is None else past
        if key is not None:
            for name, project in (("keys", self.k_proj), ("values", self.v_proj)):
                new = self._split(project(key))
                past[name] = torch.cat([past[name], new], 2) if name in past else new
        queries, keys, values = self._split(self.q_proj(query)), past["keys"], past["values"]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(queries.dtype)
        weights = None
        if need_weights:
            scores = (queries * queries.size(-1) ** -0.5) @ keys.mT
            if mask is not None:
                visible = mask.dtype == torch.bool
                scores = scores.masked_fill(~mask, -torch.inf) if visible else scores + mask
            weights = scores.softmax(-1)
            heads = self.dropout(weights) @ values
        else:
            rate = self.dropout.p if self.dropout.training else 0.0
            heads = F.scaled_dot_product_attention(queries, keys, values, mask, rate)
        # (B, M, T, h) -> (B, T, d)
        heads = heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)
        return self.out_proj(heads.flatten(2)), weights

    def _split(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, M, T, h)."""
        x = x.unflatten(-1, (self.num_heads, -1))
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)


class WeightedAttention(Attention):
    """Multi-head attention with a weight κ for each head: ``Σ κ_i b_i`` (equations 5 and 6)."""

    def __init__(self, embed_dim: int, kappa: BranchWeights, *args: Any, **options: Any) -> None:
        super().__init__(embed_dim, kappa.branches, *args, **options)
        self.out_proj = start_projection(WeightedLinear(embed_dim, embed_dim, kappa))


def start_projection(out_proj: nn.Module) -> nn.Module:
    """Return an output projection with the initial values of fairseq's attention."""
    nn.init.xavier_uniform_(out_proj.weight)
    nn.init.zeros_(out_proj.bias)
    return out_proj


class TransformerEncoderLayer(nn.Module):
    """An encoder layer of the plain transformer, ``h = LN(x + attention(x)); y = LN(h + FFN(h))``.

    Args:
        encoder_dim: width of the encoder's output, in a decoder layer.
        attention_dropout: dropout of attention weights; ``dropout`` by default.
        activation_dropout: dropout of the feed-forward network's inner vectors.
        pre_norm: ``x + sublayer(LN(x))`` in place of ``LN(x + sublayer(x))``.
        batch_first: whether inputs and outputs are (B, T, d), or (T, B, d).
    """

    attends_to: tuple[str, ...] = ("self",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        dropout: float = 0.0,
        encoder_dim: int | None = None,
        attention_dropout: float | None = None,
        activation_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.relu,
        pre_norm: bool = False,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        rate = dropout if attention_dropout is None else attention_dropout
        key_dims = {"self": embed_dim, "encoder": encoder_dim or embed_dim}
        # further arguments of each attention
        self.attentions = {name: (rate, key_dims[name], batch_first) for name in self.attends_to}
        for name, arguments in self.attentions.items():
            setattr(self, f"{name}_attn", Attention(embed_dim, num_heads, *arguments))
            setattr(self, f"{name}_attn_layer_norm", nn.LayerNorm(embed_dim))
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2: nn.Module = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)
        self.activation = activation
        self.pre_norm = pre_norm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, d) to (B, T, d); :meth:`Attention.forward` explains the mask."""
        h, _ = self.attend("self", x, mask=mask)
        return self.feed_forward(h)

    def attend(
        self, name: str, x: Tensor, key: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``LN(x + attention(x))``, and the attention weights if ``options`` ask for them.

        The attention is "self", to ``x``, or "encoder", to ``key``.
        """
        attention, norm = getattr(self, f"{name}_attn"), getattr(self, f"{name}_attn_layer_norm")
        query = norm(x) if self.pre_norm else x
        attended, weights = attention(query, query if name == "self" else key, **options)
        return self._add(x, attended, norm), weights

    def feed_forward(self, h: Tensor) -> Tensor:
        """Return ``LN(h + FFN(h))``, with equation 4."""
        inner = self.fc1(self.final_layer_norm(h) if self.pre_norm else h)
        inner = self.activation_dropout(self.activation(inner))
        return self._add(h, self.fc2(inner), self.final_layer_norm)

    def _add(self, x: Tensor, added: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(added)
        return x if self.pre_norm else norm(x)


class TransformerDecoderLayer(TransformerEncoderLayer):
    """A decoder layer of the plain transformer, which attends to the encoder, too."""

    attends_to = ("self", "encoder")

    def forward(self, x: Tensor, encoder_out: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, d) to (B, T, d); ``encoder_out`` is (B, S, d), and ``mask`` hides its padding.

        No token sees those after it.
        """
        seen = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        return self.decode(x, encoder_out, mask, seen)[0]

    def decode(
        self,
        x: Tensor,
        encoder_out: Tensor | None,
        mask: Tensor | None,
        self_mask: Tensor | None,
        pasts: dict[str, dict[str, Tensor]] | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, T, d), and the weights (B, M, T, S) of attention to the encoder or None.

        To decode token by token, give all calls the same ``pasts``, a dictionary for "self" and one
        for "encoder", which hold keys and values, and ``encoder_out`` to the first call alone.
        """
        pasts = {} if pasts is None else pasts
        h, _ = self.attend("self", x, mask=self_mask, past=pasts.get("self"))
        options = {"mask": mask, "past": pasts.get("encoder"), "need_weights": need_weights}
        h, weights = self.attend("encoder", h, encoder_out, **options)
        return self.feed_forward(h), weights


class WeightedEncoderLayer(TransformerEncoderLayer):
    """An encoder layer with one branch for each attention head.

    ``options`` of the branches are those of :class:`BranchWeights`. For 8 branches: ::

        layer = WeightedEncoderLayer(512, 8, 2048, dropout=0.1, parameterization="softmax")
        y = layer(x)  # x and y: (B, T, 512)

    Args:
        branched: the attentions with branches, ("self",), ("encoder",) or ("encoder", "self").
        plain: further arguments of the plain transformer's layer.
    """

    branched = ("self",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        dropout: float = 0.0,
        branched: Sequence[str] | None = None,
        plain: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, ffn_dim=ffn_dim)
        branched = branched or self.branched
        kappas = {name: BranchWeights(num_heads, "kappa", **options) for name in branched}
        alpha = BranchWeights(num_heads, "alpha", **options)
        super().__init__(embed_dim, num_heads, ffn_dim, dropout, **plain or {})
        for name, arguments in self.attentions.items():
            if name in kappas:
                attention = WeightedAttention(embed_dim, kappas[name], *arguments)
                setattr(self, f"{name}_attn", attention)
        self.fc2 = WeightedLinear(ffn_dim, embed_dim, alpha)


class WeightedDecoderLayer(TransformerDecoderLayer, WeightedEncoderLayer):
    """A decoder layer with one branch for each head of its attention to the encoder."""

    branched = ("encoder",)


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1 by their names."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` is {size}: it must be at least 1")
