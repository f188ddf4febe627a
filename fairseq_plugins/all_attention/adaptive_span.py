"""Attention spans that each head learns (all-attention, section 4.3; arXiv:1905.07799).

A soft mask, m_z(x) = clamp((R + z - x) / R, 0, 1), multiplies the attention weight of the key at
distance x, counted from 0 for the nearest key; z is the head's span, R the length of the ramp. Work
and past really shrink: heads with similar spans are computed together, over the keys that they see.

The published code masks the weights a of a softmax over all keys, and divides by their sum plus
``epsilon``, 1e-8: a·m / (Σ a·m + ε). It matters where hidden keys had nearly all the weight.

Shapes: B streams, H heads, H_g heads of a group, T tokens of a segment, W distances on the ramp,
d_h head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_plugins.precision import Float32Module
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED
from fairseq_plugins.sizes import check_sizes

# The cost of one more group of heads, in keys of one head: its products are smaller and separate.
GROUP_COST = 256
# The published code leaves this many keys beyond the longest span out of its softmax at a time.
_LEFT_OUT_AT_ONCE = 64


class HeadGroup(NamedTuple):
    """The ``heads`` (H_g,), from 0, that are computed together; None for all heads in order.

    They see up to ``width`` tokens, ramp included; for the nearest ``unmasked`` all have m = 1.
    """

    heads: Tensor | None
    width: int
    unmasked: int

    def select(self, per_head: Tensor) -> Tensor:
        """Return this group's entries, (H_g, …), of those of all heads, (H, …)."""
        return per_head if self.heads is None else per_head.index_select(0, self.heads)


class HeadGroups(NamedTuple):
    """All heads of a layer in groups; ``order`` (H,) is each head's place in the joined groups."""

    groups: tuple[HeadGroup, ...]
    order: Tensor | None


# heads with a fixed span, which the window limits
ALL_HEADS = HeadGroups((HeadGroup(None, UNLIMITED, UNLIMITED),), None)


class AdaptiveSpan(Float32Module):
    """The learned spans of a layer's heads.

    ``value`` (H,), in [0, 1], is each head's z / ``max_span``. It stays in single precision, as
    bfloat16 could not tell 4,000 tokens from 4,016. ``ramp`` is R.
    """

    def __init__(
        self,
        num_heads: int,
        max_span: int,
        ramp: int = 32,
        initial: float = 0.0,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(1, span=max_span, ramp=ramp)
        self.max_span = max_span
        self.ramp = ramp
        self.epsilon = epsilon
        self.value = nn.Parameter(torch.full((num_heads,), float(initial)))

    def tokens(self) -> Tensor:
        """Return how many tokens each head sees, ramp included, (H,), detached."""
        return (self.value.detach() * self.max_span + self.ramp).clamp(max=self.max_span)

    def penalty(self) -> Tensor:
        """Return the mean span of the heads in tokens, without the ramp."""
        return self.max_span * self.value.mean()

    def log_mask(self, group: HeadGroup) -> Tensor:
        """Return log m for the distances ``group.width`` to ``group.unmasked + 1``, (H_g, W)."""
        # negative spans, which training must clamp, see as little as 0
        value = group.select(self.value).clamp(min=0)
        # x is 0 for the nearest key, at distance 1
        x = torch.arange(group.width - 1, group.unmasked - 1, -1, device=value.device)
        mask = ((self.ramp + self.max_span * value.unsqueeze(1) - x) / self.ramp).clamp(0, 1)
        seen = mask > 0
        # log(1) where m = 0: the infinite gradient of log(0) would get through torch.where
        return torch.where(seen, torch.where(seen, mask, 1).log(), -torch.inf)

    def constrained(self) -> Iterable[tuple[nn.Parameter, Callable[[Tensor], None]]]:
        """Return the spans with the function that keeps them, and optimizers' copies, in [0, 1]."""
        return [(self.value, _to_unit_interval)]

    def _load_from_state_dict(self, *args: object) -> None:
        super()._load_from_state_dict(*args)
        _to_unit_interval(self.value.data)


def _to_unit_interval(spans: Tensor) -> None:
    spans.clamp_(0, 1)


def whole_span(span: AdaptiveSpan) -> HeadGroups:
    """Group all heads of a layer, which then computes the largest span, and masks the rest."""
    return HeadGroups((HeadGroup(None, span.max_span, 0),), None)


def read_head_groups(spans: list[AdaptiveSpan]) -> list[HeadGroups]:
    """Group each layer's heads by similar spans."""
    # one read and one write for all layers: on a GPU each makes the host wait
    values = torch.stack([span.value.detach() for span in spans])
    if hasattr(values, "full_tensor"):
        values = values.full_tensor()  # FSDP gathers a layer's parameters only when it runs
    layers = [_plan_groups(span, row) for span, row in zip(spans, values.tolist(), strict=True)]
    heads = [[head for part, _, _ in groups for head in part] for groups in layers]
    flat = [row + sorted(range(len(row)), key=row.__getitem__) for row in heads]
    numbers = torch.tensor(flat).to(values.device)  # (layers, 2 H)
    return [
        HeadGroups((HeadGroup(None, *groups[0][1:]),), None)
        if len(groups) == 1
        else HeadGroups(tuple(_as_tensors(groups, row)), row[len(row) // 2 :])
        for groups, row in zip(layers, numbers, strict=True)
    ]


def _as_tensors(groups: list[tuple[list[int], int, int]], row: Tensor) -> Iterator[HeadGroup]:
    """Take the heads of each group from ``row`` (2 H,), where they stand one after another."""
    first = 0
    for heads, width, unmasked in groups:
        yield HeadGroup(row[first : first + len(heads)], width, unmasked)
        first += len(heads)


def _plan_groups(span: AdaptiveSpan, values: list[float]) -> list[tuple[list[int], int, int]]:
    """Return each group's heads, width and number of tokens that all its heads see unmasked."""
    z = [span.max_span * min(1.0, max(0.0, value)) for value in values]
    widths = [min(span.max_span, math.ceil(tokens + span.ramp)) for tokens in z]
    if span.epsilon:
        left_out = (span.max_span - max(widths)) // _LEFT_OUT_AT_ONCE * _LEFT_OUT_AT_ONCE
        width = span.max_span - left_out
        return [(list(range(len(z))), width, min(width, math.ceil(min(z))))]
    rising = sorted(range(len(z)), key=widths.__getitem__)
    groups = []
    for first, last in cheapest_parts([widths[head] for head in rising]):
        heads = rising[first:last]
        width = widths[heads[-1]]
        groups.append((heads, width, min(width, math.ceil(min(z[head] for head in heads)))))
    return groups


def cheapest_parts(widths: list[int]) -> list[tuple[int, int]]:
    """Split rising ``widths`` into the cheapest groups; return the (first, end) of each."""
    # costs[n] and starts[n]: the least cost of the first n heads, and where their last group starts
    costs, starts = [0], [0]
    for last in range(1, len(widths) + 1):
        cost, start = min(
            (costs[first] + (last - first) * widths[last - 1] + GROUP_COST, first)
            for first in range(last)
        )
        costs.append(cost)
        starts.append(start)
    parts: list[tuple[int, int]] = []
    last = len(widths)
    while last > 0:
        parts.insert(0, (starts[last], last))
        last = starts[last]
    return parts
