"""Position encodings that depend on the distance between query and key only.

Shapes: D distances, d_h head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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

    def forward(self, farthest: int) -> Tensor:
        """Return the vectors of the distances ``farthest``, ``farthest`` - 1, …, 0, -1: (D, d_h).

        Distances that no query may see (0, -1 and those beyond the span) are there so that rows
        can be counted; they hold the nearest vector that exists.
        """
        distances = torch.arange(farthest, -2, -1, device=self.weight.device)
        return self.weight[distances.clamp(1, self.farthest) - 1]
