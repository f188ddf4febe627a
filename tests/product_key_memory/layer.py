"""Memories without a model around them, for equations and for optimizers."""

import torch
from torch import nn

from fairseq_plugins.product_key_memory.lazy_adam import LazyMemory
from fairseq_plugins.product_key_memory.memory import MemoryOutput, ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig
from fairseq_plugins.product_key_memory.query import QueryNetwork
from tests.optimizers import adam_options, in_precision

# width and slots of the memories in double precision, and the tokens that they read
D, K, TOKENS = 6, 25, 7
PADDING = torch.tensor([False, True, False, False, True, True, False])
BATCH_NORM = {"query": {"batch_norm": True}}
EVERYTHING = {
    "query": {"hidden_dims": (5, 3), "batch_norm": True},
    "output": {"gate": True},
    "value_dim": 3,
}


def build_memory(
    embed_dim, heads, query_dim, query=None, output=None, kind=ProductKeyMemory, **options
):
    """Build a memory; ``query`` and ``output`` are options of its query network and its output."""
    if query:
        options["query"] = QueryNetwork(embed_dim, heads, query_dim, **query)
    if output:
        value_dim = options.get("value_dim") or embed_dim
        options["output"] = MemoryOutput(embed_dim, value_dim, **output)
    return kind(embed_dim, heads=heads, query_dim=query_dim, **options)


def exact_memory(seed=1, heads=2, query_dim=4, **options):
    """Build a memory in double precision: 2 heads read 4 slots each; all weights are random."""
    torch.manual_seed(seed)
    memory = build_memory(D, heads, query_dim, **{"slots": K, "knn": 4, **options}).double()
    # norms are initialized to 0 or 1
    if (norm := memory.query.batch_norm) is not None:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return memory


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# width and slots of the memories that are trained
WIDTH, SLOTS = 8, 64


def make_memory(slots=SLOTS, knn=3, seed=1, **choices):
    """Build a memory for adam_with_memory."""
    torch.manual_seed(seed)
    return build_memory(WIDTH, 2, 4, slots=slots, knn=knn, kind=LazyMemory, **choices)


class Pair(nn.Module):
    """Two memories in sequence; the second shares the values of the first."""

    def __init__(self, seed=1, **choices):
        super().__init__()
        self.first = make_memory(seed=seed, **choices)
        choices |= {"slots": SLOTS, "knn": 3, "values": self.first.values}
        self.second = build_memory(WIDTH, 1, 6, kind=LazyMemory, **choices)

    @property
    def values(self):
        return self.first.values

    def forward(self, x):
        return self.second(x + self.first(x))


def adam_with_memory(model, precision=None, common=None, **choices):
    choices = {"_name": "adam_with_memory", "lr": [0.01], **choices}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = adam_options(AdamWithMemoryConfig, **choices)
    return in_precision(options, learned, precision, **(common or {}))


def learn(memory, optimizer, updates=5, tokens=4, seed=2):
    """Train the memory, with another random batch in each update."""
    torch.manual_seed(seed)
    for _ in range(updates):
        optimizer.zero_grad()
        x, wanted = torch.randn(2, tokens, WIDTH).to(memory.values.weight.dtype)
        optimizer.backward((memory(x) - wanted).float().square().sum())
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(100.0)
        optimizer.step()
