"""Searches for the keys that fit a query best, among all of them: torch's and faiss's.

Shapes: R queries, n keys, d their width, k wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_plugins.product_key_memory.top_k import top_k

# How many scores are held at a time, whatever the number of queries.
FLAT_SCORES = 1 << 24

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
