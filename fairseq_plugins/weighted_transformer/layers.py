"""The layers of encoder and decoder: a transformer's layers with weights κ and α for branches.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132, section 3): "layer normalization, and residual
connections … are retained". This is the variant ``sublayers``, with S the sum of the weights ::

    h = LN(x + Σ κ_i b_i);    b_i = head_i W^{O_i} + b^O/S
    y = LN(h + Σ α_i F_i(h)); F_i(h) = relu(h W_1^i + b_1^i) W_2^i + b_2/S

κ scales columns of the output projection, α columns of the second feed-forward layer. If all κ_i
and α_i are 1, so that S = M, this is a layer of the plain transformer. In the variant
``as-written``, as_written.py has the rest of the layer but ``LN(x + …)``.

Shapes: B sentences, T queries, S keys, M branches, d model width, h head width (d/M).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.sizes import check_heads, check_sizes
from fairseq_plugins.weighted_transformer.as_written import BranchedFeedForward
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights, WeightedLinear

VARIANTS = SUBLAYERS, AS_WRITTEN = ("sublayers", "as-written")


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
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.time_dim = 1 if batch_first else 0
        key_dim = embed_dim if key_dim is None else key_dim
        self.k_proj = nn.Linear(key_dim, embed_dim)
        self.v_proj = nn.Linear(key_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj: nn.Module = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)
        # the initial values of fairseq's attention
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, 2**-0.5 if key_dim == embed_dim else 1.0)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

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
        true for keys that a query sees.
        """
        queries, past = self._split(self.q_proj(query)), {} if past is None else past
        if key is not None:
            for name, project in (("keys", self.k_proj), ("values", self.v_proj)):
                new = self._split(project(key))
                past[name] = torch.cat([past[name], new], 2) if name in past else new
        keys, values = past["keys"], past["values"]
        if need_weights:
            scores = (queries * queries.size(-1) ** -0.5) @ keys.mT
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            weights = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float))
            heads = self.dropout(weights.to(scores.dtype)) @ values
        else:
            weights, rate = None, self.dropout.p if self.dropout.training else 0.0
            heads = F.scaled_dot_product_attention(queries, keys, values, mask, rate)
        return self.out_proj(heads.movedim(2, self.time_dim).flatten(2)), weights

    def _split(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, M, T, h)."""
        return x.unflatten(-1, (self.num_heads, -1)).movedim(self.time_dim, 2)


class WeightedAttention(Attention):
    """Multi-head attention with a weight κ for each head: ``Σ κ_i b_i`` (equations 5 and 6)."""

    def __init__(self, embed_dim: int, kappa: BranchWeights, *args: Any, **options: Any) -> None:
        super().__init__(embed_dim, kappa.branches, *args, **options)
        self.out_proj = WeightedLinear(embed_dim, embed_dim, kappa)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)


class WeightedEncoderLayer(nn.Module):
    """An encoder layer with one branch for each attention head.

    For 8 branches: ::

        layer = WeightedEncoderLayer(512, 8, 2048, dropout=0.1, parameterization="softmax")
        y = layer(x)  # x and y: (B, T, 512)

    Args:
        variant: "sublayers" or "as-written".
        branched: the attentions with branches: ("self",), ("encoder",) or ("encoder", "self").
        encoder_dim: width of the encoder's output, in a decoder layer.
        attention_dropout: that of attention weights; ``dropout`` by default.
        pre_norm: ``x + sublayer(LN(x))`` in place of ``LN(x + sublayer(x))``.
        batch_first: whether inputs and outputs are (B, T, d), or (T, B, d).
        top_k, options: those of :class:`BranchWeights`.
    """

    attends_to: tuple[str, ...] = ("self",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        dropout: float = 0.0,
        *,
        variant: str = SUBLAYERS,
        branched: Sequence[str] | None = None,
        encoder_dim: int | None = None,
        attention_dropout: float | None = None,
        activation_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.relu,
        pre_norm: bool = False,
        batch_first: bool = True,
        top_k: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_sizes(1, ffn_dim=ffn_dim)
        if variant not in VARIANTS:
            raise ValueError(f"`variant` is {variant!r}: there are {', '.join(VARIANTS)}")
        draw = functools.partial(BranchWeights, num_heads, **options)
        branched = branched or self.attends_to[-1:]
        if variant == AS_WRITTEN:
            if ffn_dim % len(branched):
                raise ValueError(
                    f"`ffn_dim` is {ffn_dim}: both attentions have branches and share it, so it "
                    "must be even"
                )
            # only α says which branches count
            pairs = {name: (draw("kappa"), draw("alpha", top_k=top_k)) for name in branched}
        else:
            kappas = {name: draw("kappa", top_k=top_k) for name in branched}
            alpha = draw("alpha", top_k=top_k)
        # a layer of the plain transformer, of which branches then replace parts
        rate = dropout if attention_dropout is None else attention_dropout
        key_dims = {"self": embed_dim, "encoder": encoder_dim or embed_dim}
        attentions = {name: (rate, key_dims[name], batch_first) for name in self.attends_to}
        for name, arguments in attentions.items():
            setattr(self, f"{name}_attn", Attention(embed_dim, num_heads, *arguments))
            setattr(self, f"{name}_attn_layer_norm", nn.LayerNorm(embed_dim))
        self.fc1: nn.Module | None = nn.Linear(embed_dim, ffn_dim)
        self.fc2: nn.Module | None = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm: nn.Module | None = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)
        self.activation = activation
        self.pre_norm = pre_norm
        replaced = {name: attentions[name] for name in attentions if name in branched}
        if variant == AS_WRITTEN:
            self.fc1 = self.fc2 = self.final_layer_norm = None
            shape, rest = (embed_dim, ffn_dim // len(branched)), (activation, activation_dropout)
            networks = {name: BranchedFeedForward(*shape, *w, *rest) for name, w in pairs.items()}
            for name, arguments in replaced.items():
                attention = Attention(embed_dim, num_heads, *arguments)
                attention.out_proj = networks[name]
                setattr(self, f"{name}_attn", attention)
        else:
            for name, arguments in replaced.items():
                attention = WeightedAttention(embed_dim, kappas[name], *arguments)
                setattr(self, f"{name}_attn", attention)
            self.fc2 = WeightedLinear(ffn_dim, embed_dim, alpha)

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
        """Return ``LN(h + Σ α_i F_i(h))``, or what is ``as-written`` as it is."""
        if self.fc2 is None:
            return h
        inner = self.fc1(self.final_layer_norm(h) if self.pre_norm else h)
        inner = self.activation_dropout(self.activation(inner))
        return self._add(h, self.fc2(inner), self.final_layer_norm)

    def _add(self, x: Tensor, added: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(added)
        return x if self.pre_norm else norm(x)


class WeightedDecoderLayer(WeightedEncoderLayer):
    """A decoder layer with one branch for each head of its attention to the encoder."""

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
        pasts = {"self": {}, "encoder": {}} if pasts is None else pasts
        h, _ = self.attend("self", x, mask=self_mask, past=pasts["self"])
        options = {"mask": mask, "past": pasts["encoder"], "need_weights": need_weights}
        h, weights = self.attend("encoder", h, encoder_out, **options)
        return self.feed_forward(h), weights
