"""Memories without a model around them, for equations and for optimizers."""

import torch
from torch import nn

from fairseq_plugins.product_key_memory.memory import MemoryOutput, ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import (
    AdamWithMemoryConfig,
    FairseqAdamWithMemory,
    hide_from_fairseq,
)
from fairseq_plugins.product_key_memory.query import QueryNetwork
from tests.optimizers import adam_options

# width and slots of the memories in double precision, and the tokens that they read
D, K, TOKENS = 6, 25, 7
PADDING = torch.tensor([False, True, False, False, True, True, False])
# arguments of the query network and of the output
QUERY = {"hidden_dims", "batch_norm", "layer_norm", "query_dropout", "input_dropout"}
OUTPUT = {"norm", "gate", "value_dropout"}
EVERYTHING = {
    "hidden_dims": (5, 3),
    "batch_norm": True,
    "layer_norm": True,
    "value_dim": 3,
    "norm": True,
    "gate": True,
}


def build_memory(embed_dim, heads, query_dim, **options):
    """Build a memory; options may be those of its query network and its output."""
    query = {name: value for name, value in options.items() if name in QUERY}
    output = {name: value for name, value in options.items() if name in OUTPUT}
    rest = {name: options[name] for name in options.keys() - QUERY - OUTPUT}
    for arguments, name in ((query, "query_dropout"), (output, "value_dropout")):
        if name in arguments:
            arguments["dropout"] = arguments.pop(name)
    if query:
        rest["query"] = QueryNetwork(embed_dim, heads, query_dim, **query)
    if output:
        rest["output"] = MemoryOutput(embed_dim, options.get("value_dim") or embed_dim, **output)
    return ProductKeyMemory(embed_dim, heads=heads, query_dim=query_dim, **rest)


def exact_memory(seed=1, heads=2, query_dim=4, **options):
    """Build a memory in double precision: 2 heads read 4 slots each; all weights are random."""
    torch.manual_seed(seed)
    memory = build_memory(D, heads, query_dim, **{"slots": K, "knn": 4, **options}).double()
    # norms are initialized to 0 or 1
    for norm in [*memory.query.children(), *memory.output.children()]:
        if isinstance(norm, nn.LayerNorm) or hasattr(norm, "running_mean"):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        if hasattr(norm, "running_mean"):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return memory


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# width and slots of the memories that are trained
WIDTH, SLOTS = 8, 64


def hide_values(memory):
    """Keep the values' gradient beside autograd, for adam_with_memory."""
    hide_from_fairseq(memory)
    return memory


def make_memory(apart=True, slots=SLOTS, knn=3, seed=1, **choices):
    torch.manual_seed(seed)
    memory = build_memory(WIDTH, 2, 4, slots=slots, knn=knn, **choices)
    return hide_values(memory) if apart else memory


class Pair(nn.Module):
    """Two memories in sequence; the second shares the values of the first."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    @property
    def values(self):
        return self.first.values

    def forward(self, x):
        return self.second(x + self.first(x))


def make_pair(apart=True, slots=SLOTS, knn=3, seed=1, **choices):
    first = make_memory(apart, slots, knn, seed, **choices)
    second = build_memory(WIDTH, 1, 6, slots=slots, knn=knn, values=first.values, **choices)
    return Pair(first, hide_values(second) if apart else second)


def dense(memory):
    return [parameter for parameter in memory.parameters() if parameter.requires_grad]


def adam_with_memory(memory, **choices):
    options = adam_options(AdamWithMemoryConfig, **{"lr": [0.01], **choices})
    return FairseqAdamWithMemory(options, dense(memory))


def learn(memory, optimizer, updates=5, tokens=4, after=lambda update: None, seed=2):
    """Train the memory, with another random batch in each update, and return it."""
    torch.manual_seed(seed)
    dtype = dense(memory)[-1].dtype
    for update in range(updates):
        optimizer.zero_grad()
        x, wanted = torch.randn(2, tokens, WIDTH).to(dtype)
        optimizer.backward((memory(x) - wanted).float().square().sum())
        after(update)
        optimizer.step()
    return memory
