"""A product-key memory beside layers that do the same, and the sublayer that it replaces.

Shapes: N tokens, H heads, k slots read by a head, n = √K sub-keys of each half, d model width.
"""

import copy
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam

from benchmarks.measure import AUTOCAST, BF16, FP32, PUBLISHED, TRAINING, Case, Entry, Work
from benchmarks.published import PublishedMemory
from fairseq_plugins.modules import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemory

OURS, DENSE, SPARSE = "ProductKeyMemory", "EmbeddingBag", "EmbeddingBag, sparse"
PUBLISHED_SPARSE, FEED_FORWARD = f"{PUBLISHED}, sparse", "feed-forward"
LUCIDRAINS = "lucidrains' PKM"
WIDTH, QUERY_WIDTH = 512, 256
RATES = {"lr": 2.5e-4, "betas": (0.9, 0.98)}
MEMORY_RATE = 1e-3


class PlainMemory(nn.Module):
    """The memory of ``nn.EmbeddingBag`` as the paper describes it, with all k² sums of two halves.

    Args:
        memory: with whose weights it begins; the values' are its own, which saves gigabytes.
        sparse: whether the values get a sparse gradient.
    """

    def __init__(self, memory: ProductKeyMemory, sparse: bool) -> None:
        super().__init__()
        self.query_network = copy.deepcopy(memory.query_network.layers)
        # (H, 2, n, d_q/2)
        self.subkeys = nn.Parameter(memory.keys.subkeys.detach().clone())
        self.values = nn.EmbeddingBag.from_pretrained(
            memory.values.detach(), freeze=False, mode="sum", sparse=sparse
        )
        self.knn = memory.knn

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, d) to (N, d)."""
        heads, _, n, _ = self.subkeys.shape
        for layer in self.query_network:
            x = layer(x)
        halves = x.view(len(x), heads, 2, -1)
        # (N, H, 2, n) -> (N, H, 2, k)
        best, numbers = torch.einsum("nhsd,hsid->nhsi", halves, self.subkeys).topk(self.knn)
        sums = (best[:, :, 0, :, None] + best[:, :, 1, None]).flatten(2)
        slots = (numbers[:, :, 0, :, None] * n + numbers[:, :, 1, None]).flatten(2)
        scores, pairs = sums.topk(self.knn)
        weights = scores.float().softmax(-1).to(self.values.weight.dtype).flatten(1)
        return self.values(slots.gather(2, pairs).flatten(1), per_sample_weights=weights)


class InBatches(nn.Module):
    """A layer of (B, T, d) over (N, d)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.values = layer, layer.values

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, d) to (N, d)."""
        return self.layer(x[None])[0]


class MemoryCase(Case):
    """Sizes of a memory and of what it reads.

    Args:
        slots: K.
        mode: TRAINING, which is forward, backward and update, or EVALUATION.
        heads: H.
        knn: k.
        tokens: N.
        title: what a plot calls the layer.
    """

    paper = "product_key_memory"
    models = (OURS, DENSE, SPARSE, FEED_FORWARD, LUCIDRAINS)
    same = (DENSE, SPARSE, PUBLISHED, PUBLISHED_SPARSE)
    tolerance = 1e-5
    # of two all but equal scores either may be the last
    agreeing = 0.99

    def __init__(
        self,
        slots: int,
        mode: str,
        heads: int = 4,
        knn: int = 32,
        tokens: int = 2048,
        title: str = "",
    ) -> None:
        name = f"{slots:,} slots, {heads} heads, {knn} slots a head"
        super().__init__(name, mode, tokens, title)
        self.slots, self.heads, self.knn = slots, heads, knn

    def present(self) -> list[str]:
        """Layers whose packages are installed."""
        there = importlib.util.find_spec("product_key_memory") is not None
        return [model for model in self.models if there or model != LUCIDRAINS]

    def entries(self, dtypes: Sequence[str], published: Mapping[str, Any]) -> list[Entry]:
        """Who takes part: the published code in every dtype, with both kinds of gradient."""
        theirs = (PUBLISHED, PUBLISHED_SPARSE) if self.paper in published else ()
        chosen = [Entry(model, dtype) for dtype in dtypes for model in (*self.present(), *theirs)]
        # it fails under autocast
        return [entry for entry in chosen if entry != Entry(LUCIDRAINS, AUTOCAST)]

    def build(
        self, entries: Sequence[Entry], device: torch.device, published: Mapping[str, Any]
    ) -> list[Work]:
        """Return what the entries do; memories of a dtype hold one table of values together."""
        memories: dict[str, ProductKeyMemory] = {}
        works = []
        for entry in entries:
            torch.manual_seed(1)
            weights = BF16 if entry.dtype == BF16 else FP32
            if weights not in memories:
                memory = ProductKeyMemory(WIDTH, self.slots, self.heads, self.knn, QUERY_WIDTH)
                memories[weights] = entry.prepare(memory, device)
            memory = memories[weights]
            module, optimizers = self._build(entry.model, memory, published.get(self.paper))
            module = entry.prepare(module, device)
            torch.manual_seed(2)
            x, grad = torch.randn(2, self.tokens, WIDTH).to(memory.values)
            works.append(self._work(entry, module, optimizers(module), x, grad))
        return works

    def _build(self, model: str, memory: ProductKeyMemory, published: Any) -> tuple:
        """Return a layer, and what makes its optimizers."""
        if model == OURS:

            def with_memory(_: nn.Module) -> list[Optimizer]:
                memory.keep_gradient_beside_autograd()
                learned = [weight for weight in memory.parameters() if weight.requires_grad]
                return [AdamWithMemory(learned, [memory.table], MEMORY_RATE, **RATES)]

            return memory, with_memory
        if model == FEED_FORWARD:
            layers = nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
            return nn.Sequential(*layers), lambda module: [Adam(module.parameters(), **RATES)]
        sparse = model in (SPARSE, PUBLISHED_SPARSE)
        if model == LUCIDRAINS:
            from product_key_memory import PKM

            sizes = {"num_keys": math.isqrt(self.slots), "topk": self.knn}
            module = InBatches(PKM(WIDTH, heads=self.heads, dim_head=QUERY_WIDTH // 2, **sizes))
        elif model in (DENSE, SPARSE):
            module = PlainMemory(memory, sparse)
        else:
            module = PublishedMemory(published, memory, sparse)

        def of_table(module: nn.Module) -> list[Optimizer]:
            values = module.values.weight
            rest = [weight for weight in module.parameters() if weight is not values]
            table = {"params": [values], "lr": MEMORY_RATE, "betas": RATES["betas"]}
            if sparse:
                return [SparseAdam([table]), Adam(rest, **RATES)]
            return [Adam([table, {"params": rest}], **RATES)]

        return module, of_table

    def _work(
        self,
        entry: Entry,
        module: nn.Module,
        optimizers: list[Optimizer],
        x: Tensor,
        grad: Tensor,
    ) -> Work:
        # the layers below are to learn as well
        x = x.clone().requires_grad_()

        def train() -> None:
            module.train()
            with entry.precision(x.device):
                output = module(x)
            output.backward(grad.to(output.dtype))
            for optimizer in optimizers:
                optimizer.step()
            module.zero_grad(set_to_none=True)
            x.grad = None

        def infer() -> Tensor:
            module.eval()
            with entry.precision(x.device, training=False):
                return module(x.detach())

        return Work(train if self.mode == TRAINING else infer, infer)
