"""Embeddings and outputs with the names that weights have in fairseq's checkpoints.

A tied module has no weights: it looks them up where they are. Adaptive input: Baevski and Auli 2019
(arXiv:1809.10853); adaptive softmax: Grave et al. 2017 (arXiv:1609.04309). Both split V symbols by
frequency into bands (for the softmax: the head, and clusters of rarer symbols), and band i has
vectors of width d / factor^i.

Shapes: B streams, T tokens, V symbols, d model width, C clusters, and a band of S symbols with
vectors of width d_i.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig


class Tied(nn.Module):
    """A linear map by the weights of ``source``, an embedding or the map that it reverses."""

    def __init__(self, source: nn.Module, reverse: bool = False, bias: int = 0) -> None:
        super().__init__()
        self._source = [source]  # in a list, and so not a part of this module
        self.reverse = reverse
        self.bias = nn.Parameter(torch.zeros(bias)) if bias else None

    @property
    def weight(self) -> Tensor:
        """Return the weights of the source, as they are there."""
        return self._source[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension of ``x``."""
        return F.linear(x, self.weight.t() if self.reverse else self.weight, self.bias)


class Bias(nn.Module):
    """Add a learned vector to (…, S)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, S) to (…, S)."""
        return x + self.bias


class AdaptiveInput(nn.Module):
    """Embeddings in bands: of symbol w in band i, ``P_i e_w``."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.embed_dim = config.decoder_embed_dim
        self.ends = band_ends(config, "adaptive_input")
        factor, start = config.adaptive_input_factor, 0
        # published models do not project bands that are as wide as the model
        plain = config.tie_adaptive_proj and config.adaptive_softmax_factor == 1
        self.embeddings = nn.ModuleList()
        for band, end in enumerate(self.ends):
            width = int(self.embed_dim // factor**band)
            projection: nn.Module = nn.Linear(width, self.embed_dim, bias=False)
            if plain or (band == 0 and config.no_adaptive_head_proj):
                projection = nn.Identity()
            embedding = nn.Embedding(end - start, width, None if band else config.pad_token_id)
            self.embeddings.append(nn.Sequential(embedding, projection))
            start = end

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to embeddings (B, T, d)."""
        embedded = self.embeddings[0][0].weight.new_zeros(*tokens.shape, self.embed_dim)
        start = 0
        for end, band in zip(self.ends, self.embeddings, strict=True):
            inside = (tokens >= start) & (tokens < end)
            embedded[inside] = band(tokens[inside] - start)
            start = end
        return embedded


class Head(nn.Module):
    """Scores of the frequent symbols by their embeddings, and of the clusters."""

    def __init__(self, embedding: nn.Module, embed_dim: int, clusters: int) -> None:
        super().__init__()
        self.word_proj = Tied(embedding)
        self.class_proj = nn.Linear(embed_dim, clusters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, T, S + C)."""
        return torch.cat([self.word_proj(x), self.class_proj(x)], dim=-1)


class AdaptiveSoftmax(nn.Module):
    """The log-probabilities of all symbols.

    The head has ``W_0 P_0 x + b_0`` for frequent symbols and clusters. A symbol w of cluster i has
    ``log p(w) = log p(i) + log softmax(W_i P_i x + b_i)_w``. Only some models have b and P_0; those
    that tie them take W_i from the embeddings, and P_i, transposed, from their projections.
    """

    def __init__(self, config: PreTrainedConfig, embed_tokens: nn.Module) -> None:
        super().__init__()
        width, factor = config.decoder_embed_dim, config.adaptive_softmax_factor
        self.ends = band_ends(config, "adaptive_softmax")
        tied, clusters = config.tie_adaptive_weights, len(self.ends) - 1
        bands: Any = embed_tokens.embeddings if tied else [None] * (clusters + 1)
        head: nn.Module = nn.Linear(width, self.ends[0] + clusters, bias=False)
        parts: list[nn.Module] = [Head(bands[0][0], width, clusters) if tied else head]
        if config.output_bias:
            if config.tie_adaptive_head_proj:
                parts.insert(0, Tied(bands[0][1], reverse=True))
            elif tied and factor != 1 and not config.no_adaptive_head_proj:
                parts.insert(0, nn.Linear(width, width, bias=False))
            parts.append(Bias(self.ends[0] + clusters))
        self.head = nn.Sequential(*parts) if config.output_bias else parts[0]
        self.tail = nn.ModuleList()
        for number in range(1, clusters + 1):
            size = self.ends[number] - self.ends[number - 1]
            inner = int(width // factor**number)
            projection: nn.Module = nn.Linear(width, inner, bias=False)
            if config.tie_adaptive_proj:
                by_embedding = bands[number][1]
                projection = nn.Identity() if factor == 1 else Tied(by_embedding, reverse=True)
            scores = Tied(bands[number][0]) if tied else nn.Linear(inner, size, bias=False)
            dropout = nn.Dropout(config.adaptive_softmax_dropout)
            bias = [Bias(size)] if config.output_bias else []
            self.tail.append(nn.Sequential(projection, dropout, scores, *bias))
        self.dropout = nn.Dropout(config.adaptive_softmax_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to log-probabilities (B, T, V), in single precision."""
        x = self.dropout(x)
        head = self.head(x).float().log_softmax(-1)
        frequent, clusters = head.tensor_split([self.ends[0]], dim=-1)
        rare = [
            cluster.unsqueeze(-1) + tail(x).float().log_softmax(-1)
            for cluster, tail in zip(clusters.unbind(-1), self.tail, strict=True)
        ]
        return torch.cat([frequent, *rare], dim=-1)


def band_ends(config: PreTrainedConfig, part: str) -> list[int]:
    """Return where the bands of ``part``, "adaptive_input" or "adaptive_softmax", end."""
    cutoffs = str(getattr(config, f"{part}_cutoff")).strip("[]()").split(",")
    return [*map(int, cutoffs), config.vocab_size]


def build_embedding(config: PreTrainedConfig) -> nn.Module:
    """Return the map of tokens (B, T) to embeddings (B, T, d)."""
    if config.adaptive_input:
        return AdaptiveInput(config)
    return nn.Embedding(config.vocab_size, config.decoder_embed_dim, config.pad_token_id)


def build_output(config: PreTrainedConfig, embed_tokens: nn.Module) -> nn.Module:
    """Return the map of the network's output (B, T, d) to scores (B, T, V)."""
    if config.adaptive_softmax_cutoff is not None:
        return AdaptiveSoftmax(config, embed_tokens)
    if config.share_decoder_input_output_embed:
        return Tied(embed_tokens, bias=config.output_bias * config.vocab_size)
    return nn.Linear(config.decoder_embed_dim, config.vocab_size, bias=config.output_bias)
