"""Attention by content and by distance: the equations, and the module of Transformer-XL.

Transformer-XL, section 3.3 and appendix B; all-attention, section 3.

Shapes: B streams, H heads, T tokens of the segment (queries), S keys (past and segment), D
distances, F distances beyond a clamp, G sets of relative keys (1 for all heads, or H), W distances
with a bias, N persistent vectors, d model width, d_h = d / H.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.precision import without_autocast
from fairseq_plugins.segment_language_model.attention_blocks import (
    EVERY_KEY,
    UNLIMITED,
    Clamped,
    Window,
    hidden_by_window,
    map_rows,
    rel_shift,
    rows_by_distance,
)
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from fairseq_plugins.segment_language_model.past import HiddenStates, KeyValues
from fairseq_plugins.sizes import check_heads


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rel_keys: Tensor | Clamped | None,
    window: Window,
    dropout: float = 0.0,
    position_query: Tensor | None = None,
    distance_bias: Tensor | None = None,
    persistent: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 0.0,
    fused: bool = False,
) -> Tensor:
    """Attend from each query to the keys in its window, in differentiable operations.

    The score of query t for the key at distance x is ``c_t·k_{t-x} + q_t·p_x + bias_x``, where c
    is the projected query plus u, and q the projected query plus v (section 3.3); for a persistent
    key m it is ``c_t·m``. One softmax covers them all (all-attention, equation 13).

    Args:
        query: c, (H, B, T, d_h), divided by √d_h.
        keys: (H, B, S, d_h); the last T belong to the queries' own tokens.
        values: (H, B, S, d_h).
        rel_keys: p for the distances S - 1 (or more) down to -1, (G, D, d_h), or
            :class:`Clamped`; None for scores by content alone.
        window: the distances that a query sees.
        dropout: the probability of dropping a weight.
        position_query: q, shaped like ``query``; None if it equals c.
        distance_bias: (H, W), -∞ allowed, for the distances from ``window.farthest`` down; needs
            ``rel_keys``.
        persistent: further keys and values that every query sees, each (H, N, d_h).
        epsilon: ε, added to the sum of exp(score), relative to that sum without ``distance_bias``
            (the published code of adaptive spans).
        fused: use PyTorch's attention, with the scores by distance as its bias, which stores no
            weights for the gradient; ignored with ``epsilon``, which needs the weights' sums.

    Returns (H, B, T, d_h), zero for a query that sees nothing.
    """
    num_persistent = 0 if persistent is None else persistent[0].size(1)
    relative = query, keys, rel_keys, window, position_query, num_persistent
    # the first tokens of a stream may see nothing
    num_empty = window.nearest - (keys.size(2) - query.size(2)) if persistent is None else 0
    with without_autocast(query):
        bias = _score_bias(*relative, distance_bias)
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        if persistent is not None:
            # streams share the vectors: (H, N, d_h) -> (H, B, N, d_h)
            vectors = (x.unsqueeze(1).expand(-1, keys.size(1), -1, -1) for x in persistent)
            more_keys, more_values = (x.to(query.dtype) for x in vectors)
            keys, values = torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2)
        if fused and not epsilon:
            attended = F.scaled_dot_product_attention(query, keys, values, bias, dropout, scale=1.0)
        else:
            # (H, B, T, d_h) x (H, B, d_h, S + N) -> (H, B, T, S + N)
            products = query @ keys.mT
            scores = products if bias is None else products + bias
            weights = scores.softmax(-1)
            if epsilon:
                without_bias = _log_sum_exp(products + _score_bias(*relative, None))
                log_ratio = _log_sum_exp(scores) - without_bias - math.log(epsilon)
                weights = weights * torch.sigmoid(log_ratio).to(weights.dtype)
            attended = F.dropout(weights, dropout) @ values
    if num_empty > 0:
        attended = F.pad(attended[:, :, num_empty:], (0, 0, min(num_empty, query.size(2)), 0))
    return attended


def _score_bias(
    query: Tensor,
    keys: Tensor,
    rel_keys: Tensor | Clamped | None,
    window: Window,
    position_query: Tensor | None,
    num_persistent: int,
    distance_bias: Tensor | None,
) -> Tensor | None:
    """Return what relative positions add to the scores.

    It is (H, B, T, S + N), or (T, S + N) without ``rel_keys``: 0 for persistent keys, negligible
    outside the window; None if it is 0 for all keys.
    """
    if window == EVERY_KEY:
        return None
    num_queries, num_keys = query.size(2), keys.size(2)
    rows = rows_by_distance(keys, rel_keys, distance_bias)
    if rows is None:
        bias = query.new_zeros(num_queries, num_keys)
    else:
        # the distances from S - 1, or the clamp, to -1: (G, D, d_h) -> (G, S + 1 - F, d_h)
        rows = rows.to(query.dtype)[:, max(0, rows.size(1) - num_keys - 1) :]
        far = num_keys + 1 - rows.size(1)
        position_query = query if position_query is None else position_query.to(query.dtype)
        # (H, B, T, d_h) x (G, 1, d_h, S + 1 - F) -> (H, B, T, S + 1 - F)
        by_distance = position_query @ rows.unsqueeze(1).mT
        if far > 0:
            # distances beyond the clamp use the first row's score: -> (H, B, T, S + 1)
            first_row = by_distance[..., :1].expand(-1, -1, -1, far)
            by_distance = torch.cat([first_row, by_distance], dim=-1)
        if distance_bias is not None:
            expanded = _over_distances(distance_bias, window.farthest, num_keys)
            by_distance = by_distance + expanded[:, None, None].to(query.dtype)
        # from one column per distance, S - 1 to -1, to one column per key
        bias = rel_shift(by_distance, num_keys)
    hidden = hidden_by_window(num_keys - num_queries, num_queries, num_keys, window, query)
    # half of the least number: no score brings it to -∞, which could make a whole row NaN
    bias = bias.masked_fill(hidden, torch.finfo(query.dtype).min / 2)
    return F.pad(bias, (0, num_persistent)) if num_persistent else bias


def _over_distances(distance_bias: Tensor, farthest: int, num_keys: int) -> Tensor:
    """Fit biases (H, W), from ``farthest`` down, to the distances S - 1 to -1: (H, S + 1)."""
    beyond = num_keys - 1 - farthest  # distances that the window hides
    bias = distance_bias[:, max(0, -beyond) :]
    return F.pad(bias, (max(0, beyond), num_keys + 1 - max(0, beyond) - bias.size(1)))


def _log_sum_exp(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1, keepdim=True)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "fast": window_attention,
    "sdpa": functools.partial(plain_attention, fused=True),
    "plain": plain_attention,
}


def choose_kernel(kernel: str, device: torch.device | None = None) -> Callable[..., Tensor]:
    """Return what computes attention on a device, by the name of a kernel.

    "fast" is written by hand for CPUs; on other devices it means "sdpa", compiled "plain".
    """
    if kernel not in KERNELS:
        raise ValueError(f"`kernel` is {kernel!r}: there are {', '.join(KERNELS)}")
    if kernel == "fast" and device is not None and device.type != "cpu":
        return KERNELS["sdpa"]
    return KERNELS["plain" if kernel == "fast" and torch.compiler.is_compiling() else kernel]


class RelativePositions(NamedTuple):
    """All that a layer's scores depend on, besides the tokens.

    ``rel_keys`` are p for the distances S - 1 (or more) down to -1, (G, D, d_h), or clamped;
    ``biases`` are u and v, each (H, d_h). Each may be None.
    """

    rel_keys: Tensor | Clamped | None
    biases: tuple[Tensor, Tensor] | None


# for torch.load(weights_only=True) of a past
torch.serialization.add_safe_globals([RelativePositions, Clamped])


class PositionBiases(nn.Module):
    """The vectors u and v of Transformer-XL (section 3.3, terms c and d), each (H, d_h)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.v = nn.Parameter(torch.zeros(num_heads, head_dim))


class RelativeAttention(nn.Module):
    """Multi-head attention to a segment and to its past (section 3.3).

    The score of query i for key j is ``(q_i + u)·k_j + (q_i + v)·p_{i-j}``, divided by √d_h, with
    p = W_kR R. By itself::

        keys, biases = RelativeKeyProjection(512, 8), PositionBiases(8, 64)
        attention = RelativeAttention(512, 8, Window(0, 255), keys, biases)
        encoding = SinusoidalRelativePositions(512)(x.size(1) - 1, x)
        y, _ = attention(x, attention.project_positions(encoding))  # x, y: (B, T, 512)

    ``position_projection`` maps the encoding of the distances to p, (G, D, d_h). Without
    ``biases``, u and v are another layer's, or 0.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: Window,
        position_projection: nn.Module | None = None,
        biases: PositionBiases | None = None,
        dropout: float = 0.0,
        kernel: str = "fast",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        choose_kernel(kernel)
        self.head_dim = embed_dim // num_heads
        self.window = window
        self.position_projection = position_projection
        self.biases = biases
        self.dropout = dropout
        self.kernel = kernel
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def project_positions(
        self, encoding: Tensor | Clamped | None, biases: tuple[Tensor, Tensor] | None = None
    ) -> RelativePositions:
        """Return what the scores depend on, given the encoding of distances that fall to -1.

        ``biases`` are u and v of another layer, for a layer that has none.
        """
        if self.biases is not None:
            # copies, because other layers use them when FSDP has freed this one's parameters
            biases = self.biases.u.clone(), self.biases.v.clone()
        if self.position_projection is None or encoding is None:
            return RelativePositions(None, biases)
        return RelativePositions(map_rows(self.position_projection, encoding), biases)

    def max_past(self, positions: RelativePositions, length: int) -> int:
        """Return how many tokens before the next segment attention can use: any number."""
        return UNLIMITED

    def forward(
        self,
        x: Tensor,
        positions: RelativePositions,
        past: HiddenStates | KeyValues | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        """Attend from each token of the segment ``x`` (B, T, d).

        ``positions`` come from :meth:`project_positions` and reach at least to the first key.
        Returns (B, T, d); and, in inference, the keys and values of past and segment, else None.
        """
        check_past(x, past)
        query = self.q_proj(x)
        if positions.biases is None:
            content_query, position_query = scaled_heads(query, self.head_dim), None
        else:
            u, v = (bias.flatten().to(query.dtype) for bias in positions.biases)
            content_query = scaled_heads(query + u, self.head_dim)
            position_query = scaled_heads(query + v, self.head_dim)

        def project(tokens: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.k_proj(tokens), self.v_proj(tokens)
            return split_heads(keys, self.head_dim), split_heads(values, self.head_dim)

        keys, values, keys_and_values = extend_keys_and_values(project, x, past, is_inference(self))
        attended = choose_kernel(self.kernel, x.device)(
            content_query,
            keys,
            values,
            positions.rel_keys,
            self.window,
            dropout=self.dropout if self.training else 0.0,
            position_query=position_query,
        )
        return self.out_proj(merge_heads(attended)), keys_and_values


def is_inference(module: nn.Module) -> bool:
    """Return whether to keep keys and values: in evaluation mode, without gradients."""
    # the first pass of activation checkpointing is training, though it has no gradients
    return not (module.training or torch.is_grad_enabled())


def extend_keys_and_values(
    project: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    past: HiddenStates | KeyValues | None,
    inference: bool,
    max_past: int = UNLIMITED,
) -> tuple[Tensor, Tensor, KeyValues | None]:
    """Return keys and values (H, B, S, d_h) of up to ``max_past`` tokens of the past and of ``x``.

    ``project`` maps tokens (B, T, d) to keys and values. Inference also returns both as the past.
    """
    keys, values = project(x)
    if isinstance(past, KeyValues):
        if not inference:
            raise ValueError(
                "`past` holds keys and values, from which training learns nothing: a layer in "
                ".eval() under torch.no_grad() made it; stay in that mode, or read the earlier "
                "text again in training"
            )
        check_widths(past.keys.shape[::3], keys.shape[::3])  # H, d_h
        extended = past.extended(keys, values)
        return extended.keys, extended.values, extended
    if past is not None:
        # projected apart, which avoids the costly and useless gradient of the past itself
        earlier_keys, earlier_values = project(past.last(max_past).hidden)
        keys = torch.cat([earlier_keys, keys], dim=2)
        values = torch.cat([earlier_values, values], dim=2)
    keys, values = keys.contiguous(), values.contiguous()
    return keys, values, KeyValues.wrap(keys, values) if inference else None


def check_past(x: Tensor, past: Any) -> None:
    """Refuse a segment that is not (B, T, d), or whose past has other streams."""
    if x.dim() != 3 or x.size(1) == 0:
        raise ValueError(f"`x` is {tuple(x.shape)}: give a segment (B, T, d) of one token or more")
    if past is not None and past.streams != len(x):
        raise ValueError(
            f"`past` has {past.streams} streams and `x` has {len(x)}: a past belongs to its "
            "streams; begin other text with None"
        )


def check_widths(past: torch.Size, layer: torch.Size) -> None:
    """Refuse the past of a layer with other widths."""
    if past != layer:
        raise ValueError(
            f"`past` has widths {tuple(past)} and the layer {tuple(layer)}: a past belongs to the "
            "network that returned it; begin other text with None"
        )


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Map (B, T, H·d_h) to (H, B, T, d_h), a view."""
    return x.unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)


def scaled_heads(query: Tensor, head_dim: int) -> Tensor:
    """Divide queries (B, T, H·d_h) by √d_h, and split them: (H, B, T, d_h)."""
    return split_heads(query / math.sqrt(head_dim), head_dim).contiguous()


def merge_heads(x: Tensor) -> Tensor:
    """Map (H, B, T, d_h) to (B, T, H·d_h)."""
    return x.permute(1, 2, 0, 3).flatten(2)
