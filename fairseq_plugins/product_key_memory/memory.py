"""Product-key memory: a layer with many slots of values; each token reads a few of them.

Lample et al. 2019 (arXiv:1907.05242), section 3. :mod:`.query` maps a token to queries,
:mod:`.search` finds the slots with the best keys, :mod:`.value_table` sums their values::

    memory = ProductKeyMemory(512, slots=512**2, query_batch_norm=True)
    y = x + memory(x)  # x (…, 512)

From Berges et al. 2024 (Memory Layers at Scale, arXiv:2412.09764): memories that share their
values, and the output gate of the "Memory+" layer, ``(y ⊙ SiLU(x W₁)) W₂`` with the layer's input x
and the sum of values y.

Shapes: N tokens without padding, H heads, k slots read by a head, K slots, d model width, d_q query
width, d_v value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.product_key_memory.search import (
    SEARCHES,
    FlatKeys,
    ProductKeys,
    import_faiss,
    needs_plain_operations,
)
from fairseq_plugins.product_key_memory.usage import MemoryUsage
from fairseq_plugins.product_key_memory.value_table import ValueTable

KEYS: dict[str, type[nn.Module]] = {"product": ProductKeys, "flat": FlatKeys}


class ProductKeyMemory(nn.Module):
    """Sum over H heads of the values of the best k of K slots, weighted by a softmax.

    Equations 1 to 3, section 3.3. The heads share the values, which are drawn from N(0, 1/d_v).
    ``query_…`` arguments go to :class:`.query.QueryNetwork`.

    Args:
        embed_dim: d.
        slots: K; a square number for product keys.
        heads: H.
        knn: k.
        query_dim: d_q; even for product keys.
        value_dim: d_v; if it differs from d (None), the sum of values is mapped to d.
        keys: "product", or "flat" for the ablation.
        search: "torch", "faiss", or "plain": slower, in operations that autograd,
            ``torch.compile`` and ``torch.export`` support.
        sparse: give the values a sparse gradient, as ``torch.optim.SparseAdam`` takes it.
        values_dtype: ``torch.bfloat16`` keeps the values in it when the memory is cast.
        shard_values: give each worker some of the values' columns (:mod:`.sharding`).
        output_norm: normalise the sum of values over its dimensions.
        output_gate: multiply the sum of values by SiLU(x W₁), then map it by W₂, without biases.
        zero_init: start the last map at zero; without a map the norm, without both the values.
        values_of: another memory, whose values this one shares; a state dict has them once.
    """

    def __init__(
        self,
        embed_dim: int,
        slots: int = 512**2,
        heads: int = 4,
        knn: int = 32,
        query_dim: int = 256,
        value_dim: int | None = None,
        query_hidden_dims: Sequence[int] = (),
        query_batch_norm: bool = False,
        query_layer_norm: bool = False,
        query_dropout: float = 0.0,
        input_dropout: float = 0.0,
        value_dropout: float = 0.0,
        keys: str = "product",
        search: str = "torch",
        sparse: bool = False,
        values_dtype: torch.dtype | None = None,
        shard_values: bool = False,
        output_norm: bool = False,
        output_gate: bool = False,
        zero_init: bool = False,
        values_of: ProductKeyMemory | None = None,
    ) -> None:
        super().__init__()
        value_dim = embed_dim if value_dim is None else value_dim
        sizes = {"slots": slots, "heads": heads, "knn": knn}
        sizes |= {"query_dim": query_dim, "value_dim": value_dim}
        dropouts = {"query_dropout": query_dropout, "input_dropout": input_dropout}
        _check_numbers(sizes, query_hidden_dims, {**dropouts, "value_dropout": value_dropout})
        _check_choices(keys, search, values_dtype)
        if values_of is not None:
            _check_shared(slots, value_dim, values_of.table.shape)
        self.input_dropout = nn.Dropout(input_dropout)
        self.query_network = QueryNetwork(
            embed_dim,
            heads,
            query_dim,
            query_hidden_dims,
            query_batch_norm,
            query_layer_norm,
            query_dropout,
        )
        self.keys = KEYS[keys](heads, slots, query_dim, search)
        self.owns_values = values_of is None
        if values_of is None:
            mapped = output_norm or output_gate or value_dim != embed_dim
            std = 0.0 if zero_init and not mapped else value_dim**-0.5
            self._table = ValueTable(slots, value_dim, std, shard_values, values_dtype)
        else:
            self._table = values_of.table
        self.values = self._table.values
        self._table.readers.append(self.keys)
        self.value_dropout = nn.Dropout(value_dropout)
        self.output_norm = nn.LayerNorm(value_dim) if output_norm else None
        self.gate = nn.Linear(embed_dim, value_dim, bias=False) if output_gate else None
        self.projection = None
        if output_gate or value_dim != embed_dim:
            self.projection = nn.Linear(value_dim, embed_dim, bias=not output_gate)
        last = self.projection or self.output_norm
        if zero_init and last is not None:
            for parameter in last.parameters():
                nn.init.zeros_(parameter)
        self.knn = knn
        self.heads = heads
        self.sparse = sparse
        self.search = search
        self.usage: MemoryUsage | None = None
        self.register_buffer("frozen_slots", None, persistent=False)

    @property
    def table(self) -> ValueTable:
        """Return the table that holds the values."""
        if self._table.values is not self.values:
            # casting or loading has replaced the parameter
            self._table.values = self.values
        return self._table

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d).

        ``padding_mask`` (…) is true for padding, which reads nothing and gets zeros.
        """
        _check_input(self.query_network.input_dim, x, padding_mask)
        if padding_mask is None:
            return self._read(x.reshape(-1, x.size(-1))).view(x.shape)
        tokens = ~padding_mask
        if packs_tokens(x, self.training):
            read = self._read(x[tokens])
            return read.new_zeros(x.shape).masked_scatter(tokens.unsqueeze(-1), read)
        padding = padding_mask.unsqueeze(-1)
        x = x.masked_fill(padding, 0)
        read = self._read(x.reshape(-1, x.size(-1)), tokens.reshape(-1))
        # this also zeroes the gradient of what padding read
        return read.view(x.shape).masked_fill(padding, 0)

    def _read(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map ``x`` (N, d) to (N, d); ``tokens`` (N,), if given, is false for padding."""
        x = self.input_dropout(x)
        # (N, d) -> (N, H, d_q)
        queries = self.query_network(x) if tokens is None else self.query_network(x, tokens)
        # (N, H, d_q) -> scores and slots (N, H, k) (equation 1)
        scores, slots = self.keys(queries, self.knn)
        # (equation 2)
        weights = scores.softmax(-1)
        if self.usage is not None:
            self.usage.record(slots, weights, tokens)
        # one sum over heads and slots: (N, H, k) -> (N, H·k) -> (N, d_v) (equation 3)
        summed = self.table.read(
            slots.flatten(1),
            weights.flatten(1),
            plain=needs_plain_operations(self.search, x),
            sparse=self.sparse,
            frozen=self.frozen_slots,
            training=self.training,
        )
        summed = self.value_dropout(summed.to(x.dtype))
        if self.output_norm is not None:
            summed = self.output_norm(summed)
        if self.gate is not None:
            summed = summed * F.silu(self.gate(x))
        return summed if self.projection is None else self.projection(summed)

    def train_only(self, slots: Tensor | None) -> None:
        """Train only the values of ``slots``, booleans (K,); None trains all."""
        if slots is not None and (
            slots.dtype != torch.bool or slots.shape != self.values.shape[:1]
        ):
            raise ValueError(
                f"`slots` are {slots.dtype} of shape {tuple(slots.shape)}: give booleans, one for "
                f"each of {len(self.values)} slots"
            )
        self.frozen_slots = None if slots is None else ~slots.to(self.values.device)

    def keep_gradient_beside_autograd(self) -> None:
        """Hide the values from training code that would hold a dense gradient of all K slots.

        A backward pass still adds a sparse gradient of the rows that were read to ``values.grad``
        (:mod:`.values`). The next update reuses its memory: copy it to keep it.
        """
        self.table.keep_gradient_beside_autograd()

    def gather_values(self) -> None:
        """Gather sharded values on worker 0 for one ``state_dict()``; all workers must call it."""
        if self.owns_values:
            self.table.gather()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ProductKeyMemory:
        before = self.values.data
        super()._apply(fn, recurse)
        if self._table.stays_bf16 and self.values.dtype != before.dtype:
            self.values.data = before.to(self.values.device)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = prefix + "values"
        if self.owns_values:
            destination[name] = self._table.saved(destination[name])
        else:
            del destination[name]

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = prefix + "values"
        others = {key: value for key, value in state_dict.items() if key != name}
        given = name in state_dict
        if self.owns_values and given:
            others[name] = self._table.columns.own(state_dict[name])
        problems = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(others, prefix, local_metadata, strict, *problems)
        if strict and not self.owns_values:
            # the memory that owns the values loads them
            missing_keys.remove(name)
            unexpected_keys.extend([name] if given else [])


def packs_tokens(x: Tensor, training: bool) -> bool:
    """Return whether to remove padding from ``x`` before a memory reads, which saves work.

    An accelerator makes the host wait for the number of tokens, which would slow training down;
    compilers and meta tensors have no such number. The answer does not depend on whether gradients
    are on, so that a recomputed pass does as the first one did.
    """
    fixed_shapes = torch.compiler.is_compiling() or x.is_meta
    return not fixed_shapes and (x.device.type == "cpu" or not training)


class MemorySublayer(nn.Module):
    """A memory as a sublayer of a transformer, which adds its output to its input (section 3.3)."""

    takes_padding = True  # layers pass the padding mask to it

    def __init__(self, memory: ProductKeyMemory) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d); ``padding_mask`` (…) is true for padding."""
        return self.memory(x, padding_mask)


def _check_input(width: int, x: Tensor, padding_mask: Tensor | None) -> None:
    if x.dim() == 0 or x.size(-1) != width:
        raise ValueError(
            f"a memory of width {width} got an input of shape {tuple(x.shape)}: its last dimension "
            f"must be {width}"
        )
    if padding_mask is None:
        return
    if padding_mask.dtype != torch.bool or padding_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"a memory got a `padding_mask` of {padding_mask.dtype}, {tuple(padding_mask.shape)}, "
            f"with an input of shape {tuple(x.shape)}: give booleans, {tuple(x.shape[:-1])}"
        )


def _check_numbers(
    sizes: dict[str, int], query_hidden_dims: Sequence[int], dropouts: dict[str, float]
) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` is {size}: it must be at least 1")
    if sizes["knn"] > sizes["slots"]:
        raise ValueError(f"`knn` is {sizes['knn']}: it must be at most `slots`, {sizes['slots']}")
    for width in query_hidden_dims:
        if width < 1:
            raise ValueError(f"`query_hidden_dims` has {width}: widths are at least 1")
    for name, dropout in dropouts.items():
        if not 0 <= dropout < 1:
            raise ValueError(f"`{name}` is {dropout}: it must be in [0, 1)")


def _check_choices(keys: str, search: str, values_dtype: torch.dtype | None) -> None:
    if values_dtype not in (None, torch.bfloat16):
        raise ValueError(f"`values_dtype` is {values_dtype}: give torch.bfloat16, or None")
    for name, chosen, known in [("keys", keys, KEYS), ("search", search, SEARCHES)]:
        if chosen not in known:
            raise ValueError(f"`{name}` is {chosen!r}: there are {', '.join(known)}")
    if search == "faiss":
        import_faiss()


def _check_shared(slots: int, value_dim: int, theirs: tuple[int, int]) -> None:
    for name, one, other in zip(("slots", "value_dim"), (slots, value_dim), theirs, strict=True):
        if one != other:
            raise ValueError(
                f"`{name}` is {one}, and {other} in the memory whose values are shared: give both "
                f"the same `{name}`"
            )
