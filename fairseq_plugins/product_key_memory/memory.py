"""Product-key memory: a layer with many slots of values, of which each token reads a few.

Lample et al. 2019 (arXiv:1907.05242), section 3. :mod:`.query` makes queries of a token,
:mod:`.keys` selects the slots whose keys fit them best, :mod:`.values` sums the values of these. It
is a plain module, for any model::

    from fairseq_plugins.modules import ProductKeyMemory

    memory = ProductKeyMemory(512, slots=512**2, query_batch_norm=True)
    y = x + memory(x)  # x (…, 512)

With ``sparse=True`` the values get sparse gradients for ``torch.optim.SparseAdam``, as those of
``nn.Embedding(sparse=True)``.

Beyond that paper, Berges et al. 2024 (Memory Layers at Scale, arXiv:2412.09764): several memories
with the same values, and the output gate of their "Memory+" layer, ``(y ⊙ SiLU(x W₁)) W₂``, where x
is the layer's input and y the sum of values.

Shapes: N tokens without padding, H heads, k slots read by a head, K slots, d model width, d_q query
width, d_v value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.forward_passes import is_recomputed
from fairseq_plugins.product_key_memory.keys import (
    KEY_SEARCHES,
    PLAIN,
    FlatKeys,
    ProductKeys,
)
from fairseq_plugins.product_key_memory.query import QueryNetwork
from fairseq_plugins.product_key_memory.search import import_faiss
from fairseq_plugins.product_key_memory.sharding import (
    MemoryTable,
    draw_values,
    sharded_weighted_sum,
)
from fairseq_plugins.product_key_memory.usage import MemoryUsage
from fairseq_plugins.product_key_memory.values import (
    SpareRows,
    add_row_gradients,
    gradient_to_keep,
    plain_weighted_sum,
    weighted_sum,
)

KEYS = {"product": ProductKeys, "flat": FlatKeys}


class ProductKeyMemory(nn.Module):
    """Sum, over heads, of the values of the best k of K slots, weighted by a softmax.

    Equations 1 to 3, section 3.3. The heads share the values, which are drawn from N(0, 1/d_v).

    Args:
        embed_dim: d.
        slots: K; a square number for product keys.
        heads: H.
        knn: k.
        query_dim: d_q; even for product keys.
        value_dim: d_v; values of another width than d are mapped to it. None for d.
        query_hidden_dims: widths of the query network's hidden layers.
        query_batch_norm: normalise queries over the tokens; see :class:`.query.QueryNetwork`.
        query_layer_norm: normalise each query over its dimensions.
        query_dropout: dropout of the queries.
        input_dropout: dropout of the input.
        value_dropout: dropout of the sum of values.
        keys: "product", or "flat" for the ablation.
        search: "torch" or "faiss"; or "plain" for the equations as they stand, in operations that
            autograd knows, which is slower. With dense gradients it runs under ``torch.compile``
            and has higher derivatives.
        sparse: make the values' gradient a sparse tensor of the rows that were read.
        values_dtype: ``torch.bfloat16`` for values that stay in it, whatever the memory is cast to;
            :class:`.LazyAdam` then keeps no copy of them, see :mod:`.bf16_values`. None for values
            that are cast with the memory.
        shard_values: with several workers (``torch.distributed``), give each some of the values'
            columns; see :mod:`.sharding`.
        output_norm: normalise the sum of values over its dimensions.
        output_gate: multiply the sum of values by SiLU(x W₁) and map it by W₂, d_v to d; neither
            map has a bias.
        zero_init: start with an output of zero: the last map has zeros, or the norm's weight where
            there is none, or the values where there is neither. With ``values_of`` and neither map
            nor norm the output is what the shared values make it.
        values_of: the memory whose values this one reads and learns too, with the slots and the
            width of these; a ``state_dict()`` of both has them once, as those of ``values_of``.
            None for values of its own.

    Raises:
        ValueError: a number is out of range, ``keys`` or ``search`` is unknown, faiss is not
            installed, or the values of ``values_of`` have another shape.
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
        _check(locals())
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
            self._table = draw_values(slots, value_dim, std, shard_values, values_dtype)
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
        if zero_init and (self.projection or self.output_norm) is not None:
            for parameter in (self.projection or self.output_norm).parameters():
                nn.init.zeros_(parameter)
        self.knn = knn
        self.heads = heads
        self.sparse = sparse
        self.plain = search == PLAIN
        self.usage: MemoryUsage | None = None
        self.register_buffer("frozen_slots", None, persistent=False)
        self._gradient_beside_autograd = False

    @property
    def table(self) -> MemoryTable:
        """Return the values with what optimizers and checkpoints need to know of them."""
        # casting and loading may have replaced the parameter
        self._table.values = self.values
        return self._table

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d).

        Args:
            x: any number of tokens.
            padding_mask: (…), true for padding, which batch norm leaves out, which reads nothing
                and gets zeros. None for no padding.

        Returns:
            (…, d).
        """
        if padding_mask is None:
            return self._read(x.reshape(-1, x.size(-1))).view(x.shape)
        tokens = ~padding_mask
        if packs_tokens(x, self.training):
            read = self._read(x[tokens])
            return read.new_zeros(x.shape).masked_scatter(tokens.unsqueeze(-1), read)
        padding = padding_mask.unsqueeze(-1)
        x = x.masked_fill(padding, 0)
        read = self._read(x.reshape(-1, x.size(-1)), tokens.reshape(-1))
        # padding has no gradient then, and its reads none either
        return read.view(x.shape).masked_fill(padding, 0)

    def _read(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map ``x`` (N, d) to (N, d); ``tokens`` (N,) is false for padding, None for no padding."""
        x = self.input_dropout(x)
        # (N, d) -> (N, H, d_q)
        queries = self.query_network(x) if tokens is None else self.query_network(x, tokens)
        # (N, H, d_q) -> scores and slots (N, H, k) (equation 1)
        scores, slots = self.keys(queries, self.knn)
        # (equation 2)
        weights = scores.softmax(-1)
        if self.usage is not None:
            self.usage.record(slots, weights, tokens)
        # heads are summed as slots are: (N, H, k) -> (N, H·k) -> (N, d_v) (equation 3)
        summed = self._sum_values(slots.flatten(1), weights.flatten(1))
        summed = self.value_dropout(summed.to(x.dtype))
        if self.output_norm is not None:
            summed = self.output_norm(summed)
        if self.gate is not None:
            summed = summed * F.silu(self.gate(x))
        return summed if self.projection is None else self.projection(summed)

    def _sum_values(self, slots: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums (N, d_v) of ``slots`` (N, H·k)."""
        values = self._leaf()
        if self.plain and self._table.shard is None:
            return plain_weighted_sum(values, slots, weights, self.sparse, self.frozen_slots)
        weigh = weighted_sum if self._table.shard is None else sharded_weighted_sum
        return weigh(values, slots, weights, self.sparse, self._table.spare, self.frozen_slots)

    def train_only(self, slots: Tensor | None) -> None:
        """Let only the values of some slots learn, such as those that are rarely read.

        The others get no gradient from this memory. Keys and queries learn as before.

        Args:
            slots: (K,), true for slots that learn; None for all. A ``state_dict()`` leaves it out.

        Raises:
            ValueError: it has another length than K, or no booleans.
        """
        if slots is not None and (
            slots.dtype != torch.bool or slots.shape != self.values.shape[:1]
        ):
            raise ValueError(
                f"`slots` are {slots.dtype} of shape {tuple(slots.shape)}: give booleans, one for "
                f"each of {len(self.values)} slots"
            )
        self.frozen_slots = None if slots is None else ~slots.to(self.values.device)

    def keep_gradient_beside_autograd(self) -> None:
        """Hide the values from training code that would hold a dense gradient for all K slots.

        ``values.requires_grad`` becomes false. A backward pass still adds the gradient of the rows
        that were read to ``values.grad``, as a sparse tensor; on accelerators it is padded, see
        :mod:`.values`. :class:`.LazyAdam` uses its buffer again after an update: copy what is to be
        kept.
        """
        self.values.requires_grad_(False)
        self._table.spare = SpareRows(len(self.values))
        self.sparse = True
        self._gradient_beside_autograd = True

    def gather_values(self) -> None:
        """Gather sharded values on worker 0, for one ``state_dict()`` of all columns.

        All workers must call it. Values of another memory are left to that one.
        """
        if self.owns_values:
            self.table.gather()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ProductKeyMemory:
        before = self.values.data
        super()._apply(fn, recurse)
        if self._table.rounded and self.values.dtype != before.dtype:
            self.values.data = before.to(self.values.device)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.owns_values:
            del destination[prefix + "values"]
        elif self._table.shard is not None:
            if self._table.gathered is None:
                raise ValueError(
                    "the values are sharded over workers, and have not been gathered: call "
                    "gather_values() on all workers before state_dict() on worker 0"
                )
            destination[prefix + "values"], self._table.gathered = self._table.gathered, None

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
        values, shard = state_dict.get(name), self._table.shard
        problems = (missing_keys, unexpected_keys, error_msgs)
        if not self.owns_values:
            # the owner loads them: those of a memory of its own have no place here
            others = {key: value for key, value in state_dict.items() if key != name}
            super()._load_from_state_dict(others, prefix, local_metadata, strict, *problems)
            if strict:
                missing_keys.remove(name)
                unexpected_keys.extend([name] if values is not None else [])
            return
        if shard is not None and values is not None and values.size(1) == shard.width:
            state_dict = {**state_dict, name: shard.of(values)}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *problems)

    def _leaf(self) -> Tensor:
        """Return the values, or a leaf tensor of autograd that stands for them in this pass."""
        if not (self._gradient_beside_autograd and torch.is_grad_enabled() and self.training):
            return self.values
        # training code may clear only the gradients that it knows of: where no keys have one, a
        # pass that failed has left this one
        of_keys = [next(keys.parameters()) for keys in self._table.readers]
        learned = [parameter for parameter in of_keys if parameter.requires_grad]
        cleared = learned and all(parameter.grad is None for parameter in learned)
        if cleared and not is_recomputed():
            self.values.grad = None
        leaf = self.values.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._add_gradient)
        return leaf

    def _add_gradient(self, leaf: Tensor) -> None:
        """Move the gradient of ``leaf`` to that of the values."""
        grad, leaf.grad = leaf.grad, None
        grad = gradient_to_keep(grad, plain=self.plain and self._table.shard is None)
        if self.values.grad is not None:
            grad = add_row_gradients(self.values.grad, grad)
        self.values.grad = grad


def packs_tokens(x: Tensor, training: bool) -> bool:
    """Return whether padding is taken out of ``x`` before a memory reads.

    That saves work. But an accelerator makes the host wait for the number of tokens, which in
    training would hold up the passes behind it. A pass that is recomputed must do as the first one
    did, which had no gradients.
    """
    return x.device.type == "cpu" or not training


class MemorySublayer(nn.Module):
    """A memory as a sublayer of a transformer, whose output is added to its input (section 3.3).

    Args:
        memory: of the transformer's width.
    """

    def __init__(self, memory: ProductKeyMemory) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (…, d) to (…, d); ``padding_mask`` (…) is true for padding."""
        return self.memory(x, padding_mask)


def _check(arguments: dict[str, Any]) -> None:
    """Raise ``ValueError`` for arguments of :class:`ProductKeyMemory` out of range."""
    for name in ("slots", "heads", "knn", "query_dim", "value_dim"):
        if arguments[name] < 1:
            raise ValueError(f"`{name}` is {arguments[name]}: it must be at least 1")
    if arguments["knn"] > arguments["slots"]:
        raise ValueError(
            f"`knn` is {arguments['knn']}: it must be at most `slots`, {arguments['slots']}"
        )
    for width in arguments["query_hidden_dims"]:
        if width < 1:
            raise ValueError(f"`query_hidden_dims` has {width}: widths are at least 1")
    for name in ("query_dropout", "input_dropout", "value_dropout"):
        if not 0 <= arguments[name] < 1:
            raise ValueError(f"`{name}` is {arguments[name]}: it must be in [0, 1)")
    if arguments["values_dtype"] not in (None, torch.bfloat16):
        raise ValueError(
            f"`values_dtype` is {arguments['values_dtype']}: give torch.bfloat16, or None"
        )
    for name, known in [("keys", KEYS), ("search", KEY_SEARCHES)]:
        if arguments[name] not in known:
            raise ValueError(f"`{name}` is {arguments[name]!r}: there are {', '.join(known)}")
    if arguments["values_of"] is not None:
        shape = arguments["slots"], arguments["value_dim"]
        for name, ours, theirs in zip(
            ("slots", "value_dim"), shape, arguments["values_of"].table.shape, strict=True
        ):
            if ours != theirs:
                raise ValueError(
                    f"`{name}` is {ours}, and {theirs} in the memory whose values are shared: give "
                    f"both the same `{name}`"
                )
    if arguments["search"] == "faiss":
        import_faiss()
