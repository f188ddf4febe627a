"""The keys of a memory, and the search for the best keys of a query.

Lample et al. 2019 (arXiv:1907.05242), sections 3.1 to 3.3. The plain search follows the equations
and leaves the gradient to autograd. The fast search scores sub-keys for some queries at a time, in
both passes, and adds up only pairs that can win. Results and gradients are the same.

Equal scores have a fixed order, so that a query always reads the same slots. Product keys are
ranked by the first sub-key, then by the second; equal sub-keys and flat keys by their number.

Shapes: N queries, H heads, K slots, n = √K sub-keys of each half, d_q query width, k slots selected
by a head, P pairs that can win.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba

SEARCHES = ("torch", "faiss", "plain")
# How many sub-key scores are computed at a time: they fit a CPU's caches and keep a GPU busy.
SUBKEY_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}
# How many flat-key scores are computed at a time.
FLAT_SCORES = 1 << 24
_LARGEST = torch.iinfo(torch.int32).max


class ProductKeys(nn.Module):
    """All pairs of two sets of sub-keys as keys; each head has its own sets (section 3.1).

    Slot i·n + j has sub-key i of the first set and j of the second. Sub-keys start uniform in
    ±1/√(d_q/2). ``search`` is one of ``SEARCHES``.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
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
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k), best first, for ``queries`` (N, H, d_q)."""
        if needs_plain_operations(self.search, queries):
            return plain_score_pairs(queries, self.subkeys, k)
        return _ScorePairs.apply(queries, self.subkeys, k, self.search)


class FlatKeys(nn.Module):
    """K keys of full width for each head, all of which are scored: the ablation (section 4.5).

    Keys start uniform in ±1/√d_q, as in the published code.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, slots, query_dim))
        nn.init.uniform_(self.keys, -(query_dim**-0.5), query_dim**-0.5)
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k), best first, for ``queries`` (N, H, d_q) (eq. 1)."""
        if needs_plain_operations(self.search, queries):
            return plain_top_k(plain_products("nhd,hkd->nhk", queries, self.keys), k)
        search = search_with_faiss if self.search == "faiss" else search_with_torch
        scores, slots = [], []
        for of_head, keys in zip(queries.unbind(1), self.keys, strict=True):
            with torch.no_grad():
                best = search(of_head, keys, k)
            # (N, k, d_q), (N, d_q, 1) -> (N, k)
            fit = torch.bmm(nn.functional.embedding(best, keys), of_head.unsqueeze(-1))
            scores.append(to_single_precision(fit.squeeze(-1)))
            slots.append(best)
        return torch.stack(scores, dim=1), torch.stack(slots, dim=1)


def needs_plain_operations(search: str, x: Tensor) -> bool:
    """Return whether to use only operations that autograd, compilers and meta tensors support."""
    return search == "plain" or torch.compiler.is_compiling() or x.is_meta


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which products on the device of ``x`` keep their precision."""
    # meta tensors have no autocast
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def to_single_precision(x: Tensor) -> Tensor:
    """Return ``x`` in single precision or higher, because half precision makes many ties."""
    return x.to(torch.promote_types(x.dtype, torch.float))


# --- the plain search


def plain_score_pairs(queries: Tensor, subkeys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and slots of the best pairs of sub-keys, both (N, H, k) (section 3.2).

    ``queries`` are (N, H, d_q), ``subkeys`` (H, 2, n, d_q/2).
    """
    n = subkeys.size(2)
    # (N, H, d_q) -> (N, H, 2, d_q/2): the two halves of each query
    halves = queries.unflatten(-1, (2, -1))
    # (N, H, 2, d_q/2), (H, 2, n, d_q/2) -> (N, H, 2, n): all sub-keys' scores
    scores = plain_products("nhsd,hsid->nhsi", halves, subkeys)
    # (N, H, 2, n) -> (N, H, 2, r): the best sub-keys of each half (equation 4)
    best, numbers = plain_top_k(scores, min(k, n))
    # (N, H, r, 1) + (N, H, 1, r) -> (N, H, r·r): all pairs of the best sub-keys
    sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(2)
    slots = (numbers[:, :, 0, :, None] * n + numbers[:, :, 1, None, :]).flatten(2)
    # (N, H, r·r) -> (N, H, k): the best of these pairs are the best of all K keys
    scores, pairs = plain_top_k(sums, k)
    return scores, slots.gather(-1, pairs)


def plain_products(equation: str, queries: Tensor, keys: Tensor) -> Tensor:
    """Return ``torch.einsum`` in single precision or higher, even under autocast."""
    with without_autocast(queries):
        return torch.einsum(equation, to_single_precision(queries), to_single_precision(keys))


def plain_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of ``scores`` (…, n), best first, and their numbers, both (…, k)."""
    # torch.topk does not specify the order of equal scores
    best, numbers = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], numbers[..., :k]


# --- the fast search


class _ScorePairs(torch.autograd.Function):
    """:func:`plain_score_pairs`, for some queries at a time."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, subkeys: Tensor, k: int, search: str
    ) -> tuple[Tensor, Tensor]:
        found = []
        keys = to_single_precision(subkeys).flatten(0, 1)
        with without_autocast(queries):
            for _, halves, scores in _split_queries(queries, keys):
                # (H·halves, N, d_q/2), (H·halves, n, d_q/2) -> (H·halves, N, n)
                torch.bmm(halves, keys.mT, out=scores)
                found.append(_find_best_pairs(scores, halves, keys, k, search))
        scores, slots = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(queries, subkeys, slots)
        ctx.mark_non_differentiable(slots)
        return scores, slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
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
        return grad_queries, grad_keys.view_as(subkeys).to(subkeys.dtype), None, None


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


def _find_best_pairs(
    scores: Tensor, halves: Tensor, keys: Tensor, k: int, search: str
) -> tuple[Tensor, Tensor]:
    """Return the best sums and their slots, (N, H, k), from all ``scores`` (H·halves, N, n)."""
    n = scores.size(-1)
    by_head = scores.unflatten(0, (-1, 2))
    if search == "faiss":
        found = zip(halves, keys, strict=True)
        best = torch.stack([search_with_faiss(*pair, min(k, n)) for pair in found])
        # pairs are chosen by rank, so the order must follow the scores that are added up
        best = best.gather(-1, top_k(scores.gather(-1, best), best.size(-1)))
    elif use_numba(scores):
        return cpu_kernels.select_pairs(by_head, k)
    else:
        best = top_k(scores, min(k, n))
    best = best.unflatten(0, (-1, 2))
    first, second = by_head.gather(-1, best).unbind(1)
    a, b = candidate_pairs(k, n, scores.device)
    # (H, N, P): only pairs that can win are added up
    sums = first.index_select(-1, a) + second.index_select(-1, b)
    pairs = top_k(sums, k)
    slots = best[:, 0].gather(-1, a[pairs]) * n + best[:, 1].gather(-1, b[pairs])
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


def search_with_torch(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return the numbers (N, k) of the best ``keys`` (n, d_q) for each query (N, d_q)."""
    rows = max(1, FLAT_SCORES // len(keys))
    with without_autocast(queries):
        queries, keys = to_single_precision(queries), to_single_precision(keys)
        return torch.cat([top_k(part @ keys.t(), k) for part in queries.split(rows)])


def search_with_faiss(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Do what :func:`search_with_torch` does, with faiss's exact search.

    It needs faiss's GPU version to run on a GPU. faiss rounds differently and does not specify the
    order of equal scores.
    """
    faiss = import_faiss()
    arrays = [x.detach().float().cpu().numpy() for x in (queries, keys)]
    if queries.is_cuda and hasattr(faiss, "StandardGpuResources"):
        _, best = faiss.knn_gpu(_gpu_buffers(), *arrays, k, metric=faiss.METRIC_INNER_PRODUCT)
    else:
        _, best = faiss.knn(*arrays, k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(best).to(queries.device)


def import_faiss() -> ModuleType:
    """Return faiss; raise ``ValueError`` if it is not installed."""
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "`search` faiss needs faiss, which is not installed: pip install faiss-cpu, or take "
            "`search` torch"
        ) from None
    return faiss


@functools.cache
def _gpu_buffers() -> Any:
    """Return faiss's GPU buffers, which take long to allocate."""
    return import_faiss().StandardGpuResources()
