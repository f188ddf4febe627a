"""Memories without a model around them, for equations and for optimizers."""

import torch
from torch import nn

from fairseq_plugins.fairseq_integration.parameters import set_update_rule
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig, FairseqAdamWithMemory
from tests.optimizers import adam_options

# width and slots of the memories in double precision, and the tokens that they read
D, K, TOKENS = 6, 25, 7
PADDING = torch.tensor([False, True, False, False, True, True, False])
EVERYTHING = {
    "query_hidden_dims": (5, 3),
    "query_batch_norm": True,
    "query_layer_norm": True,
    "value_dim": 3,
    "output_norm": True,
    "output_gate": True,
}


def exact_memory(seed=1, **options):
    """Build a memory in double precision: 2 heads read 4 slots each; all weights are random."""
    torch.manual_seed(seed)
    sizes = {"slots": K, "heads": 2, "knn": 4, "query_dim": 4}
    memory = ProductKeyMemory(D, **{**sizes, **options}).double()
    # norms are initialized to 0 or 1
    for norm in [*memory.query_network.children(), memory.output_norm]:
        if hasattr(norm, "bias"):
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
    memory.keep_gradient_beside_autograd()
    set_update_rule(memory.keys.subkeys, memory.table)
    return memory


def make_memory(apart=True, slots=SLOTS, knn=3, seed=1, **choices):
    torch.manual_seed(seed)
    memory = ProductKeyMemory(WIDTH, slots=slots, heads=2, knn=knn, query_dim=4, **choices)
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
    second = ProductKeyMemory(
        WIDTH, slots=slots, heads=1, knn=knn, query_dim=6, values_of=first, **choices
    )
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
