"""The layers that the benchmark of product-key memories compares, and the memory that they take.

Shapes: N tokens, H heads, k slots read by a head, K slots, n = √K sub-keys of each half, R = H·k
reads of a token, U rows of values that are read at least once, d model width, d_q query width.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemory
from scripts._shared.machine import peak_memory
from scripts.benchmark._original import OriginalMemory
from scripts.benchmark._report import AUTOCAST, BF16, ORIGINAL, Entry

WIDTH = 512
QUERY_WIDTH = 256
# Rows that all reads are restricted to where the table's size alone is to make a difference.
FIXED_ROWS = 16384
LEARNING_RATE, MEMORY_LEARNING_RATE, BETAS = 2.5e-4, 1e-3, (0.9, 0.98)

STEP = ("forward", "backward", "update")
SEARCH, TRAINING_STEP, INFERENCE = "search", "training step", "inference"
FIXED, FIXED_SEARCHED = "fixed rows", "fixed rows, searched"


class MemoryModels(NamedTuple):
    """Names of the layers: ours, those with EmbeddingBag, what a memory replaces, the published."""

    ours: str = "ProductKeyMemory"
    dense: str = "EmbeddingBag"
    sparse: str = "EmbeddingBag-sparse"
    feed_forward: str = "feed-forward"
    original: str = ORIGINAL
    original_sparse: str = f"{ORIGINAL}-sparse"


MODELS = MemoryModels()


class MemoryCase(NamedTuple):
    """Sizes of a memory and of what it reads: K, H, k, N."""

    slots: int
    heads: int
    knn: int
    tokens: int

    @property
    def reads(self) -> int:
        """Rows that all tokens read, with repetitions."""
        return self.tokens * self.heads * self.knn

    @property
    def parameters(self) -> int:
        """Numbers in the query network and the sub-keys."""
        queries = self.heads * QUERY_WIDTH
        return (WIDTH + 1) * queries + math.isqrt(self.slots) * queries

    def table_bytes(self, dtype: str) -> int:
        """Bytes of the values, which have the dtype of the weights."""
        return self.slots * WIDTH * (2 if dtype == BF16 else 4)

    @property
    def setting(self) -> str:
        """Heads, slots read by a head and tokens, with slashes between."""
        return f"{self.heads}/{self.knn}/{self.tokens}"

    def __str__(self) -> str:
        return f"{self.slots} slots, {self.setting}"


class Cost(NamedTuple):
    """What a part of a step must do at least: bytes that it moves, multiply-adds."""

    moved: int = 0
    multiply_adds: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.moved + other.moved, self.multiply_adds + other.multiply_adds)


def costs(case: MemoryCase, model: str, rows: int, dtype: str) -> dict[str, Cost]:
    """Least costs of each part of a step, were every input read and every result written once.

    A read of a slot has its number, of 8 bytes, and its score; a row of values is moved once,
    however many tokens read it. An update reads gradient, both means and weight, and writes all but
    the gradient. The products: queries N·d·H·d_q, scores N·H·n·d_q, values N·R·d; as many again for
    the gradient of each factor, but of scores only that of the k selected ones is not zero.

    Args:
        case: the sizes.
        model: one of MODELS.
        rows: U.
        dtype: of the weights.
    """
    number = 2 if dtype == BF16 else 4
    activations = case.tokens * WIDTH * number
    if model == MODELS.feed_forward:
        weights = (8 * WIDTH**2 + 5 * WIDTH) * number
        products = 8 * case.tokens * WIDTH**2
        forward = Cost(2 * activations + weights, products)
        backward = Cost(3 * activations + 2 * weights, 2 * products)
        return _of_parts(forward, backward, Cost(7 * weights))
    n, of_queries = math.isqrt(case.slots), case.tokens * case.heads * QUERY_WIDTH
    weights = case.parameters * number
    found = case.reads * (8 + number)
    values = rows * WIDTH * number
    search = Cost(activations + weights + found, of_queries * (WIDTH + n))
    read = Cost(found + values + activations, case.reads * WIDTH)
    unread = Cost(
        # the gradient that comes in; those of scores and rows
        activations + found + values + case.reads * number + values + 8 * rows,
        2 * case.reads * WIDTH,
    )
    unsearch = Cost(
        found + 2 * activations + 2 * weights, 2 * of_queries * (WIDTH + min(case.knn, n))
    )
    of_rows = Cost(7 * values + 8 * rows)
    parts = _of_parts(search + read, unread + unsearch, of_rows + Cost(7 * weights))
    fixed = {FIXED: read + unread + of_rows, FIXED_SEARCHED: parts[TRAINING_STEP]}
    return {SEARCH: search, **parts, **fixed}


def _of_parts(forward: Cost, backward: Cost, update: Cost) -> dict[str, Cost]:
    step = dict(zip(STEP, (forward, backward, update), strict=True))
    return {**step, TRAINING_STEP: forward + backward + update, INFERENCE: forward}


def state_bytes(case: MemoryCase, model: str, dtype: str) -> int:
    """Bytes that training an entry takes beside the table of values."""
    table, number = case.slots * WIDTH, 2 if dtype == BF16 else 4
    if model == MODELS.feed_forward:
        return 0
    if model == MODELS.ours:
        # two means in single precision, and a table in single precision beside another
        return (3 if dtype == BF16 else 2) * 4 * table
    if model in (MODELS.sparse, MODELS.original_sparse):
        # two means, and three times a gradient for each read
        return number * (2 * table + 3 * case.reads * WIDTH)
    # two means, the gradient, and as much again while it is updated
    return 4 * number * table


class PlainKeys(nn.Module):
    """Product keys as the paper describes them, head by head, with all k² sums of two halves.

    Args:
        subkeys: (H, 2, n, d_q/2), which are copied.
    """

    def __init__(self, subkeys: Tensor) -> None:
        super().__init__()
        self.subkeys = nn.Parameter(subkeys.detach().clone())

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k) that fit ``queries`` (N, H, d_q) best."""
        found = [
            self._search(of_head, subkeys, k)
            for of_head, subkeys in zip(queries.unbind(1), self.subkeys, strict=True)
        ]
        scores, slots = zip(*found, strict=True)
        return torch.stack(scores, dim=1), torch.stack(slots, dim=1)

    def _search(self, queries: Tensor, subkeys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        n = subkeys.size(1)
        (first, one), (second, other) = (
            F.linear(half, keys).topk(min(k, n))
            for half, keys in zip(queries.chunk(2, dim=-1), subkeys, strict=True)
        )
        sums = (first.unsqueeze(2) + second.unsqueeze(1)).flatten(1)
        slots = (one.unsqueeze(2) * n + other.unsqueeze(1)).flatten(1)
        scores, best = sums.topk(k)
        return scores, slots.gather(1, best)


class PlainMemory(nn.Module):
    """The same memory of ``nn.EmbeddingBag``, with a dense or a sparse gradient of its values.

    Args:
        memory: with whose weights it begins; the values' are its own, which saves gigabytes.
        sparse: whether the values get a sparse gradient.
    """

    def __init__(self, memory: ProductKeyMemory, sparse: bool) -> None:
        super().__init__()
        linear = copy.deepcopy(memory.query_network.layers)
        self.query_network = nn.Sequential(*linear, nn.Unflatten(1, (memory.heads, -1)))
        self.keys = PlainKeys(memory.keys.subkeys)
        self.values = nn.EmbeddingBag.from_pretrained(
            memory.values.detach(), freeze=False, mode="sum", sparse=sparse
        )
        self.knn = memory.knn

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, d) to (N, d)."""
        scores, slots = self.keys(self.query_network(x), self.knn)
        weights = scores.float().softmax(-1).to(self.values.weight.dtype)
        read = self.values(slots.flatten(1), per_sample_weights=weights.flatten(1))
        return read.to(x.dtype)


class FixedSlots(nn.Module):
    """Stands in place of keys and reads given slots, with scores of keys or with its own.

    Args:
        slots: (N, H, k).
        keys: that are searched all the same; None for no search.
        dtype: of the scores that need no search.
    """

    def __init__(self, slots: Tensor, keys: nn.Module | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.slots, self.keys = slots, keys
        if keys is None:
            # they get a gradient, as scores do
            self.scores = nn.Parameter(torch.zeros(slots.shape, dtype=dtype, device=slots.device))

    def forward(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores of whatever slots and the given slots, both (N, H, k)."""
        return (self.scores if self.keys is None else self.keys(queries, k)[0]), self.slots


def draw_fixed_slots(case: MemoryCase, generator: torch.Generator) -> Tensor:
    """Slots (N, H, k) that are FIXED_ROWS rows at random places, each read as often."""
    rows = min(FIXED_ROWS, case.slots)
    places = torch.randperm(case.slots, generator=generator)[:rows]
    order = torch.randperm(case.reads, generator=generator) % rows
    return places[order].view(case.tokens, case.heads, case.knn)


class SteppedLayer:
    """An entry's layer and optimizers, which takes the parts of a step one after the other.

    Args:
        entry: which layer, in which dtype.
        module: the layer.
        optimizers: of all its parameters.
        x: what it reads, (N, d).
        grad: of its output, (N, d).
    """

    def __init__(
        self,
        entry: Entry,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        x: Tensor,
        grad: Tensor,
    ) -> None:
        self.entry, self.module, self.optimizers = entry, module, optimizers
        # the layers below are to learn as well
        self.x, self.grad = x.clone().requires_grad_(), grad
        self.output: Tensor | None = None
        # the query network and the keys, which fixed slots replace
        self._found_by = [getattr(module, name, None) for name in ("query_network", "keys")]

    def _autocast(self) -> torch.autocast:
        enabled = self.entry.dtype == AUTOCAST
        return torch.autocast(self.x.device.type, dtype=torch.bfloat16, enabled=enabled)

    def forward(self) -> None:
        """Compute the output, to learn from it."""
        self.module.train()
        with self._autocast():
            self.output = self.module(self.x)

    def backward(self) -> None:
        """Compute the gradients."""
        self.output.backward(self.grad)
        self.output = None

    def update(self) -> None:
        """Update the weights and clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def step(self) -> None:
        """Take a whole training step."""
        self.forward()
        self.backward()
        self.update()

    @torch.no_grad()
    def infer(self) -> Tensor:
        """Return the output (N, d), not to learn from it."""
        self.module.eval()
        with self._autocast():
            return self.module(self.x)

    @torch.no_grad()
    def search(self) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k), from the input on."""
        with self._autocast():
            return self.module.keys(self.module.query_network(self.x), self.module.knn)

    def fix_slots(self, slots: Tensor, searched: bool) -> None:
        """Read ``slots`` (N, H, k) from now on, after a search or without one."""
        query_network, keys = self._found_by
        self.module.query_network = query_network if searched else nn.Identity()
        self.module.keys = FixedSlots(slots, keys if searched else None, self.x.dtype)


def build_layers(
    case: MemoryCase,
    entries: list[Entry],
    device: torch.device,
    original_class: type[nn.Module] | None = None,
) -> list[SteppedLayer]:
    """The entries, all of one dtype, with the same weights, input and output gradient.

    Memories hold their values in one table together: each would otherwise need another.
    """
    torch.manual_seed(1)
    dtype = torch.bfloat16 if entries[0].dtype == BF16 else torch.float32
    memory = ProductKeyMemory(WIDTH, case.slots, case.heads, case.knn, QUERY_WIDTH)
    memory.to(device, dtype)
    x, grad = (torch.randn(case.tokens, WIDTH).to(device, dtype) for _ in range(2))
    rates = {"lr": LEARNING_RATE, "betas": BETAS}

    def build(model: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        if model == MODELS.feed_forward:
            layers = nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
            module = nn.Sequential(*layers).to(device, dtype)
            return module, [torch.optim.Adam(module.parameters(), **rates)]
        if model == MODELS.ours:
            memory.keep_gradient_beside_autograd()
            learned = [weight for weight in memory.parameters() if weight.requires_grad]
            return memory, [AdamWithMemory(learned, [memory.table], MEMORY_LEARNING_RATE, **rates)]
        sparse = model in (MODELS.sparse, MODELS.original_sparse)
        if model in (MODELS.original, MODELS.original_sparse):
            module = OriginalMemory(original_class, memory, sparse)
        else:
            module = PlainMemory(memory, sparse)
        table = {"params": [module.values.weight], "lr": MEMORY_LEARNING_RATE, "betas": BETAS}
        rest = [weight for weight in module.parameters() if weight is not module.values.weight]
        if sparse:
            return module, [torch.optim.SparseAdam([table]), torch.optim.Adam(rest, **rates)]
        return module, [torch.optim.Adam([table, {"params": rest}], **rates)]

    return [SteppedLayer(entry, *build(entry.model), x, grad) for entry in entries]


class LargestAllocation(TorchDispatchMode):
    """Keeps in ``bytes`` the size of the largest tensor that an operation has allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # views and results in place have the memory of an argument
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage.data_ptr() not in given:
                self.bytes = max(self.bytes, storage.nbytes())
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    parts = [[x._indices(), x._values()] if x.is_sparse else [x] for x in tensors]
    return [part.untyped_storage() for of_tensor in parts for part in of_tensor]


def step_memory(
    case: MemoryCase,
    entry: Entry,
    device: torch.device,
    original_class: type[nn.Module] | None = None,
) -> dict[str, int]:
    """Bytes that training adds to this process at most, and of a step's largest new tensor."""
    before = peak_memory(device)
    (layer,) = build_layers(case, [entry], device, original_class)
    for _ in range(2):
        layer.step()
    peak = peak_memory(device) - before
    # the first step allocated the optimizer's state, which stays
    with LargestAllocation() as largest:
        layer.step()
    return {"peak_bytes": peak, "largest_bytes": largest.bytes}
