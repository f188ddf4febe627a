"""All-attention: relative attention with persistent vectors and learned spans.

Sukhbaatar et al. 2019 (arXiv:1907.01470), sections 3, 4 and 5.3. Shapes: B streams, H heads, H_g
heads of a group, T tokens of the segment, S tokens of earlier text and segment, D distances, W
distances on the ramp of a span, N persistent vectors, d model width, d_h = d / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import (
    ALL_HEADS,
    AdaptiveSpan,
    HeadGroup,
    HeadGroups,
    read_head_groups,
)
from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors, merge_attentions
from fairseq_plugins.segment_language_model.attention import (
    RelativeAttention,
    SegmentLayer,
    choose_kernel,
    merge_heads,
    split_heads,
)
from fairseq_plugins.segment_language_model.attention_blocks import Clamped, Window
from fairseq_plugins.segment_language_model.key_value_cache import (
    KeyValueCache,
    LayerState,
    register_state,
)
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    SharedRelativeKeys,
)

# How attention uses persistent vectors (section 5.3, figure 2). The paper's fifth variant, ff-attn,
# is a separate sublayer.
JOINT = "all"
SPLIT = "attn-split"
HEAD_SPLIT = "head-split"
SINGLE_HEAD = "single-head"
IN_ATTENTION = (JOINT, SPLIT, HEAD_SPLIT, SINGLE_HEAD)

# Training keeps this many tokens more than the widest head sees, as its span may grow.
SPAN_MARGIN = 64


class SpannedPositions(NamedTuple):
    """All that a layer's scores depend on, besides the tokens.

    ``rel_keys`` are p for the distances S - 1 (or more) down to -1, (1, D, d_h), or clamped; each
    group of heads has a :meth:`.AdaptiveSpan.log_mask`, or None.
    """

    rel_keys: Tensor | Clamped
    groups: HeadGroups
    log_masks: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class GroupedCaches(LayerState):
    """Keys and values of a layer whose heads have different spans: a cache for each group."""

    groups: tuple[KeyValueCache, ...]

    @property
    def length(self) -> int:
        """Return S of the group that keeps the most tokens."""
        return max(cache.length for cache in self.groups)

    @property
    def streams(self) -> int:
        """Return B."""
        return self.groups[0].streams

    def last(self, length: int, before: int = 0, segment: int = 0) -> GroupedCaches:
        """Return the last tokens of each group."""
        return GroupedCaches(tuple(c.last(length, before, segment) for c in self.groups))

    def select(self, order: Tensor) -> GroupedCaches:
        """Make stream ``order[i]`` stream i."""
        return GroupedCaches(tuple(cache.select(order) for cache in self.groups))

    def to(self, like: Tensor) -> GroupedCaches:
        """Return the caches with the device and dtype of ``like``."""
        return GroupedCaches(tuple(cache.to(like) for cache in self.groups))


register_state(GroupedCaches, ["groups"], lambda groups, max_length: GroupedCaches(tuple(groups)))


class AllAttention(RelativeAttention):
    """Attention to earlier tokens and to persistent vectors, with a span for each head.

    The score of query i is ``q_i·k_j + q_i·p_{i-j}`` for key j and ``q_i·m_k`` for a persistent
    vector, divided by √d_h; one softmax covers them all (equation 13). By itself::

        encode, span = LearnedRelativePositions(256, 64), AdaptiveSpan(8, 256, initial=0.5)
        attention = AllAttention(
            512, 8, Window(1, 256), SharedRelativeKeys(), num_persistent=1024, span=span
        )
        y, _ = attention(x, attention.project_positions(encode(x.size(1) - 1)))  # (B, T, 512)

    Args:
        position_projection: maps the encoding of the distances to p, (1, D, d_h).
        num_persistent: N, 0 for no persistent vectors.
        variant: "all" (one softmax over context and persistent vectors), "attn-split" (a separate
            softmax), "head-split" (the first half of the heads see only the context, the others
            only the vectors), or "single-head" (attn-split with one head of width d).
        span: learned spans of the heads that see the context, or None.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        position_projection: nn.Module,
        dropout: float = 0.0,
        num_persistent: int = 0,
        variant: str = JOINT,
        span: AdaptiveSpan | None = None,
        kernel: str = "fast",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, window, position_projection, dropout=dropout, kernel=kernel
        )
        if variant not in IN_ATTENTION:
            raise ValueError(f"`variant` is {variant!r}: there are {', '.join(IN_ATTENTION)}")
        if variant == HEAD_SPLIT and num_heads % 2:
            raise ValueError(
                f"`num_heads` is {num_heads}: half of them see the context, give an even number"
            )
        self.context_heads = num_heads // 2 if variant == HEAD_SPLIT else num_heads
        if span is not None and len(span.value) != self.context_heads:
            raise ValueError(
                f"`span` has {len(span.value)} heads: {self.context_heads} see the context"
            )
        self.variant = variant
        self.span = span
        # if set: forward passes append the share (B, T) of each token's attention that goes to
        # persistent vectors, in the mean over the heads
        self.persistent_shares: list[Tensor] | None = None
        self.persistent = None
        if num_persistent:
            heads = {HEAD_SPLIT: num_heads - self.context_heads, SINGLE_HEAD: 1}
            width = embed_dim if variant == SINGLE_HEAD else self.head_dim
            self.persistent = PersistentVectors(
                num_persistent, heads.get(variant, num_heads), width, kernel
            )

    def project_positions(
        self, encoding: Tensor | Clamped, groups: HeadGroups | None = None
    ) -> SpannedPositions:
        """Return what the scores depend on, given an encoding of distances that fall to -1.

        ``groups`` are the heads by their present spans; None reads the spans here.
        """
        rel_keys = super().project_positions(encoding)
        if self.span is None:
            return SpannedPositions(rel_keys, ALL_HEADS, (None,))
        if groups is None:
            if torch.compiler.is_compiling():
                groups = HeadGroups((HeadGroup(None, self.span.max_span, 0),), None)
            else:
                (groups,) = read_head_groups([self.span])
        return SpannedPositions(rel_keys, groups, tuple(map(self.span.log_mask, groups.groups)))

    def position_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that :meth:`project_positions` depends on."""
        spans = [] if self.span is None else list(self.span.parameters())
        return [*super().position_parameters(), *spans]

    @property
    def joint(self) -> bool:
        """Whether persistent vectors and context share one softmax."""
        return self.persistent is not None and self.variant == JOINT

    def max_past(self, positions: SpannedPositions) -> int:
        """Return how many tokens before a segment attention can use."""
        return positions.groups.width + (0 if self.span is None else SPAN_MARGIN)

    def forward(
        self, x: Tensor, positions: SpannedPositions, past: LayerState | None = None
    ) -> tuple[Tensor, GroupedCaches | None]:
        """Attend from each token of the segment, as :meth:`.RelativeAttention.forward` does."""
        self.check_segment(x, past)
        query, _ = self.project_queries(x)
        twice = self.span is not None and self.span.epsilon > 0
        attended, lse, unmasked_lse, caches = self._attend_to_context(
            query[: self.context_heads], x, positions, past, self.joint or twice, twice
        )
        if self.joint:
            of_persistent, persistent_lse = self._attend_to_persistent(query, return_lse=True)
            if self.persistent_shares is not None:
                # (H, B, T) -> (B, T)
                share = torch.sigmoid(persistent_lse.detach() - lse.detach()).mean(0)  # type: ignore[union-attr]
                self.persistent_shares.append(share)
            attended = merge_attentions(attended, lse, of_persistent, persistent_lse)
            if twice:
                lse = torch.logaddexp(lse, persistent_lse)
                unmasked_lse = torch.logaddexp(unmasked_lse, persistent_lse)
        if self.span is not None and twice:
            remainder = self.span.remainder(lse, unmasked_lse)
            attended = attended * remainder.unsqueeze(-1).to(attended.dtype)
        if self.persistent is not None and not self.joint:
            attended = self._add_persistent(attended, query)
        return self.out_proj(merge_heads(attended)), caches

    def _attend_to_persistent(
        self, query: Tensor, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        return self.persistent.attend(query, dropout, return_lse)  # type: ignore[union-attr]

    def _add_persistent(self, attended: Tensor, query: Tensor) -> Tensor:
        """Add persistent vectors' own attention to (H, B, T, d_h), or append its heads."""
        if self.variant == SINGLE_HEAD:
            # (H, B, T, d_h) -> (1, B, T, d), divided by √d instead of √d_h
            wide = merge_heads(query) / math.sqrt(self.num_heads)
            of_persistent, _ = self._attend_to_persistent(wide.unsqueeze(0))
            return attended + split_heads(of_persistent.squeeze(0), self.head_dim)
        if self.variant == HEAD_SPLIT:
            of_persistent, _ = self._attend_to_persistent(query[self.context_heads :])
            return torch.cat([attended, of_persistent])
        return attended + self._attend_to_persistent(query)[0]

    def _attend_to_context(
        self,
        query: Tensor,
        x: Tensor,
        positions: SpannedPositions,
        past: LayerState | None,
        return_lse: bool,
        return_unmasked_lse: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, GroupedCaches | None]:
        """Let each group of heads attend to the earlier tokens and segment within its span.

        Returns values (H, B, T, d_h), the log-sum-exp (H, B, T) of the scores with and without the
        mask of learned spans, and the caches.
        """
        attended, lses = [], []
        caches: list[KeyValueCache] = []
        for number, group in enumerate(positions.groups.groups):
            own_past = past.groups[number] if isinstance(past, GroupedCaches) else past
            keys, values, cache = self.project_keys(x, own_past, group.width, group)
            farthest = min(group.width, self.window.farthest)
            log_mask = positions.log_masks[number]
            if log_mask is not None:
                # no mask for distances that the window hides
                log_mask = log_mask[:, group.width - farthest :]
            seen = keys, values, positions.rel_keys, Window(self.window.nearest, farthest)
            out, lse = self.attend(
                group.of(query), *seen, distance_bias=log_mask, return_lse=return_lse
            )
            attended.append(out)
            lses.append(lse)
            if cache is not None:
                caches.append(cache)
        joined = GroupedCaches(tuple(caches)) if caches else None
        if return_unmasked_lse:
            # with epsilon there is one group, of all heads; dropout does not change this sum
            unmasked_lse = choose_kernel(self.kernel)(query, *seen, return_lse=True)[1]
            return attended[0], lses[0], unmasked_lse, joined
        order = positions.groups.order
        if order is None:
            return attended[0], lses[0], None, joined
        return (
            torch.cat(attended).index_select(0, order),
            torch.cat(lses).index_select(0, order) if return_lse else None,
            None,
            joined,
        )

    def project_heads(self, projection: nn.Linear, x: Tensor, heads: HeadGroup) -> Tensor:
        """Map (B, T, d) to keys or values (H_g, B, T, d_h) of a group of heads."""
        weight = projection.weight
        if heads.heads is not None or self.context_heads < self.num_heads:
            # with head-split some rows stay unused; the paper counts them as parameters, too
            # (d, d) -> (H, d_h, d) -> (H_g·d_h, d)
            of_heads = weight.unflatten(0, (self.num_heads, -1))[: self.context_heads]
            weight = heads.of(of_heads).flatten(0, 1)
        return split_heads(F.linear(x, weight), self.head_dim)


class AllAttentionBlock(SegmentLayer):
    """One softmax over persistent vectors and up to ``span`` tokens before each token (section 4).

    Each head learns its span. In the published models all blocks share one ``positions``.
    ``dropout`` acts on attention weights and on the attention's output.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        persistent_vectors: int,
        span: int,
        dropout: float = 0.0,
    ) -> None:
        attention = AllAttention(
            embed_dim,
            num_heads,
            Window(1, span),
            SharedRelativeKeys(),
            dropout,
            num_persistent=persistent_vectors,
            span=AdaptiveSpan(num_heads, span),
        )
        super().__init__(embed_dim, attention, None, nn.Dropout(dropout))
        self.positions = LearnedRelativePositions(span, embed_dim // num_heads)
        self.span = span

    def forward(self, x: Tensor, memory: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """Map a segment (B, T, d) to (B, T, d), and return the memory for the next one."""
        encoding = self.positions(x.size(1) + self.span - 1, x.device)
        y, memory = super().forward(x, self.self_attn.project_positions(encoding), memory)
        return y, memory.last(self.span)
