"""All-attention: one softmax over earlier tokens and persistent vectors, with learned spans.

Sukhbaatar et al. 2019 (arXiv:1907.01470), sections 3, 4 and 5.3. Shapes: B streams, H heads, H_g
heads of a group, T tokens of the segment, S tokens of past and segment, D distances, W distances on
the ramp of a span, N persistent vectors, d model width, d_h = d / H.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import (
    ALL_HEADS,
    AdaptiveSpan,
    HeadGroup,
    HeadGroups,
)
from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors
from fairseq_plugins.segment_language_model.attention import (
    check_past,
    choose_kernel,
    extend_keys_and_values,
    is_inference,
    merge_heads,
    scaled_heads,
    split_heads,
)
from fairseq_plugins.segment_language_model.attention_blocks import Clamped, Window, map_rows
from fairseq_plugins.segment_language_model.past import HiddenStates, KeyValues, LayerPast
from fairseq_plugins.sizes import check_heads

logger = logging.getLogger(__name__)

# How attention uses persistent vectors (section 5.3, figure 2). The paper's fifth variant, ff-attn,
# is a separate sublayer.
JOINT = "all"
SPLIT = "attn-split"
HEAD_SPLIT = "head-split"
SINGLE_HEAD = "single-head"
IN_ATTENTION = (JOINT, SPLIT, HEAD_SPLIT, SINGLE_HEAD)


class SpannedPositions(NamedTuple):
    """All that a layer's scores depend on, besides the tokens.

    ``rel_keys`` are p for the distances S - 1 (or more) down to -1, (1, D, d_h), or clamped; each
    group of heads has a :meth:`.AdaptiveSpan.log_mask`, or None.
    """

    rel_keys: Tensor | Clamped
    groups: HeadGroups
    log_masks: tuple[Tensor | None, ...]

    @property
    def biases(self) -> None:
        """Return u and v, which only Transformer-XL has."""


@dataclass(frozen=True, eq=False)
class GroupedKeyValues:
    """Keys and values of a layer whose heads have different spans: a past for each group."""

    groups: tuple[KeyValues, ...]

    @property
    def length(self) -> int:
        """Return S of the group that keeps the most tokens."""
        return max(group.length for group in self.groups)

    @property
    def streams(self) -> int:
        """Return B."""
        return self.groups[0].streams

    def last(self, length: int) -> GroupedKeyValues:
        """Return the last ``length`` tokens of each group."""
        return GroupedKeyValues(tuple(group.last(length) for group in self.groups))

    def select(self, order: Tensor) -> GroupedKeyValues:
        """Return stream ``order[i]`` as stream i."""
        return GroupedKeyValues(tuple(group.select(order) for group in self.groups))

    def whole(self) -> GroupedKeyValues:
        """Return views of the same tokens, from 0 on."""
        return GroupedKeyValues(tuple(group.whole() for group in self.groups))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> GroupedKeyValues:
        """Return the past with the function's result for each tensor."""
        return GroupedKeyValues(tuple(group.map_tensors(function) for group in self.groups))


# for torch.load(weights_only=True) of a past
torch.serialization.add_safe_globals([GroupedKeyValues, SpannedPositions, HeadGroups, HeadGroup])


class HeadProjection(nn.Module):
    """A linear map to the keys or values of some heads.

    It is not an ``nn.Linear``, because each call uses the rows of ``weight`` (d, d) that belong to
    the heads it is asked for; to adapt it, replace or hook this module.
    """

    def __init__(self, embed_dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
        nn.init.kaiming_uniform_(self.weight, math.sqrt(5))  # as nn.Linear

    def forward(self, x: Tensor, group: HeadGroup, num_heads: int) -> Tensor:
        """Map (B, T, d) to (H_g, B, T, d_h), for a group of the first ``num_heads`` heads."""
        weight = self.weight
        if group.heads is not None or num_heads * self.head_dim < len(weight):
            # (d, d) -> (H, d_h, d) -> (H_g·d_h, d)
            weight = weight.unflatten(0, (-1, self.head_dim))[:num_heads]
            weight = group.select(weight).flatten(0, 1)
        return split_heads(F.linear(x, weight), self.head_dim)


class AllAttention(nn.Module):
    """Attention to earlier tokens and to persistent vectors, with a span for each head.

    The score of query i is ``q_i·k_j + q_i·p_{i-j}`` for key j (equation 3) and ``q_i·m_k`` for a
    persistent vector, divided by √d_h; one softmax covers them all (equation 13).

    Args:
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
        dropout: float = 0.0,
        num_persistent: int = 0,
        variant: str = JOINT,
        span: AdaptiveSpan | None = None,
        kernel: str = "fast",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        choose_kernel(kernel)
        if variant not in IN_ATTENTION:
            raise ValueError(f"`variant` is {variant!r}: there are {', '.join(IN_ATTENTION)}")
        if variant == HEAD_SPLIT and num_heads % 2:
            raise ValueError(
                f"`num_heads` is {num_heads}: half of them see the context, give an even number"
            )
        self.head_dim = embed_dim // num_heads
        self.window = window
        self.dropout = dropout
        self.kernel = kernel
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = HeadProjection(embed_dim, self.head_dim)
        self.v_proj = HeadProjection(embed_dim, self.head_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        # with head-split some rows of k_proj and v_proj stay unused; the paper counts them, too
        self.context_heads = num_heads // 2 if variant == HEAD_SPLIT else num_heads
        self.variant = variant
        self.span = span
        self.persistent = None
        if num_persistent:
            heads = {HEAD_SPLIT: num_heads - self.context_heads, SINGLE_HEAD: 1}
            width = embed_dim if variant == SINGLE_HEAD else self.head_dim
            self.persistent = PersistentVectors(
                num_persistent, heads.get(variant, num_heads), width, kernel
            )

    def project_positions(
        self, encoding: Tensor | Clamped, groups: HeadGroups = ALL_HEADS
    ) -> SpannedPositions:
        """Return what the scores depend on, given p for distances that fall to -1, (D, d_h).

        ``groups`` are the heads by their spans. All heads and layers share p (section 4.3).
        """
        rel_keys = map_rows(lambda rows: rows.unsqueeze(0), encoding)
        if self.span is None:
            return SpannedPositions(rel_keys, groups, (None,))
        # no mask for distances that the window hides
        hidden = [max(0, group.width - self.window.farthest) for group in groups.groups]
        masks = map(self.span.log_mask, groups.groups)
        log_masks = tuple(mask[:, far:] for mask, far in zip(masks, hidden, strict=True))
        return SpannedPositions(rel_keys, groups, log_masks)

    def max_past(self, positions: SpannedPositions, length: int) -> int:
        """Return how many tokens before the next segment attention can use, after one of T."""
        # spans grow, with Adam by about its learning rate; the segment is in memory anyway
        margin = 0 if self.span is None else max(length, self.span.max_span // 50)
        return max(group.width for group in positions.groups.groups) + margin

    def forward(
        self, x: Tensor, positions: SpannedPositions, past: LayerPast | None = None
    ) -> tuple[Tensor, GroupedKeyValues | None]:
        """Attend from each token of the segment ``x`` (B, T, d).

        ``positions`` come from :meth:`project_positions` and reach at least to the first key.
        Returns (B, T, d); and, in inference, the keys and values of past and segment, else None.
        """
        check_past(x, past)
        if isinstance(past, HiddenStates) and past.shortened:
            width = max(group.width for group in positions.groups.groups)
            if past.length < width:
                logger.warning(
                    "an attention span grew to %d tokens at once, and the past has only %d of "
                    "them: this segment sees less; let spans learn slower",
                    *(width, past.length),
                )
        query = scaled_heads(self.q_proj(x), self.head_dim)
        joint = self.persistent() if self.persistent is not None and self.variant == JOINT else None
        attended, keys_and_values = self._attend_to_context(
            query[: self.context_heads], x, positions, past, joint
        )
        if self.persistent is not None and joint is None:
            attended = self._add_persistent(self.persistent, attended, query)
        return self.out_proj(merge_heads(attended)), keys_and_values

    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    def _add_persistent(
        self, persistent: PersistentVectors, attended: Tensor, query: Tensor
    ) -> Tensor:
        """Add persistent vectors' own attention to (H, B, T, d_h), or append its heads."""
        if self.variant == SINGLE_HEAD:
            # one head of width d: (H, B, T, d_h) -> (1, B, T, d), divided by √d
            wide = merge_heads(query) / math.sqrt(query.size(0))
            by_vectors = persistent.attend(wide.unsqueeze(0), self._rate())
            return attended + split_heads(by_vectors.squeeze(0), self.head_dim)
        if self.variant == HEAD_SPLIT:
            by_vectors = persistent.attend(query[self.context_heads :], self._rate())
            return torch.cat([attended, by_vectors])
        return attended + persistent.attend(query, self._rate())

    def _attend_to_context(
        self,
        query: Tensor,
        x: Tensor,
        positions: SpannedPositions,
        past: LayerPast | None,
        persistent: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, GroupedKeyValues | None]:
        """Let each group of heads attend to the tokens of past and segment within its span.

        ``persistent`` are further keys and values, each (H, N, d_h). Returns (H, B, T, d_h), and
        the past.
        """
        groups, order = positions.groups
        pasts: Any = [past] * len(groups)
        if isinstance(past, GroupedKeyValues):
            pasts = past.groups
        attend, attended, extended = choose_kernel(self.kernel, x.device), [], []
        for group, log_mask, group_past in zip(groups, positions.log_masks, pasts, strict=True):
            keys, values, keys_and_values = extend_keys_and_values(
                functools.partial(self._project, group=group),
                x,
                group_past,
                is_inference(self),
                group.width,
            )
            group_attended = attend(
                group.select(query),
                keys,
                values,
                positions.rel_keys,
                Window(self.window.nearest, min(group.width, self.window.farthest)),
                self._rate(),
                distance_bias=log_mask,
                persistent=None if persistent is None else tuple(map(group.select, persistent)),
                epsilon=0.0 if self.span is None else self.span.epsilon,
            )
            attended.append(group_attended)
            if keys_and_values is not None:
                extended.append(keys_and_values.last(group.width))
        joined = attended[0] if order is None else torch.cat(attended).index_select(0, order)
        return joined, GroupedKeyValues(tuple(extended)) if extended else None

    def _project(self, tokens: Tensor, group: HeadGroup) -> tuple[Tensor, Tensor]:
        """Map (B, T, d) to keys and values of the group's heads, each (H_g, B, T, d_h)."""
        keys = self.k_proj(tokens, group, self.context_heads)
        return keys, self.v_proj(tokens, group, self.context_heads)
