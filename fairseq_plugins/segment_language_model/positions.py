"""Position encodings that depend on the distance between query and key only.

Two steps: an encoding of all distances, computed once for all layers, and each layer's table of
one vector a distance and head, which :mod:`.window_attention` reads.

Shapes: D distances, H heads, G groups of heads that share vectors (1 or H), d model width, d_h head
width. Distances fall from the farthest to -1; the ones that no query may see are there so that rows
can be counted, and hold the vector of the nearest that exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def sinusoids(places: Tensor, embed_dim: int) -> Tensor:
    """Return the sines, then the cosines, of ``places`` (P,) at d / 2 frequencies: float64 (P, d).

    Vaswani et al. 2017, section 3.5. In half precision distances beyond 256 would fall together.
    """
    exponents = torch.arange(0, embed_dim, 2, device=places.device, dtype=torch.float64) / embed_dim
    angles = places.unsqueeze(1) * 10_000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _falling(farthest: int, device: torch.device | None) -> Tensor:
    return torch.arange(farthest, -2, -1, device=device)


class SinusoidalRelativePositions(nn.Module):
    """The sinusoids R of each distance (Transformer-XL, section 3.3): no parameters.

    Args:
        embed_dim: d; even.
        clamp_len: distances beyond it use its vector; None for no limit.
        dropout: acts on the sinusoids, as on the embeddings; None for none.
    """

    def __init__(
        self, embed_dim: int, clamp_len: int | None = None, dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.clamp_len = clamp_len
        self.dropout = dropout

    def forward(self, farthest: int, device: torch.device | None = None) -> Tensor:
        """Return R of the distances ``farthest`` to -1, (D, d), in double precision."""
        distances = _falling(farthest, device).clamp(0, self.clamp_len)
        encoding = sinusoids(distances, self.embed_dim)
        # dropout takes streams first: (D, d) -> (1, D, d) -> (D, d)
        return encoding if self.dropout is None else self.dropout(encoding.unsqueeze(0)).squeeze(0)


class ProjectedDistanceTable(nn.Module):
    """``W_kR R``, the position keys of a layer's heads (Transformer-XL, section 3.3, term b).

    Args:
        embed_dim: d.
        num_heads: H; must divide d.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, encoding: Tensor) -> Tensor:
        """Map the sinusoids (D, d) to (H, D, d_h)."""
        projected = self.proj(encoding.to(self.proj.weight.dtype))
        # (D, d) -> (D, H, d_h) -> (H, D, d_h)
        return projected.unflatten(1, (self.num_heads, -1)).transpose(0, 1).contiguous()


class Distances(nn.Module):
    """The distances themselves, for tables that are learned vector by vector.

    Args:
        clamp_len: distances beyond it count as it; None for no limit.
    """

    def __init__(self, clamp_len: int | None = None) -> None:
        super().__init__()
        self.clamp_len = clamp_len

    def forward(self, farthest: int, device: torch.device | None = None) -> Tensor:
        """Return ``farthest`` to -1, those below 0 as 0: int (D,)."""
        return _falling(farthest, device).clamp(0, self.clamp_len)


class LearnedDistanceTable(nn.Module):
    """A learned vector a distance and head in each layer (Shaw et al. 2018, as section 3.3 has it).

    Args:
        num_heads: H.
        farthest: the last distance with a vector of its own; those beyond share it (their k).
        head_dim: d_h.
    """

    def __init__(self, num_heads: int, farthest: int, head_dim: int) -> None:
        super().__init__()
        self.farthest = farthest
        self.weight = nn.Parameter(torch.empty(num_heads, farthest + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 1 / d_h)."""
        nn.init.normal_(self.weight, std=self.weight.size(-1) ** -0.5)

    def forward(self, encoding: Tensor) -> Tensor:
        """Map distances (D,) to (H, D, d_h)."""
        return self.weight[:, encoding.clamp(max=self.farthest)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # evaluation may use a longer memory: distances beyond those trained share the last vector
        trained = state_dict.get(f"{prefix}weight")
        heads, _, head_dim = self.weight.shape
        if trained is not None and trained.shape == (heads, trained.size(1), head_dim):
            self.farthest = trained.size(1) - 1
            # the parameter stays the one that distributed training holds
            self.weight.data = self.weight.new_empty(trained.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class LearnedRelativePositions(nn.Module):
    """One learned vector a distance, shared by all heads and layers (all-attention, section 4.3).

    Args:
        span: the farthest distance that has a vector; the nearest is 1.
        head_dim: d_h.
        clamp_len: distances beyond it use its vector; None for no limit but the span.
    """

    def __init__(self, span: int, head_dim: int, clamp_len: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(span, head_dim))
        self.farthest = span if clamp_len is None else min(span, clamp_len)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 1) (section 5.1)."""
        nn.init.normal_(self.weight)

    def forward(self, farthest: int, device: torch.device | None = None) -> Tensor:
        """Return the vectors of the distances ``farthest`` to -1, (D, d_h)."""
        distances = _falling(farthest, self.weight.device if device is None else device)
        return self.weight[distances.clamp(1, self.farthest) - 1]


class SharedDistanceTable(nn.Module):
    """The same vectors for every layer and head."""

    def forward(self, encoding: Tensor) -> Tensor:
        """Map (D, d_h) to (1, D, d_h)."""
        return encoding.unsqueeze(0)
