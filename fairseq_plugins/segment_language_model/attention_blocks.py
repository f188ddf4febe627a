"""Which keys a query sees, and how queries form blocks with only the keys that they see.

Shapes: H heads, B streams, T queries (the segment), S keys (earlier tokens and segment), D
distances, G sets of relative keys (1 for all heads, or H), W distances with a bias, d_h head width;
in a block: C queries that see at most K keys, F distances beyond a clamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Wide blocks compute more hidden scores; narrow blocks have small products. A CPU's caches hold the
# scores of 64 queries, or of 128 in bf16 with fused attention.
QUERY_BLOCK = 64
QUERY_BLOCK_FUSED_BF16 = 128

# farther than any text; torch.compile accepts no larger number
UNLIMITED = 2**31 - 1


class Window(NamedTuple):
    """The distances that a query sees: ``nearest`` 0 includes its own token, 1 starts before it."""

    nearest: int
    farthest: int = UNLIMITED


# The window for keys without a place in the text, such as persistent vectors.
EVERY_KEY = Window(-UNLIMITED, UNLIMITED)


class Clamped(NamedTuple):
    """Relative keys (G, D, d_h), or an encoding (D, d), for the distances from a clamp down to -1.

    Distances beyond the clamp use the first row.
    """

    rows: Tensor


def map_rows(function: Callable[[Tensor], Tensor], encoding: Tensor | Clamped) -> Tensor | Clamped:
    """Apply a function to the rows of an encoding, clamped or not."""
    return Clamped(function(encoding.rows)) if isinstance(encoding, Clamped) else function(encoding)


def rows_by_distance(
    keys: Tensor, rel_keys: Tensor | Clamped | None, distance_bias: Tensor | None
) -> Tensor | None:
    """Return the rows of relative keys, (G, D, d_h), or None; check that they fit the keys."""
    if rel_keys is None:
        if distance_bias is not None:
            raise ValueError("`distance_bias` without `rel_keys`: give both, or neither")
        return None
    if isinstance(rel_keys, Clamped):
        rows, needed = rel_keys.rows, 1
    else:
        rows, needed = rel_keys, keys.size(2) + 1
    if rows.size(1) < needed:
        raise ValueError(
            f"`rel_keys` has {rows.size(1)} distances: {keys.size(2)} keys take one more than "
            "there are keys, down to distance -1, or at least one where they are Clamped"
        )
    if rows.size(0) not in (1, keys.size(0)) or rows.size(2) != keys.size(3):
        raise ValueError(
            f"`rel_keys` is {tuple(rows.shape)}: {keys.size(0)} heads of width {keys.size(3)} "
            "take one set for all, or one each, of that width"
        )
    return rows


class Block(NamedTuple):
    """C queries starting at ``start``, and the K keys starting at ``first`` that they see."""

    start: int
    queries: int
    first: int
    keys: int
    offset: int  # the distance between the first query and the first key

    def select_queries(self, tensor: Tensor) -> Tensor:
        """Return the block's part (H, B, C, …) of a tensor (H, B, T, …)."""
        return tensor.narrow(2, self.start, self.queries)

    def select_keys(self, tensor: Tensor) -> Tensor:
        """Return the block's part (H, B, K, d_h) of a tensor (H, B, S, d_h)."""
        return tensor.narrow(2, self.first, self.keys)

    def select_rows(self, by_query: Sequence[Tensor], by_key: Sequence[Tensor]) -> list[Tensor]:
        """Return the block's parts of queries and of keys as (H·B, C or K, d_h)."""
        parts = [*map(self.select_queries, by_query), *map(self.select_keys, by_key)]
        return [part.flatten(0, 1) for part in parts]

    def select_distances(self, rel_keys: Tensor) -> Tensor:
        """Return the rows (G, K + 1 - F, d_h) for the block's distances, which fall to -1."""
        start = rel_keys.size(1) - 1 - self.offset - self.queries
        far = min(max(0, -start), self.keys)
        return rel_keys.narrow(1, max(0, start), self.keys + 1 - far)

    def biased(
        self, by_distance: Tensor, distance_bias: Tensor, farthest: int
    ) -> tuple[Tensor, Tensor]:
        """Return the columns of scores (H, B, C, K + 1) that have a bias, and the biases (H, W)."""
        first = self.offset + self.queries - 1 - farthest
        unseen = min(max(0, -first), distance_bias.size(1))
        width = min(distance_bias.size(1) - unseen, by_distance.size(3) - max(0, first))
        return by_distance.narrow(3, max(0, first), width), distance_bias.narrow(1, unseen, width)


def split_into_blocks(
    query: Tensor, keys: Tensor, window: Window, fused: bool = False
) -> Iterator[Block]:
    """Yield blocks of the queries (H, B, T, d_h), first to last, with the keys that they see.

    Queries that see no key are in no block. Fused attention stores only a block's scores by
    distance, so its blocks may be wider.
    """
    num_queries, past = query.size(2), keys.size(2) - query.size(2)
    smallest = QUERY_BLOCK
    if fused and window == EVERY_KEY:
        smallest = max(1, num_queries)
    elif fused and query.dtype == torch.bfloat16:
        smallest = QUERY_BLOCK_FUSED_BF16
    # the first tokens of a stream may see nothing
    seeing = num_queries - min(num_queries, max(0, window.nearest - past))
    # equal sizes: a small last block would take as long as a full one
    block = max(1, -(-seeing // max(1, seeing // smallest)))
    for start in range(num_queries - seeing, num_queries, block):
        size = min(block, num_queries - start)
        position = past + start
        first = max(0, position - window.farthest)
        seen = min(position + size - window.nearest - first, keys.size(2))
        yield Block(start, size, first, seen, position - first)


def rel_shift(scores: Tensor, num_keys: int) -> Tensor:
    """Turn scores by distance into scores by key, without a copy (Transformer-XL, appendix B).

    ``scores`` are (…, C, K + 1), contiguous. Column c holds the last query's score for key c, and
    each earlier query's score for one key further back. Returns a view (…, C, K) whose entry (i, j)
    is entry (i, C - 1 - i + j) of ``scores``: in memory its rows lie K apart.
    """
    *batch, queries, columns = scores.shape
    flat = scores.view(*batch, queries * columns)
    return flat.narrow(-1, queries - 1, queries * num_keys).view(*batch, queries, num_keys)


def undo_rel_shift(scores: Tensor, by_distance: Tensor) -> None:
    """Write scores by key (…, C, K) into ``by_distance`` (…, C, K + 1), zero where there is no key.

    It inverts :func:`rel_shift`, so it turns gradients by key into gradients by distance.
    """
    *batch, queries, keys = scores.shape
    flat = by_distance.view(*batch, queries * (keys + 1))
    flat.narrow(-1, 0, queries - 1).zero_()
    flat.narrow(-1, queries * (keys + 1) - 1, 1).zero_()
    rel_shift(by_distance, keys).copy_(scores)


def hidden_by_window(offset: int, queries: int, keys: int, window: Window, like: Tensor) -> Tensor:
    """Return which keys the window hides, bool (C, K), for a block with this ``offset``."""
    rows = torch.arange(offset, offset + queries, device=like.device).unsqueeze(1)
    distance = rows - torch.arange(keys, device=like.device)
    return (distance < window.nearest) | (distance > window.farthest)
