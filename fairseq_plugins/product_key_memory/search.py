"""The keys of a memory, and the search for the best keys of a query.

Lample et al. 2019 (arXiv:1907.05242), sections 3.1 to 3.3. Product keys have two kernels. "plain"
follows the equations and leaves the gradient to autograd. "fast" scores sub-keys for some queries
at a time, in both passes, and adds up only pairs that can win. Results and gradients are the same.

Product keys of equal scores have a fixed order, so that a query always reads the same slots: they
are ranked by the first sub-key, then by the second; equal sub-keys by their number.

Shapes: N queries, H heads, K slots, n = √K sub-keys of each half, d_q query width, k slots selected
by a head, P pairs that can win.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from fairseq_plugins.precision import without_autocast

logger = logging.getLogger(__name__)

KERNELS = ("fast", "plain")
# How many sub-key scores are computed at a time: they fit a CPU's caches and keep a GPU busy.
SUBKEY_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}
# How many flat-key scores are computed at a time.
FLAT_SCORES = 1 << 24
_LARGEST = torch.iinfo(torch.int32).max


class ProductKeys(nn.Module):
    """All pairs of two sets of sub-keys as keys; each head has its own sets (section 3.1).

    Slot i·n + j has sub-key i of the first set and j of the second. Sub-keys start uniform in
    ±1/√(d_q/2). ``kernel`` is one of ``KERNELS``.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, kernel: str = "fast") -> None:
        super().__init__()
        n = math.isqrt(slots)
        if n**2 != slots:
            raise ValueError(
                f"`slots` is {slots}: product keys need a square number, such as {n**2} or "
                f"{(n + 1) ** 2}"
            )
        if query_dim % 2:
            raise ValueError(
                f"`query_dim` is {query_dim}: product keys halve it, so it must be even"
            )
        half = query_dim // 2
        # (H, halves, n, d_q/2)
        self.subkeys = nn.Parameter(torch.empty(heads, 2, n, half))
        nn.init.uniform_(self.subkeys, -(half**-0.5), half**-0.5)
        self.kernel = kernel

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k), best first, for ``queries`` (N, H, d_q)."""
        if needs_plain_operations(self.kernel, queries):
            return plain_score_pairs(queries, self.subkeys, k)
        return _ScorePairs.apply(queries, self.subkeys, k)


class FlatKeys(nn.Module):
    """K keys of full width for each head, all of which are scored: the ablation (section 4.5).

    Keys start uniform in ±1/√d_q, as in the published code. Slots of equal scores are selected in
    any order, and both kernels are the same.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, kernel: str = "fast") -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, slots, query_dim))
        nn.init.uniform_(self.keys, -(query_dim**-0.5), query_dim**-0.5)

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k), best first, for ``queries`` (N, H, d_q) (eq. 1)."""
        scores, slots = [], []
        for head_queries, keys in zip(queries.unbind(1), self.keys, strict=True):
            with without_autocast(queries):
                head_queries = to_single_precision(head_queries)
                with torch.no_grad():
                    best = _search_all(head_queries, to_single_precision(keys), k)
                # (N, k, d_q), (N, d_q, 1) -> (N, k)
                selected = to_single_precision(F.embedding(best, keys))
                scores.append(torch.bmm(selected, head_queries.unsqueeze(-1)).squeeze(-1))
                slots.append(best)
        return torch.stack(scores, dim=1), torch.stack(slots, dim=1)


def needs_plain_operations(kernel: str, x: Tensor) -> bool:
    """Return whether to use only operations that autograd, compilers and meta tensors support."""
    compiled = torch.compiler.is_compiling() or x.is_meta
    return kernel == "plain" or compiled or are_functorch_transforms_active()


def are_functorch_transforms_active() -> bool:
    """Return whether ``torch.func`` transforms the running code, such as ``vmap``."""
    return torch._C._are_functorch_transforms_active()


def cpu_loops(x: Tensor) -> ModuleType | None:
    """Return :mod:`.cpu_loops` if ``x`` is on a CPU, in single or double precision."""
    on_cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return _import_loops() if on_cpu else None


@functools.cache
def _import_loops() -> ModuleType | None:
    try:
        return importlib.import_module("fairseq_plugins.product_key_memory.cpu_loops")
    except ImportError as error:
        # numba is not installed, or made for another version of numpy
        logger.warning(
            "memories on this CPU go without compiled loops, several times slower (%s): install "
            "them with pip install '.[fast]' in the clone",
            error,
        )
        return None


def to_single_precision(x: Tensor) -> Tensor:
    """Return ``x`` in single precision or higher, because half precision makes many ties."""
    return x.to(torch.promote_types(x.dtype, torch.float))


# --- product keys, plain


def plain_score_pairs(queries: Tensor, subkeys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and slots of the best pairs of sub-keys, both (N, H, k) (section 3.2).

    ``queries`` are (N, H, d_q), ``subkeys`` (H, 2, n, d_q/2).
    """
    n = subkeys.size(2)
    # (N, H, d_q) -> (N, H, 2, d_q/2): the two halves of each query
    halves = to_single_precision(queries).unflatten(-1, (2, -1))
    # (N, H, 2, d_q/2), (H, 2, n, d_q/2) -> (N, H, 2, n): all sub-keys' scores
    with without_autocast(queries):
        scores = torch.einsum("nhsd,hsid->nhsi", halves, to_single_precision(subkeys))
    # (N, H, 2, n) -> (N, H, 2, r): the best sub-keys of each half (equation 4)
    best, numbers = plain_top_k(scores, min(k, n))
    # (N, H, r, 1) + (N, H, 1, r) -> (N, H, r·r): all pairs of the best sub-keys
    sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(2)
    slots = (numbers[:, :, 0, :, None] * n + numbers[:, :, 1, None, :]).flatten(2)
    # (N, H, r·r) -> (N, H, k): the best of these pairs are the best of all K keys
    scores, pairs = plain_top_k(sums, k)
    return scores, slots.gather(-1, pairs)


def plain_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of ``scores`` (…, n), best first, and their numbers, both (…, k)."""
    # torch.topk does not specify the order of equal scores
    best, numbers = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], numbers[..., :k]


# --- product keys, fast


class _ScorePairs(torch.autograd.Function):
    """:func:`plain_score_pairs`, for some queries at a time."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, queries: Tensor, subkeys: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        parts = []
        keys = to_single_precision(subkeys).flatten(0, 1)
        with without_autocast(queries):
            for _, halves, scores in _split_queries(queries, keys):
                # (H·halves, N, d_q/2), (H·halves, n, d_q/2) -> (H·halves, N, n)
                torch.bmm(halves, keys.mT, out=scores)
                parts.append(_select_pairs(scores.unflatten(0, (-1, 2)), k))
        scores, slots = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ctx.save_for_backward(queries, subkeys, slots)
        ctx.mark_non_differentiable(slots)
        return scores, slots

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        queries, subkeys, slots = ctx.saved_tensors
        n = subkeys.size(2)
        keys = to_single_precision(subkeys).flatten(0, 1)
        grad_queries, grad_keys = torch.empty_like(queries), torch.zeros_like(keys)
        with without_autocast(queries):
            for part, halves, grad_scores in _split_queries(queries, keys):
                # (N, H, k) -> (H·halves, N, k): a sub-key can be in several pairs
                selected = slots[part].transpose(0, 1)
                numbers = torch.stack([selected // n, selected % n], dim=1).flatten(0, 1)
                grad_sums = grad[part].transpose(0, 1).repeat_interleave(2, 0)
                grad_scores.zero_().scatter_add_(-1, numbers, grad_sums)
                # (H·halves, N, n), (H·halves, n, d_q/2) -> (N, H, d_q)
                grad_halves = torch.bmm(grad_scores, keys).unflatten(0, (-1, 2))
                grad_queries[part] = grad_halves.permute(2, 0, 1, 3).flatten(2)
                grad_keys.baddbmm_(grad_scores.mT, halves)
        return grad_queries, grad_keys.view_as(subkeys).to(subkeys.dtype), None


def _split_queries(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Split ``queries`` (N, H, d_q), for ``keys`` (H·halves, n, d_q/2).

    Yields a part's slice, its half queries (H·halves, N, d_q/2) in the keys' dtype, and a buffer
    (H·halves, N, n) for its scores, which parts of one length share.
    """
    lists, n, _ = keys.shape
    allowed = SUBKEY_SCORES.get(queries.device.type, SUBKEY_SCORES["cuda"])
    length = max(1, allowed // (lists * n))
    scores = keys.new_empty(lists, 0, n)
    # without queries there is one empty part
    for start in range(0, max(1, len(queries)), length):
        part = slice(start, start + length)
        # (N, H, d_q) -> (H·halves, N, d_q/2)
        halves = queries[part].unflatten(-1, (2, -1)).permute(1, 2, 0, 3).flatten(0, 1)
        if scores.size(1) != halves.size(1):
            scores = keys.new_empty(lists, halves.size(1), n)
        yield part, halves.to(keys.dtype), scores


def _select_pairs(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the best sums and their slots, (N, H, k), from all ``scores`` (H, halves, N, n)."""
    heads, _, queries, n = scores.shape
    if (loops := cpu_loops(scores)) is not None:
        sums = scores.new_empty(queries, heads, k)
        slots = torch.empty(queries, heads, k, dtype=torch.long)
        loops.run("select_pairs", scores, sums, slots)
        return sums, slots
    # (H, halves, N, n) -> (H, halves, N, r)
    numbers = top_k(scores, min(k, n))
    first, second = scores.gather(-1, numbers).unbind(1)
    a, b = candidate_pairs(k, n, scores.device)
    # (H, N, P): only pairs that can win are added up
    sums = first.index_select(-1, a) + second.index_select(-1, b)
    pairs = top_k(sums, k)
    slots = numbers[:, 0].gather(-1, a[pairs]) * n + numbers[:, 1].gather(-1, b[pairs])
    # (H, N, k) -> (N, H, k)
    return sums.gather(-1, pairs).transpose(0, 1), slots.transpose(0, 1)


@functools.cache
def candidate_pairs(k: int, n: int, device: torch.device | None = None) -> Tensor:
    """Return the pairs (2, P) of ranks, from 0, that can be among the best k pairs.

    In two lists of n scores, best first, no pair of ranks (a, b), from 1, beats the a·b pairs up to
    its own ranks, so it can win only if a·b ≤ k. Pairs come in the order of equal scores.
    """
    ranks = torch.arange(1, min(k, n) + 1)
    return (ranks[:, None] * ranks <= k).nonzero().t().to(device)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the numbers (…, k) of :func:`plain_top_k`, faster; the host never waits.

    A score in single precision and its number form one integer, so there are no ties.
    """
    scores = scores.detach()
    if scores.dtype != torch.float32:
        return plain_top_k(scores, k)[1]
    n = scores.size(-1)
    # -0 equals 0
    bits = (scores + 0.0).view(torch.int32)
    # the bits of negative numbers rise as the numbers fall
    ranks = bits ^ ((bits >> 31) & _LARGEST)
    ranks = ranks.masked_fill(scores.isnan(), _LARGEST).long() << 32
    numbers = torch.arange(n - 1, -1, -1, device=scores.device)
    best, _ = (ranks | numbers).topk(k, dim=-1)
    return n - 1 - (best & 0xFFFFFFFF)


# --- flat keys


def _search_all(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return the numbers (N, k) of the best ``keys`` (K, d_q) for each query (N, d_q)."""
    length = max(1, FLAT_SCORES // len(keys))
    return torch.cat([(part @ keys.t()).topk(k).indices for part in queries.split(length)])
