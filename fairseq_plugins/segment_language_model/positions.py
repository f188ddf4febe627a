"""Position encodings: by the distance between query and key, or by a token's place in its segment.

By distance: all layers share one encoding, which each layer projects to relative keys, a vector for
each distance and head. Distances fall from the farthest to -1, which no query sees but which makes
rows easy to count. Distances beyond a clamp use its vector (:class:`.Clamped`).

By place: only for models without recurrence, because the same places of an earlier segment would
look alike (Transformer-XL, section 3.3, and its baselines in tables 6 and 10).

Shapes: D distances, P places, H heads, B streams, T tokens of a segment, L layers, d model width,
d_h head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.attention_blocks import Clamped


def sinusoids(places: Tensor, embed_dim: int) -> Tensor:
    """Return the sines, then the cosines, of ``places`` (P,) at d / 2 frequencies: float64 (P, d).

    Vaswani et al. 2017, section 3.5. Half precision could not tell distances beyond 256 apart.
    """
    exponents = torch.arange(0, embed_dim, 2, device=places.device, dtype=torch.float64) / embed_dim
    angles = places.unsqueeze(1) * 10_000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _distances_from(farthest: int, like: Tensor) -> Tensor:
    return torch.arange(farthest, -2, -1, device=like.device)


def _check_clamp(clamp_len: int | None) -> None:
    if clamp_len is not None and clamp_len < 1:
        raise ValueError(f"`clamp_len` is {clamp_len}: give at least 1, or None for no limit")


def _check_even(embed_dim: int) -> None:
    if embed_dim % 2:
        raise ValueError(f"`embed_dim` is {embed_dim}: sinusoids take an even width")


def _exceeds_clamp(clamp_len: int | None, farthest: int) -> bool:
    return clamp_len is not None and farthest > clamp_len


class SinusoidalRelativePositions(nn.Module):
    """The sinusoids R of each distance (Transformer-XL, section 3.3), without parameters."""

    def __init__(
        self, embed_dim: int, clamp_len: int | None = None, dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        _check_clamp(clamp_len)
        _check_even(embed_dim)
        self.embed_dim = embed_dim
        self.clamp_len = clamp_len
        self.dropout = dropout

    def forward(self, farthest: int, like: Tensor) -> Tensor | Clamped:
        """Return R for the distances from ``farthest``, or the clamp, to -1, (D, d).

        It has the dtype and device of ``like``.
        """
        # in training, dropout draws anew for every distance, beyond the clamp too
        if _exceeds_clamp(self.clamp_len, farthest) and (self.dropout is None or not self.training):
            return Clamped(self(self.clamp_len, like))
        distances = _distances_from(farthest, like).clamp(0, self.clamp_len)
        encoding = sinusoids(distances, self.embed_dim)
        if self.dropout is not None:
            # dropout expects a dimension of streams: (D, d) -> (1, D, d) -> (D, d)
            encoding = self.dropout(encoding.unsqueeze(0)).squeeze(0)
        return encoding.to(like.dtype)


class RelativeKeyProjection(nn.Module):
    """``W_kR R``, the relative keys of a layer's heads (Transformer-XL, section 3.3, term b)."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, encoding: Tensor) -> Tensor:
        """Map the sinusoids (D, d) to (H, D, d_h)."""
        # (D, d) -> (D, H, d_h) -> (H, D, d_h)
        return self.proj(encoding).unflatten(1, (self.num_heads, -1)).transpose(0, 1).contiguous()


class Distances(nn.Module):
    """The distances themselves, up to ``clamp_len``, for :class:`LearnedRelativeKeys`."""

    def __init__(self, clamp_len: int | None = None) -> None:
        super().__init__()
        _check_clamp(clamp_len)
        self.clamp_len = clamp_len

    def forward(self, farthest: int, like: Tensor) -> Tensor | Clamped:
        """Return the distances from ``farthest``, or the clamp, to -1, with 0 for -1: int (D,)."""
        if _exceeds_clamp(self.clamp_len, farthest):
            return Clamped(self(self.clamp_len, like))
        return _distances_from(farthest, like).clamp(min=0)


class LearnedRelativeKeys(nn.Module):
    """A learned vector for each distance and head (Shaw et al. 2018; Transformer-XL, section 3.3).

    Distances beyond ``farthest`` (k in Shaw et al.) share its vector.
    """

    def __init__(self, num_heads: int, farthest: int, head_dim: int) -> None:
        super().__init__()
        self.farthest = farthest
        self.weight = nn.Parameter(torch.empty(num_heads, farthest + 1, head_dim))
        nn.init.normal_(self.weight, std=head_dim**-0.5)

    def forward(self, encoding: Tensor) -> Tensor:
        """Map distances (D,) to (H, D, d_h)."""
        return self.weight[:, encoding.clamp(max=self.farthest)]

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *rest: object
    ) -> None:
        # evaluation may look farther back: untrained distances share the last trained vector
        trained = state_dict.get(f"{prefix}weight")
        heads, _, head_dim = self.weight.shape
        if trained is not None and trained.shape == (heads, trained.size(1), head_dim):
            self.farthest = trained.size(1) - 1
            # keep the parameter, which distributed training refers to
            self.weight.data = self.weight.new_empty(trained.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class LearnedRelativePositions(nn.Module):
    """A learned vector for each distance from 1 to ``farthest`` (all-attention, section 4.3).

    Heads and layers share it. Distances beyond ``clamp_len`` use its vector.
    """

    def __init__(self, farthest: int, head_dim: int, clamp_len: int | None = None) -> None:
        super().__init__()
        _check_clamp(clamp_len)
        self.weight = nn.Parameter(torch.empty(farthest, head_dim))
        self.farthest = farthest if clamp_len is None else min(farthest, clamp_len)
        self.clamp_len = clamp_len
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors from N(0, 1) (section 5.1)."""
        nn.init.normal_(self.weight)

    def forward(self, farthest: int, like: Tensor) -> Tensor | Clamped:
        """Return the vectors for the distances from ``farthest``, or the clamp, to -1, (D, d_h)."""
        if _exceeds_clamp(self.clamp_len, farthest):
            return Clamped(self(self.clamp_len, like))
        distances = _distances_from(farthest, like)
        return self.weight[distances.clamp(1, self.farthest) - 1]


class SinusoidalAbsolutePositions(nn.Module):
    """Sinusoids added to the embeddings (Vaswani et al. 2017)."""

    max_positions: int | None = None  # every place has a vector

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        _check_even(embed_dim)
        self.embed_dim = embed_dim

    def add_to_embeddings(self, x: Tensor, first: int) -> Tensor:
        """Add the vectors of the places from ``first`` on to the embeddings (B, T, d)."""
        places = torch.arange(first, first + x.size(1), device=x.device)
        return x + sinusoids(places, self.embed_dim).to(x.dtype)

    def add_to_layer(self, x: Tensor, layer: int, first: int) -> Tensor:
        """Return the input (B, T, d) of layer ``layer`` (from 0) unchanged."""
        return x


class LearnedAbsolutePositions(nn.Module):
    """Learned vectors (L, P, d) of places, added to each layer's input (Al-Rfou et al. 2018)."""

    def __init__(self, num_layers: int, max_positions: int, embed_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_layers, max_positions, embed_dim))
        nn.init.normal_(self.weight, std=embed_dim**-0.5)

    @property
    def max_positions(self) -> int:
        """Return P."""
        return self.weight.size(1)

    def add_to_embeddings(self, x: Tensor, first: int) -> Tensor:
        """Return the embeddings (B, T, d) unchanged."""
        return x

    def add_to_layer(self, x: Tensor, layer: int, first: int) -> Tensor:
        """Add the vectors of the places from ``first`` on to the input of a layer (from 0)."""
        end = first + x.size(1)
        if end > self.max_positions:
            raise ValueError(f"`max_positions` is {self.max_positions}: place {end} has no vector")
        return x + self.weight[layer, first:end]
