"""Product-key memory: a layer with many slots of values; each token reads a few of them.

Lample et al. 2019 (arXiv:1907.05242), section 3. :mod:`.query` maps a token to queries,
:mod:`.search` finds the slots with the best keys, :mod:`.values` sums their values::

    memory = ProductKeyMemory(512, slots=512**2)
    y = x + memory(x)  # x (…, 512)

Shapes: N tokens, H heads, k slots read by a head, K slots, d model width, d_q query width, d_v
value width.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.product_key_memory.search import (
    KERNELS,
    FlatKeys,
    ProductKeys,
    are_functorch_transforms_active,
)
from fairseq_plugins.product_key_memory.values import Values
from fairseq_plugins.sizes import check_sizes

KEYS: dict[str, type[ProductKeys] | type[FlatKeys]] = {"product": ProductKeys, "flat": FlatKeys}


class ProductKeyMemory(nn.Module):
    """Sum over H heads of the values of the best k of K slots, weighted by a softmax.

    Args:
        embed_dim: d.
        slots: K; a square number for product keys.
        heads: H.
        knn: k.
        query_dim: d_q; even for product keys.
        value_dim: d_v; d by default.
        keys: "product", or "flat" for the ablation.
        kernel: "fast", or "plain" for higher derivatives.
        sparse: give the values a sparse gradient, as ``torch.optim.SparseAdam`` takes it.
        query: called with tokens (N, d) and a mask (N,), false for padding, or None; returns
            queries (N, H, d_q). :class:`.QueryNetwork` by default, a linear map.
        output: called with sums of values (N, d_v) and the tokens; returns (N, d).
            :class:`MemoryOutput` by default.
        values: those of another memory, to share them.
    """

    values_class = Values

    def __init__(
        self,
        embed_dim: int,
        slots: int = 512**2,
        heads: int = 4,
        knn: int = 32,
        query_dim: int = 256,
        value_dim: int | None = None,
        keys: str = "product",
        kernel: str = "fast",
        sparse: bool = False,
        query: nn.Module | None = None,
        output: nn.Module | None = None,
        values: Values | None = None,
    ) -> None:
        super().__init__()
        value_dim = embed_dim if value_dim is None else value_dim
        check_sizes(1, embed_dim=embed_dim, slots=slots, heads=heads)
        check_sizes(1, query_dim=query_dim, value_dim=value_dim)
        check_sizes(1, slots, knn=knn)
        for name, value, choices in (("keys", keys, KEYS), ("kernel", kernel, KERNELS)):
            if value not in choices:
                raise ValueError(f"`{name}` is {value!r}: give one of {', '.join(choices)}")
        if values is not None and values.weight.shape != (slots, value_dim):
            raise ValueError(
                f"`slots` and `value_dim` are {slots} and {value_dim}, and the shared `values` "
                f"have {tuple(values.weight.shape)}: give both memories the same numbers"
            )
        if isinstance(query, QueryNetwork) and (query.heads, query.query_dim) != (heads, query_dim):
            raise ValueError(
                f"`heads` and `query_dim` are {heads} and {query_dim}, and the `query` network has "
                f"{query.heads} and {query.query_dim}: give both the same numbers"
            )
        self.heads = heads
        self.knn = knn
        # initial values are drawn in this order
        self.query = QueryNetwork(embed_dim, heads, query_dim) if query is None else query
        self.keys = KEYS[keys](heads, slots, query_dim, kernel)
        if values is None:
            self.values = self.values_class(slots, value_dim, kernel, sparse)
        else:
            # one parameter in two modules: torch.func would not restore a module with two paths
            self.values = copy.deepcopy(values, {id(values.weight): values.weight})
        self.output = MemoryOutput(embed_dim, value_dim) if output is None else output

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d).

        ``padding_mask`` (…) is true for padding, which reads nothing and gets zeros.
        """
        if padding_mask is None:
            return self.read(x.reshape(-1, x.size(-1))).view(x.shape)
        if padding_mask.dtype != torch.bool or padding_mask.shape != x.shape[:-1]:
            raise ValueError(
                f"`padding_mask` is {padding_mask.dtype}, {tuple(padding_mask.shape)}, for an "
                f"input of shape {tuple(x.shape)}: give booleans, {tuple(x.shape[:-1])}"
            )
        tokens = ~padding_mask
        if packs_tokens(x, self.training):
            summed = self.read(x[tokens])
            return summed.new_zeros(x.shape).masked_scatter(tokens.unsqueeze(-1), summed)
        padding = padding_mask.unsqueeze(-1)
        x = x.masked_fill(padding, 0)
        summed = self.read(x.reshape(-1, x.size(-1)), tokens.reshape(-1))
        # this also zeroes the gradient of what padding reads
        return summed.view(x.shape).masked_fill(padding, 0)

    def read(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map ``x`` (N, d) to (N, d); ``tokens`` (N,) is false for padding."""
        # (N, d) -> (N, H, d_q)
        queries = self.query(x, tokens)
        # equation 1: (N, H, d_q) -> scores and slots (N, H, k)
        scores, slots = self.keys(queries, self.knn)
        # equation 2
        weights = scores.softmax(-1)
        # equation 3, one sum over heads and slots: (N, H·k) -> (N, d_v)
        summed = self.values(slots.flatten(1), weights.flatten(1))
        # (N, d_v) -> (N, d)
        return self.output(summed.to(x.dtype), x)


class MemoryOutput(nn.Module):
    """Maps sums of values (N, d_v) to (N, d); by default it does nothing where d_v is d.

    Args:
        gate: the output of the "Memory+" layer, ``(y ⊙ SiLU(x W₁)) W₂``, with the memory's input x
            and the sum y (Berges et al. 2024, Memory Layers at Scale, arXiv:2412.09764).
        dropout: rate of the dropout of the sums.
    """

    def __init__(
        self,
        embed_dim: int,
        value_dim: int,
        gate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.gate = nn.Linear(embed_dim, value_dim, bias=False) if gate else None
        self.projection = None
        if gate or value_dim != embed_dim:
            self.projection = nn.Linear(value_dim, embed_dim, bias=not gate)

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        """Map sums (N, d_v) of the values that tokens ``x`` (N, d) read to (N, d)."""
        summed = self.dropout(summed)
        if self.gate is not None:
            summed = summed * F.silu(self.gate(x))
        return summed if self.projection is None else self.projection(summed)


def packs_tokens(x: Tensor, training: bool) -> bool:
    """Return whether to remove padding from ``x`` before a memory reads, which saves work.

    An accelerator makes the host wait for the number of tokens, which would slow training down;
    compilers, transforms and meta tensors have no such number. The answer does not depend on
    whether gradients are on, so that a recomputed pass does as the first one did.
    """
    if torch.compiler.is_compiling() or are_functorch_transforms_active() or x.is_meta:
        return False
    return x.device.type == "cpu" or not training
