"""The fast exact search for the keys that fit a query best; :mod:`.keys` has the plain one.

Lample et al. 2019 (arXiv:1907.05242), section 3.2. It computes the scores of sub-keys for a part of
the queries at a time, in both passes, and adds up only pairs that can win.

Shapes: N queries, H heads, n sub-keys of each half, K keys, d_q query width, k keys selected by a
head, P pairs that can win, R rows of scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_plugins.product_key_memory import cpu_kernels
from fairseq_plugins.product_key_memory.cpu_kernels import use_numba

# Number of sub-keys' scores computed at a time: few enough for the caches of a CPU, enough to keep
# a GPU busy.
SUBKEY_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}
# Number of flat keys' scores held at a time.
FLAT_SCORES = 1 << 24
_LARGEST = torch.iinfo(torch.int32).max

# Maps queries (N, d_q), keys (n, d_q) and k to the numbers (N, k) of the best keys, best first.
Search = Callable[[Tensor, Tensor, int], Tensor]


def at_least_single(x: Tensor) -> Tensor:
    """Return ``x`` in single precision, or in double precision if it has that.

    Scores in half precision have many ties, which hide the best key.
    """
    return x.to(torch.promote_types(x.dtype, torch.float))


def score_pairs(queries: Tensor, subkeys: Tensor, k: int, search: str) -> tuple[Tensor, Tensor]:
    """Return what :func:`.keys.plain_score_pairs` does, faster (section 3.2).

    Args:
        queries: (N, H, d_q).
        subkeys: of both halves, (H, 2, n, d_q/2).
        k: at most n².
        search: a key of ``SEARCHES``.

    Returns:
        The best scores, best first, and their slots i·n + j: (N, H, k) each.
    """
    return _ScorePairs.apply(queries, subkeys, k, search)


class _ScorePairs(torch.autograd.Function):
    """Holds all sub-keys' scores for a part of the queries at a time, in both passes."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, subkeys: Tensor, k: int, search: str
    ) -> tuple[Tensor, Tensor]:
        found = []
        keys = at_least_single(subkeys).flatten(0, 1)
        with torch.autocast(queries.device.type, enabled=False):
            for _, halves, scores in _parts(queries, keys):
                # (H·halves, N, d_q/2), (H·halves, n, d_q/2) -> (H·halves, N, n)
                torch.bmm(halves, keys.mT, out=scores)
                found.append(_search(scores, halves, keys, k, search))
        scores, slots = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(queries, subkeys, slots)
        ctx.mark_non_differentiable(slots)
        return scores, slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        queries, subkeys, slots = ctx.saved_tensors
        n = subkeys.size(2)
        keys = at_least_single(subkeys).flatten(0, 1)
        of_queries, of_keys = torch.empty_like(queries), torch.zeros_like(keys)
        with torch.autocast(queries.device.type, enabled=False):
            for part, halves, of_scores in _parts(queries, keys):
                # (N, H, k) -> (H·halves, N, k): a sub-key can be in several pairs
                selected = slots[part].transpose(0, 1)
                numbers = torch.stack([selected // n, selected % n], dim=1).flatten(0, 1)
                of_sums = grad[part].transpose(0, 1).repeat_interleave(2, 0)
                of_scores.zero_().scatter_add_(-1, numbers, of_sums)
                # (H·halves, N, n), (H·halves, n, d_q/2) -> (N, H, d_q)
                of_halves = torch.bmm(of_scores, keys).unflatten(0, (-1, 2))
                of_queries[part] = of_halves.permute(2, 0, 1, 3).flatten(2)
                of_keys.baddbmm_(of_scores.mT, halves)
        return of_queries, of_keys.view_as(subkeys).to(subkeys.dtype), None, None


def _parts(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Split the queries.

    Args:
        queries: (N, H, d_q).
        keys: (H·halves, n, d_q/2).

    Yields:
        For each part its place among the queries, its halves (H·halves, N, d_q/2) in the keys'
        dtype, and a buffer (H·halves, N, n) for its scores, which parts of one length share.
    """
    lists, n, _ = keys.shape
    allowed = SUBKEY_SCORES.get(queries.device.type, SUBKEY_SCORES["cuda"])
    length = max(1, allowed // (lists * n))
    scores = keys.new_empty(lists, 0, n)
    # no queries are one empty part
    for start in range(0, max(1, len(queries)), length):
        part = slice(start, start + length)
        # (N, H, d_q) -> (H·halves, N, d_q/2)
        halves = queries[part].unflatten(-1, (2, -1)).permute(1, 2, 0, 3).flatten(0, 1)
        if scores.size(1) != halves.size(1):
            scores = keys.new_empty(lists, halves.size(1), n)
        yield part, halves.to(keys.dtype), scores


def _search(
    scores: Tensor, halves: Tensor, keys: Tensor, k: int, search: str
) -> tuple[Tensor, Tensor]:
    """Return the best scores and slots (N, H, k), given all ``scores`` (H·halves, N, n)."""
    by_head = scores.unflatten(0, (-1, 2))
    if search != "torch":
        pairs = zip(halves, keys, strict=True)
        best = torch.stack([SEARCHES[search](*pair, min(k, keys.size(1))) for pair in pairs])
        # pairs are chosen by rank, so the order must be that of the scores that are added up
        best = best.gather(-1, top_k(scores.gather(-1, best), best.size(-1)))
    elif use_numba(scores):
        return cpu_kernels.select_pairs(by_head, k)
    else:
        best = top_k(scores, min(k, keys.size(1)))
    return best_pairs(by_head, best.unflatten(0, (-1, 2)), k)


@functools.cache
def candidate_pairs(k: int, n: int, device: torch.device | None = None) -> Tensor:
    """Return the pairs (2, P) of ranks, from 0, that can be among the best k pairs.

    Of two lists of n scores, best first, the pair of ranks (a, b), from 1, is no better than the
    a·b pairs of ranks up to its own: it can be among the best k only if a·b <= k. For k = 32 these
    are 119 pairs of 1,024. They are in the order in which pairs of equal score are ranked.
    """
    ranks = torch.arange(1, min(k, n) + 1)
    return (ranks[:, None] * ranks <= k).nonzero().t().to(device)


def best_pairs(scores: Tensor, best: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest sums of two scores, one of each half.

    Args:
        scores: of the sub-keys of both halves, (H, 2, N, n).
        best: numbers of the best min(k, n) of them, best first, (H, 2, N, min(k, n)).
        k: number of pairs.

    Returns:
        The sums, best first, and the slots of those pairs: (N, H, k) each.
    """
    n = scores.size(-1)
    first, second = scores.gather(-1, best).unbind(1)
    a, b = candidate_pairs(k, n, scores.device)
    # (H, N, P): only pairs that can win are added up
    sums = first.index_select(-1, a) + second.index_select(-1, b)
    pairs = top_k(sums, k)
    slots = best[:, 0].gather(-1, a[pairs]) * n + best[:, 1].gather(-1, b[pairs])
    # (H, N, k) -> (N, H, k)
    return sums.gather(-1, pairs).transpose(0, 1), slots.transpose(0, 1)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the numbers (…, k) of the largest of ``scores`` (…, n), best first.

    Of equal scores the smaller number goes first; ``torch.topk`` leaves this open.
    """
    n = scores.size(-1)
    if k == n:
        return scores.argsort(dim=-1, descending=True, stable=True)
    rows = scores.detach().reshape(-1, n)
    if use_numba(rows):
        best = cpu_kernels.select(rows, k)
    elif rows.device.type == "cpu":
        best = select_with_topk(rows, k)
    else:
        best = select_without_waiting(rows, k)
    return best.view(*scores.shape[:-1], k)


def select_without_waiting(rows: Tensor, k: int) -> Tensor:
    """Return the numbers (R, k) for ``rows`` (R, n) with n > k, without a wait of the host.

    A score in single precision and its number make one integer, so that there are no ties. On a CPU
    this takes longer than to look for ties.
    """
    if rows.dtype != torch.float32:
        return rows.argsort(dim=-1, descending=True, stable=True)[:, :k]
    n = rows.size(-1)
    # -0 and 0 are one score
    bits = (rows + 0.0).view(torch.int32)
    # bits of negative numbers rise where these fall
    ranks = bits ^ ((bits >> 31) & _LARGEST)
    ranks = ranks.masked_fill(rows.isnan(), _LARGEST).long() << 32
    numbers = torch.arange(n - 1, -1, -1, device=rows.device)
    best, _ = (ranks | numbers).topk(k, dim=-1)
    return n - 1 - (best & 0xFFFFFFFF)


def select_with_topk(rows: Tensor, k: int) -> Tensor:
    """Return the numbers (R, k) for ``rows`` (R, n) with n > k, by looking for ties."""
    # one more than wanted shows whether another has the score of the last
    values, best = rows.topk(k + 1, dim=-1)
    best = best[:, :k]
    tied = (values[:, 1:] >= values[:, :-1]).any(-1)
    if tied.any():
        in_order = rows[tied].argsort(dim=-1, descending=True, stable=True)
        best = best.masked_scatter(tied.unsqueeze(-1), in_order[:, :k])
    return best


def score_keys(queries: Tensor, keys: Tensor, k: int, search: str) -> tuple[Tensor, Tensor]:
    """Return what :func:`.keys.plain_score_keys` does, with fewer scores at a time.

    Args:
        queries: (N, H, d_q).
        keys: (H, K, d_q).
        k: at most K.
        search: a key of ``SEARCHES``.

    Returns:
        The best scores, best first, and their slots: (N, H, k) each.
    """
    scores, slots = [], []
    for of_head, keys_of_head in zip(queries.unbind(1), keys, strict=True):
        with torch.no_grad():
            best = SEARCHES[search](of_head, keys_of_head, k)
        # (N, k, d_q), (N, d_q, 1) -> (N, k)
        selected = nn.functional.embedding(best, keys_of_head)
        fit = torch.bmm(selected, of_head.unsqueeze(-1)).squeeze(-1)
        scores.append(at_least_single(fit))
        slots.append(best)
    return torch.stack(scores, dim=1), torch.stack(slots, dim=1)


def search_with_torch(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return the numbers (N, k) of the best ``keys`` (n, d_q) of each of ``queries`` (N, d_q)."""
    rows = max(1, FLAT_SCORES // len(keys))
    with torch.autocast(queries.device.type, enabled=False):
        queries, keys = at_least_single(queries), at_least_single(keys)
        return torch.cat([top_k(part @ keys.t(), k) for part in queries.split(rows)])


def search_with_faiss(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Do what :func:`search_with_torch` does with faiss's exact index of inner products.

    It runs on a GPU where faiss's GPU version is installed. faiss rounds in its own way and leaves
    the order of equal scores open.
    """
    faiss = import_faiss()
    of_queries, of_keys = (x.detach().float().cpu().numpy() for x in (queries, keys))
    if queries.is_cuda and hasattr(faiss, "StandardGpuResources"):
        _, best = faiss.knn_gpu(
            _gpu_resources(), of_queries, of_keys, k, metric=faiss.METRIC_INNER_PRODUCT
        )
    else:
        _, best = faiss.knn(of_queries, of_keys, k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(best).to(queries.device)


def import_faiss() -> ModuleType:
    """Return faiss.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "`search` faiss needs faiss, which is not installed: pip install faiss-cpu, or take "
            "`search` torch"
        ) from None
    return faiss


@functools.cache
def _gpu_resources() -> Any:
    """Return faiss's buffers on the GPU, which take long to allocate."""
    return import_faiss().StandardGpuResources()


SEARCHES: dict[str, Search] = {"torch": search_with_torch, "faiss": search_with_faiss}
