"""Small networks of both papers in float64, with random weights, and texts that they read."""

import torch
from torch import nn

from fairseq_plugins.modules import (
    AllAttentionBlock,
    AllAttentionNetwork,
    TransformerXL,
    TransformerXLBlock,
)

STREAMS, TOKENS, WIDTH, SPAN = 2, 12, 16, 6
# each learns from and reads back as far as TOKENS
BUILDERS = {
    "TransformerXL": lambda **options: TransformerXL(3, WIDTH, 2, 24, TOKENS, **options),
    "TransformerXLBlock": lambda **options: TransformerXLBlock(WIDTH, 2, 24, TOKENS, **options),
    "AllAttentionNetwork": lambda **options: AllAttentionNetwork(3, WIDTH, 4, 5, SPAN, **options),
    "AllAttentionBlock": lambda **options: AllAttentionBlock(WIDTH, 4, 5, SPAN, **options),
}
NETWORKS = ["TransformerXL", "AllAttentionNetwork"]


def build(name, **options):
    """Build a network; the heads of all-attention have different spans."""
    torch.manual_seed(1)
    network = BUILDERS[name](**options).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    for layer in network.layers:
        span = getattr(layer.self_attn, "span", None)
        if span is not None:
            span.ramp = 2
            span.value.data = torch.tensor([0.05, 0.6, 0.07, 0.3], dtype=torch.float64)
    return network


def draw(*shape, seed=2):
    """Draw vectors (…, d); by default the whole text (B, T, d)."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (STREAMS, TOKENS)
    return torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)


def read_segments(network, segments, past=None):
    """Read segments (B, T_i, d) one after another; return all outputs (B, T, d) and the past."""
    outputs = []
    for segment in segments:
        y, past = network(segment, past)
        outputs.append(y)
    return torch.cat(outputs, dim=1), past
