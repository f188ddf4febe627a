"""Position encodings that depend on a token's place in its segment only.

They cannot tell a remembered token from one of the segment (Transformer-XL, section 3.3), so they
go without a memory; the paper compares with them (tables 6 and 10).

Shapes: B streams, T tokens of a segment, L layers, P places, d model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.positions import sinusoids


class SinusoidalAbsolutePositions(nn.Module):
    """Sinusoids added to the embeddings (Vaswani et al. 2017).

    Args:
        embed_dim: d; even.
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim

    def add_to_embeddings(self, x: Tensor, first: int) -> Tensor:
        """Return the embeddings (B, T, d), tokens beginning at place ``first``, with the places."""
        places = torch.arange(first, first + x.size(1), device=x.device)
        return x + sinusoids(places, self.embed_dim).to(x.dtype)

    def add_to_layer(self, x: Tensor, layer: int, first: int) -> Tensor:
        """Return what enters layer ``layer`` (from 0), (B, T, d): as it is."""
        return x


class LearnedAbsolutePositions(nn.Module):
    """A learned vector a place, added to the input of each layer anew (Al-Rfou et al. 2018).

    Args:
        num_layers: L.
        max_positions: P.
        embed_dim: d.
    """

    def __init__(self, num_layers: int, max_positions: int, embed_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_layers, max_positions, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 1 / d)."""
        nn.init.normal_(self.weight, std=self.weight.size(-1) ** -0.5)

    def add_to_embeddings(self, x: Tensor, first: int) -> Tensor:
        """Return the embeddings (B, T, d) as they are."""
        return x

    def add_to_layer(self, x: Tensor, layer: int, first: int) -> Tensor:
        """Return what enters layer ``layer`` (from 0), (B, T, d), tokens beginning at ``first``.

        Raises:
            ValueError: a token's place has no vector.
        """
        end = first + x.size(1)
        if end > self.weight.size(1):
            raise ValueError(
                f"a segment of {end} tokens, --extended-context included, is longer than the "
                f"{self.weight.size(1)} places that --positions learned-absolute was trained for: "
                "give a smaller --tokens-per-sample"
            )
        return x + self.weight[layer, first:end]
