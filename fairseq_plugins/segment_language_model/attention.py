"""Multi-head attention by content and by distance, with persistent vectors and learned spans.

Transformer-XL, section 3.3; all-attention, sections 3, 4 and 5.3. Shapes: B streams, H heads, T
tokens of the segment, M tokens of the memory, S = M + T, D distances, N persistent vectors, d model
width, d_h = d / H.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan, HeadGroup, HeadGroups
from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors, joint_softmax
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED, Window
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from fairseq_plugins.segment_language_model.key_value_cache import (
    HiddenStates,
    KeyValueCache,
    LayerState,
    join_caches,
)

# How persistent vectors take part (all-attention, section 5.3, figure 2); the paper's fifth way,
# ff-attn, is a sublayer of its own.
JOINT = "all"
SPLIT = "attn-split"
HEAD_SPLIT = "head-split"
SINGLE_HEAD = "single-head"

# Training remembers so many tokens more than the widest head sees: it may see farther after the
# next updates.
SPAN_MARGIN = 64

_ALL_HEADS = HeadGroups((HeadGroup(None, UNLIMITED, UNLIMITED),), None)


class PositionBiases(nn.Module):
    """The vectors u and v of Transformer-XL (section 3.3, terms c and d), a pair for each head.

    Args:
        num_heads: H.
        head_dim: d_h.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.v = nn.Parameter(torch.zeros(num_heads, head_dim))


class DistanceTerms(NamedTuple):
    """What the scores of a layer take from distances alone, the same for all its tokens.

    Args:
        table: vectors of the distances S - 1, or more, down to -1, (G, D, d_h), G being 1 or H;
            None for none.
        groups: heads that are computed together, with how far they see.
        log_masks: of each group, :meth:`AdaptiveSpan.log_mask`; None for fixed spans.
    """

    table: Tensor | None
    groups: HeadGroups = _ALL_HEADS
    log_masks: tuple[Tensor | None, ...] = (None,)


class Totals(NamedTuple):
    """log Σ exp(score) of the keys of each query, (H, B, T), -∞ for none.

    Args:
        seen: with the mask of learned spans; None where nobody asks.
        unmasked: without it; None where spans have no epsilon.
    """

    seen: Tensor | None
    unmasked: Tensor | None = None


class RelativeAttention(nn.Module):
    """Multi-head attention over a window of earlier tokens and over persistent vectors.

    The score of query i for key j at distance i - j is ``(q_i + u)·k_j + (q_i + v)·p_{i-j}``, for a
    persistent vector ``(q_i + u)·m_k``, each divided by √d_h; one softmax goes over all of them
    (all-attention, equation 13). With p = W_kR R it is Transformer-XL's (section 3.3), without u
    and v that of Shaw et al. 2018 and of all-attention (equation 3). Projections have no biases. A
    query that sees nothing at all gets zero.

    Args:
        embed_dim: d.
        num_heads: H; must divide d.
        window: the distances that a query sees.
        distance_table: maps the encoding of the distances to p, (G, D, d_h), G being 1 or H; None
            for scores that do not depend on the distance.
        biases: u and v, which several layers may share; None for none.
        dropout: probability of dropping an attention weight.
        num_persistent: N, 0 for none.
        variant: how persistent vectors take part: in one softmax with the context ("all"), in one
            of their own ("attn-split"), as all that the latter half of the heads see, which then
            see no context ("head-split"), or in a softmax of their own with one head of width d
            ("single-head").
        span: learned spans of the heads that see the context; None where all see the window.

    Raises:
        ValueError: the window is empty.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        distance_table: nn.Module | None = None,
        biases: PositionBiases | None = None,
        dropout: float = 0.0,
        num_persistent: int = 0,
        variant: str = JOINT,
        span: AdaptiveSpan | None = None,
    ) -> None:
        super().__init__()
        if window.farthest < window.nearest:
            raise ValueError(f"the window {window} is empty: nothing would be left to attend to")
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.context_heads = num_heads // 2 if variant == HEAD_SPLIT else num_heads
        self.window = window
        self.distance_table = distance_table
        self.biases = biases
        self.dropout = dropout
        self.variant = variant
        self.span = span
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        # head-split keeps the rows of heads that see no context, as the paper's counts do
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.persistent = None
        if num_persistent:
            heads = {HEAD_SPLIT: num_heads - self.context_heads, SINGLE_HEAD: 1}
            of_persistent = heads.get(variant, num_heads)
            width = embed_dim if variant == SINGLE_HEAD else self.head_dim
            self.persistent = PersistentVectors(num_persistent, of_persistent, width)

    def distance_terms(self, encoding: Tensor | None, groups: HeadGroups | None) -> DistanceTerms:
        """Return what the scores take from distances, given their encoding and the spans now."""
        table = None if self.distance_table is None else self.distance_table(encoding)
        if groups is None:
            return DistanceTerms(table)
        return DistanceTerms(
            table, groups, tuple(self.span.log_mask(group) for group in groups.groups)
        )

    def forward(
        self, x: Tensor, terms: DistanceTerms, memory: LayerState | None = None
    ) -> tuple[Tensor, LayerState]:
        """Attend from each token of the segment.

        Args:
            x: the segment, (B, T, d).
            terms: what :meth:`distance_terms` returned.
            memory: this layer's state of the M tokens before.

        Returns:
            the attended values (B, T, d), and the state of memory and segment together.
        """
        query = self.q_proj(x)
        if self.biases is None:
            content_query, position_query = self._scaled(query), None
        else:
            content_query = self._scaled(query + self.biases.u.flatten().to(query.dtype))
            position_query = self._scaled(query + self.biases.v.flatten().to(query.dtype))
        attended, totals, state = self._attend_to_context(
            content_query[: self.context_heads],
            None if position_query is None else position_query[: self.context_heads],
            x,
            terms,
            memory,
        )
        if self.persistent is not None and self.variant == JOINT:
            attended, totals = self._join_persistent(attended, totals, content_query)
        if totals.unmasked is not None:
            remainder = self.span.remainder(totals.seen, totals.unmasked)
            attended = attended * remainder.unsqueeze(-1).to(attended.dtype)
        if self.persistent is not None and self.variant != JOINT:
            attended = self._add_persistent(attended, content_query)
        # (H, B, T, d_h) -> (B, T, H, d_h) -> (B, T, d)
        return self.out_proj(attended.permute(1, 2, 0, 3).flatten(2)), state

    def _join_persistent(
        self, attended: Tensor, totals: Totals, query: Tensor
    ) -> tuple[Tensor, Totals]:
        """Bring persistent vectors into the softmax of (H, B, T, d_h), and into its totals."""
        dropout = self.dropout if self.training else 0.0
        of_persistent, of_total = self.persistent.attend(query, dropout, with_total=True)
        joint = joint_softmax(attended, totals.seen, of_persistent, of_total)
        if totals.unmasked is None:
            return joint, totals
        return joint, Totals(*(torch.logaddexp(total, of_total) for total in totals))

    def _add_persistent(self, attended: Tensor, query: Tensor) -> Tensor:
        """Put persistent vectors with a softmax of their own beside (H, B, T, d_h)."""
        dropout = self.dropout if self.training else 0.0
        if self.variant == SINGLE_HEAD:
            # (H, B, T, d_h) -> (1, B, T, d): one head's √d in place of √d_h
            wide = query.permute(1, 2, 0, 3).flatten(2) / math.sqrt(self.num_heads)
            of_persistent, _ = self.persistent.attend(wide.unsqueeze(0), dropout)
            return attended + self._split_heads(of_persistent.squeeze(0))
        own = query[self.context_heads :] if self.variant == HEAD_SPLIT else query
        of_persistent, _ = self.persistent.attend(own, dropout)
        if self.variant == HEAD_SPLIT:
            return torch.cat([attended, of_persistent])
        return attended + of_persistent

    def _attend_to_context(
        self,
        content_query: Tensor,
        position_query: Tensor | None,
        x: Tensor,
        terms: DistanceTerms,
        memory: LayerState | None,
    ) -> tuple[Tensor, Totals, LayerState]:
        """Attend from (H, B, T, d_h) to memory and segment, each group of heads to what it sees.

        Returns (H, B, T, d_h), the totals, and the state of memory and segment.
        """
        twice = self.span is not None and self.span.epsilon > 0
        with_total = twice or (self.persistent is not None and self.variant == JOINT)
        hidden = memory if isinstance(memory, HiddenStates) else None
        attended, totals, caches = [], [], []
        for number, group in enumerate(terms.groups.groups):
            if memory is None or hidden is not None:
                projected = self._keys_and_values(x, group, hidden)
                cache = KeyValueCache.of(*(p.contiguous() for p in projected), group.reach)
            else:
                cache = memory.groups[number].extended(*self._keys_and_values(x, group))
            farthest = min(group.reach, self.window.farthest)
            log_mask, table = terms.log_masks[number], terms.table
            if table is not None and table.size(0) > 1:
                table = _of_group(table[: self.context_heads], group)
            attend = functools.partial(
                window_attention,
                _of_group(content_query, group),
                cache.keys,
                cache.values,
                table,
                Window(self.window.nearest, farthest),
                position_query=None if position_query is None else _of_group(position_query, group),
            )
            out, total = attend(
                dropout=self.dropout if self.training else 0.0,
                # what the window hides needs no mask
                log_mask=log_mask if log_mask is None else log_mask[:, group.reach - farthest :],
                with_total=with_total,
            )
            attended.append(out)
            totals.append(total)
            caches.append(cache)
        state = join_caches(caches)
        if torch.is_grad_enabled() and (memory is None or hidden is not None):
            reach = terms.groups.reach + (0 if self.span is None else SPAN_MARGIN)
            context = x if hidden is None else torch.cat([hidden.hidden, x], dim=1)
            state = HiddenStates(context, reach)
        if twice:
            # one group of all heads
            return attended[0], Totals(totals[0], attend(with_total=True)[1]), state
        order = terms.groups.order
        if order is None:
            return attended[0], Totals(totals[0]), state
        return (
            torch.cat(attended).index_select(0, order),
            Totals(torch.cat(totals).index_select(0, order) if with_total else None),
            state,
        )

    def _keys_and_values(
        self, x: Tensor, group: HeadGroup, memory: HiddenStates | None = None
    ) -> list[Tensor]:
        """Project what a group of heads sees: keys and values, each (H_g, B, S_g, d_h)."""
        projected = [
            self._project(projection, x, group) for projection in (self.k_proj, self.v_proj)
        ]
        if memory is None:
            return projected
        # projected apart: the gradient of the memory itself, which nobody wants, costs as much
        seen = memory.hidden[:, max(0, memory.length - group.reach) :]
        return [
            torch.cat([self._project(projection, seen, group), own], dim=2)
            for projection, own in zip((self.k_proj, self.v_proj), projected, strict=True)
        ]

    def _project(self, projection: nn.Linear, x: Tensor, group: HeadGroup) -> Tensor:
        weight = projection.weight
        if group.heads is not None or self.context_heads < self.num_heads:
            # (d, d) -> (H, d_h, d) -> (H_g·d_h, d)
            of_heads = weight.unflatten(0, (self.num_heads, -1))[: self.context_heads]
            weight = _of_group(of_heads, group).flatten(0, 1)
        return self._split_heads(F.linear(x, weight))

    def _scaled(self, query: Tensor) -> Tensor:
        # (B, T, d) -> (H, B, T, d_h)
        return self._split_heads(query / math.sqrt(self.head_dim)).contiguous()

    def _split_heads(self, x: Tensor) -> Tensor:
        # (B, T, H·d_h) -> (B, T, H, d_h) -> (H, B, T, d_h)
        return x.unflatten(-1, (-1, self.head_dim)).permute(2, 0, 1, 3)


def _of_group(per_head: Tensor, group: HeadGroup) -> Tensor:
    """Return the entries (H_g, …) of a group of heads from those of all, (H, …)."""
    return per_head if group.heads is None else per_head.index_select(0, group.heads)
