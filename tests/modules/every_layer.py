"""What every layer of ``fairseq_plugins.modules`` computes, from nothing but that import."""

import sys

import torch
from torch import nn

from fairseq_plugins import modules as m

WIDTH, HEADS, STREAMS, TOKENS = 12, 3, 2, 5


def _segment_layer(attention, positions, memory=None):
    """Outputs of two segments, the second with the first one's memory, with and without grads."""
    dropout = nn.Dropout(0.0)
    layer = m.SegmentLayer(
        WIDTH, attention, m.FeedForward(WIDTH, 24, dropout), dropout, added_sublayer=memory
    )
    segments = torch.randn(2, STREAMS, TOKENS, WIDTH)
    outputs = []
    for enabled in (True, False):
        past = None
        for x in segments:
            with torch.set_grad_enabled(enabled):
                terms = attention.project_positions(positions(2 * TOKENS - 1))
                y, state = layer(x, terms, past)
            past = state.last(TOKENS)
            outputs.append(y)
    outputs[1].square().mean().backward()
    return [*outputs, *(p.grad for p in layer.parameters() if p.grad is not None)]


def _relative_attention():
    keys, biases = m.RelativeKeyProjection(WIDTH, HEADS), m.PositionBiases(HEADS, WIDTH // HEADS)
    attention = m.RelativeAttention(WIDTH, HEADS, m.Window(0, 7), keys, biases)
    return _segment_layer(attention, m.SinusoidalRelativePositions(WIDTH))


def _all_attention():
    span = m.AdaptiveSpan(HEADS, 7, ramp=4, initial=0.3)
    attention = m.AllAttention(
        WIDTH, HEADS, m.Window(1, 7), m.SharedRelativeKeys(), num_persistent=6, span=span
    )
    return _segment_layer(attention, m.LearnedRelativePositions(7, WIDTH // HEADS))


def _memory():
    memory = m.ProductKeyMemory(WIDTH, slots=16, heads=2, knn=3, query_dim=4)
    y = memory(torch.randn(STREAMS, TOKENS, WIDTH))
    y.square().sum().backward()
    return [y, *(p.grad for p in memory.parameters())]


def _branched_attention():
    heads = m.AttentionHeads(WIDTH, HEADS)
    attention = m.BranchedAttention(heads, m.BranchedFeedForward(WIDTH, 24, m.BranchWeights(HEADS)))
    x = torch.randn(TOKENS, STREAMS, WIDTH)
    y, weights = attention(x, x, x)
    y.square().sum().backward()
    with torch.no_grad():
        for parameter in attention.feed_forward.weights.parameters():
            parameter.sub_(parameter.grad)
            m.project_to_simplex(parameter)
    return [y, weights, *attention.feed_forward.weights(), *(p.grad for p in heads.parameters())]


def outputs():
    """Tensors by the name of what computed them."""
    found = {}
    for compute in (_relative_attention, _all_attention, _memory, _branched_attention):
        torch.manual_seed(1)
        found[compute.__name__] = [tensor.detach() for tensor in compute()]
    return found


if __name__ == "__main__":
    torch.save(outputs(), sys.argv[1])
