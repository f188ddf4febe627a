"""Compute outputs of the layers with no import but ``fairseq_plugins.modules`` and torch."""

import sys

import torch

from fairseq_plugins import modules as m

WIDTH, HEADS, STREAMS, TOKENS = 12, 3, 2, 5


LAYERS = {
    "transformer_xl": lambda: m.TransformerXL(2, WIDTH, HEADS, 24, mem_len=7),
    "all_attention": lambda: m.AllAttentionNetwork(2, WIDTH, HEADS, 6, span=7),
    "memory": lambda: m.ProductKeyMemory(WIDTH, slots=16, heads=2, knn=3, query_dim=4),
    "weighted_encoder": lambda: m.WeightedEncoderLayer(WIDTH, HEADS, 24),
    "weighted_decoder": lambda: m.WeightedDecoderLayer(WIDTH, HEADS, 24),
}


def outputs():
    """Return outputs, with and without gradients, and gradients; networks read two segments."""
    results = {}
    for name, build in LAYERS.items():
        torch.manual_seed(1)
        layer = build()
        segments, computed = torch.randn(2, STREAMS, TOKENS, WIDTH), []
        for enabled in (True, False):
            layer.train(enabled)
            past = None
            for x in segments:
                with torch.set_grad_enabled(enabled):
                    if name in ("memory", "weighted_encoder"):
                        y = layer(x)
                    elif name == "weighted_decoder":
                        y = layer(x, segments[0])
                    else:
                        y, past = layer(x, past)
                computed.append(y)
                if enabled:
                    y.square().mean().backward()
        for parameter in layer.parameters():
            parameter.data -= parameter.grad
            computed.append(parameter.grad)
        if name == "weighted_encoder":
            m.project_to_simplex(layer.fc2.weights.alpha)
            computed.append(layer.fc2.weights())
        results[name] = [tensor.detach() for tensor in computed]
    return results


if __name__ == "__main__":
    torch.save(outputs(), sys.argv[1])
