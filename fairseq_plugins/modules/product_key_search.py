"""The keys of a memory, and the exact search for those that fit a query best.

Lample et al. 2019 (arXiv:1907.05242), sections 3.1 to 3.3. Equal scores are ranked by a fixed rule,
so that the same query always reads the same slots: of product keys, the better first sub-key goes
first, then the better second one; equal sub-keys, and flat keys, go by their number.

Shapes: N queries, H heads, K slots, n = √K sub-keys of each half, d_q query width, k slots selected
by a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .top_k import top_k

# How many scores of flat keys are held at a time, whatever the number of queries.
FLAT_SCORES = 1 << 24

# How many scores of sub-keys are computed at a time: on a CPU few enough to stay in its caches, on a
# GPU enough to keep it busy.
SUBKEY_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}

# Of (R, d) queries and (n, d) keys: the numbers (R, k) of the best keys of each query, best first.
Search = Callable[[Tensor, Tensor, int], Tensor]


def at_least_single(x: Tensor) -> Tensor:
    """Return ``x`` in single precision, or in double precision if it has that.

    Products in half precision are full of ties, which hide what is best.
    """
    return x.to(torch.promote_types(x.dtype, torch.float))


def search_with_torch(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return the numbers (R, k) of the best ``keys`` (n, d) of each of ``queries`` (R, d)."""
    rows = max(1, FLAT_SCORES // len(keys))
    with torch.autocast(queries.device.type, enabled=False):
        queries, keys = at_least_single(queries), at_least_single(keys)
        return torch.cat([top_k(part @ keys.t(), k) for part in queries.split(rows)])


def search_with_faiss(queries: Tensor, keys: Tensor, k: int) -> Tensor:
    """Do the same with faiss's exact inner products, on a GPU where its GPU version is installed.

    faiss rounds in its own way and leaves the order of equal scores open.

    Raises:
        ValueError: faiss is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "--memory-search faiss needs faiss, which is not installed: pip install faiss-cpu, or "
            "take --memory-search torch"
        ) from None
    of_queries, of_keys = (x.detach().float().cpu().numpy() for x in (queries, keys))
    if queries.is_cuda and hasattr(faiss, "StandardGpuResources"):
        _, best = faiss.knn_gpu(
            _gpu_resources(), of_queries, of_keys, k, metric=faiss.METRIC_INNER_PRODUCT
        )
    else:
        _, best = faiss.knn(of_queries, of_keys, k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(best).to(queries.device)


@functools.cache
def _gpu_resources() -> Any:
    """Return faiss's working memory on the GPU, which takes long to allocate."""
    import faiss

    return faiss.StandardGpuResources()


SEARCHES: dict[str, Search] = {"torch": search_with_torch, "faiss": search_with_faiss}


@functools.cache
def candidate_pairs(k: int, n: int, device: torch.device | None = None) -> Tensor:
    """Return the pairs (2, P) of ranks, from 0, of which the best k pairs consist.

    Of two lists of n scores sorted downwards, the pair of ranks (a, b), from 1, has the a·b pairs
    up to its own ahead of it: it can be among the best k only if a·b <= k. For k = 32 these are 119
    pairs of 1,024 (section 3.2). They are in the order in which pairs of equal score are ranked.
    """
    ranks = torch.arange(1, min(k, n) + 1, device=device)
    return (ranks[:, None] * ranks <= k).nonzero().t()


def best_pairs(scores: Tensor, best: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest sums of two scores (H, N, k), best first, and the slots of those pairs.

    Args:
        scores: of the sub-keys of both halves, (H, 2, N, n).
        best: numbers of the best min(k, n) of them, in order, (H, 2, N, min(k, n)).
        k: number of pairs.
    """
    n = scores.size(-1)
    first, second = scores.gather(-1, best).unbind(1)
    a, b = candidate_pairs(k, n, scores.device)
    # (H, N, P): only pairs that can win are added up
    sums = first.index_select(-1, a) + second.index_select(-1, b)
    pairs = top_k(sums, k)
    slots = best[:, 0].gather(-1, a[pairs]) * n + best[:, 1].gather(-1, b[pairs])
    return sums.gather(-1, pairs), slots


class _BestScores(torch.autograd.Function):
    """Scores and slots (N, H, k) of queries (N, H, d_q) and sub-keys (H, 2, n, d_q/2).

    The scores of all sub-keys are there for a part of the queries at a time, in both passes.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, subkeys: Tensor, k: int, search: str
    ) -> tuple[Tensor, Tensor]:
        shape = len(queries), queries.size(1), k
        scores = torch.empty(shape, dtype=at_least_single(queries[:0]).dtype, device=queries.device)
        slots = torch.empty(shape, dtype=torch.long, device=queries.device)
        ctx.save_for_backward(queries, subkeys, slots)
        ctx.mark_non_differentiable(slots)
        with torch.autocast(queries.device.type, enabled=False):
            for part, halves, of_subkeys in _parts(queries, subkeys):
                # (H·halves, N, d_q/2), (H·halves, n, d_q/2) -> (H, halves, N, n)
                torch.bmm(halves, at_least_single(subkeys).flatten(0, 1).mT, out=of_subkeys)
                of_subkeys = of_subkeys.unflatten(0, (-1, 2))
                if search == "torch" and queries.device.type == "cpu":
                    from .selection_loops import select_pairs

                    found = (x[part].numpy() for x in (scores, slots))
                    select_pairs(of_subkeys.numpy(), *found)
                else:
                    best = _best_of_halves(of_subkeys, halves, subkeys, search, k)
                    for whole, found in zip((scores, slots), best_pairs(of_subkeys, best, k), strict=True):
                        whole[part] = found.transpose(0, 1)
        return scores, slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        queries, subkeys, slots = ctx.saved_tensors
        n = subkeys.size(2)
        of_queries = torch.empty_like(queries)
        keys = at_least_single(subkeys).flatten(0, 1)
        of_keys = torch.zeros_like(keys)
        with torch.autocast(queries.device.type, enabled=False):
            for part, halves, of_subkeys in _parts(queries, subkeys):
                # (N, H, k) -> (H·halves, N, k): a sub-key can be in several pairs
                selected = slots[part].transpose(0, 1)
                numbers = torch.stack([selected // n, selected % n], dim=1).flatten(0, 1)
                of_sums = grad[part].transpose(0, 1).repeat_interleave(2, 0)
                of_subkeys.zero_().scatter_add_(-1, numbers, of_sums)
                # (H·halves, N, n), (H·halves, n, d_q/2) -> (N, H, d_q)
                of_halves = torch.bmm(of_subkeys, keys).unflatten(0, (-1, 2))
                of_queries[part] = of_halves.permute(2, 0, 1, 3).flatten(2)
                of_keys.baddbmm_(of_subkeys.mT, halves)
        return of_queries, of_keys.view_as(subkeys).to(subkeys.dtype), None, None


def _parts(queries: Tensor, subkeys: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield parts of the queries: places, halves (H·halves, N, d_q/2), memory for all scores.

    The memory (H·halves, N, n) is the same for all, where they have the same length.
    """
    heads, _, n, _ = subkeys.shape
    allowed = SUBKEY_SCORES.get(queries.device.type, SUBKEY_SCORES["cuda"])
    length = min(max(1, allowed // (2 * heads * n)), len(queries))
    scores = None
    for start in range(0, len(queries), max(1, length)):
        part = slice(start, start + length)
        # (N, H, d_q) -> (H·halves, N, d_q/2)
        halves = queries[part].unflatten(-1, (2, -1)).permute(1, 2, 0, 3).flatten(0, 1)
        halves = at_least_single(halves)
        if scores is None or scores.size(1) != halves.size(1):
            scores = halves.new_empty(2 * heads, halves.size(1), n)
        yield part, halves, scores


def _best_of_halves(
    scores: Tensor, halves: Tensor, subkeys: Tensor, search: str, k: int
) -> Tensor:
    """Return the numbers of the best min(k, n) sub-keys of both halves, (H, 2, N, min(k, n))."""
    k = min(k, scores.size(-1))
    if search == "torch":
        return top_k(scores, k)
    found = [
        SEARCHES[search](queries, keys, k)
        for queries, keys in zip(halves, subkeys.flatten(0, 1), strict=True)
    ]
    best = torch.stack(found).view(*scores.shape[:3], k)
    # pairs are chosen among by rank: the order has to be that of the scores added up
    order = top_k(scores.gather(-1, best), k)
    return best.gather(-1, order)


class ProductKeys(nn.Module):
    """Keys that are all pairs of two sets of sub-keys, with sub-keys of each head its own (3.1).

    Slot i·n + j has sub-key i of the first set and j of the second. They are drawn uniformly from
    ±1/√(d_q/2).

    Args:
        heads: H.
        slots: K, a square number.
        query_dim: d_q, an even number.
        search: a key of ``SEARCHES``.

    Raises:
        ValueError: ``slots`` is not a square number, or ``query_dim`` is odd.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.subkeys_per_half = math.isqrt(slots)
        if self.subkeys_per_half**2 != slots:
            near = self.subkeys_per_half**2, (self.subkeys_per_half + 1) ** 2
            raise ValueError(
                f"--memory-slots is {slots}: product keys need a square number, such as {near[0]} "
                f"or {near[1]}"
            )
        if query_dim % 2:
            raise ValueError(
                f"--memory-query-dim is {query_dim}: product keys halve it, so it must be even"
            )
        half = query_dim // 2
        # (H, halves, n, d_q/2)
        self.subkeys = nn.Parameter(torch.empty(heads, 2, self.subkeys_per_half, half))
        nn.init.uniform_(self.subkeys, -(half**-0.5), half**-0.5)
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores and the slots (N, H, k) that fit ``queries`` (N, H, d_q) best.

        They are exactly the best of all K, best first (equation 4 and what follows it).
        """
        return _BestScores.apply(queries, self.subkeys, k, self.search)


class FlatKeys(nn.Module):
    """K keys of full width for each head, all of which are compared: the ablation (section 4.5).

    Args:
        heads: H.
        slots: K.
        query_dim: d_q.
        search: a key of ``SEARCHES``.
    """

    def __init__(self, heads: int, slots: int, query_dim: int, search: str = "torch") -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, slots, query_dim))
        # as long as two halves of product keys together
        bound = (query_dim / 2) ** -0.5
        nn.init.uniform_(self.keys, -bound, bound)
        self.search = search

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k) that fit ``queries`` (N, H, d_q) best (equation 1)."""
        scores, slots = [], []
        for of_head, keys in zip(queries.unbind(1), self.keys, strict=True):
            with torch.no_grad():
                best = SEARCHES[self.search](of_head, keys, k)
            # (N, k, d_q), (N, d_q, 1) -> (N, k)
            selected = nn.functional.embedding(best, keys)
            fit = torch.bmm(selected, of_head.unsqueeze(-1)).squeeze(-1)
            scores.append(at_least_single(fit))
            slots.append(best)
        return torch.stack(scores, dim=1), torch.stack(slots, dim=1)
