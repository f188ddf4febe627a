"""Transformer-XL layer and network, one query at a time (Dai et al. 2019, section 3.3)."""

import functools
import math

import torch

from tests.reference.all_attention import attend, embed, feed_forward, layer_norm, output


def sinusoid(number, width):
    """Return R of one number: d / 2 sines, then d / 2 cosines."""
    frequencies = [10_000 ** (-2 * n / width) for n in range(width // 2)]
    return torch.tensor(
        [math.sin(number * f) for f in frequencies] + [math.cos(number * f) for f in frequencies],
        dtype=torch.float64,
    )


def attention(layer, x, context, seen, encode, shared=None):
    """Compute the sublayer for one stream: x (T, d), the end of context (M + T, d).

    ``seen(distance)``: whether a key is visible; ``encode(head, distance)``: its position key;
    ``shared``: u and v of layers without their own.
    """
    outputs, biases = [], layer.biases or shared
    for head in range(x.size(1) // layer.head_dim):
        rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        projections = (layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context)
        q, k, v = (y @ projection.weight[rows].T for projection, y in projections)
        # queries for terms a and c of the score, and for b and d
        content_q = positions_q = q
        if biases is not None:
            content_q, positions_q = q + biases.u[head], q + biases.v[head]
        encode_head = functools.partial(encode, head)
        outputs.append(attend(content_q, k, v, encode_head, seen, position_q=positions_q))
    return torch.cat(outputs, dim=1) @ layer.out_proj.weight.T


def encoder(layer, clamp_len=None):
    """Return ``encode`` for a layer's attention, from its distance table."""
    table = layer.position_projection
    if table is None:
        return lambda head, distance: torch.zeros(layer.head_dim, dtype=torch.float64)

    def encode(head, distance):
        if clamp_len is not None:
            distance = min(distance, clamp_len)
        if hasattr(table, "proj"):
            width = table.proj.weight.size(1)
            rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            return table.proj.weight[rows] @ sinusoid(distance, width)
        return table.weight[head, min(distance, table.farthest)]

    return encode


def run_segment(network, x, past=None, seen=lambda distance: True, clamp_len=None):
    """Return y (T, d) and each layer's inputs, for a segment x (T, d) of one stream.

    ``past`` has each layer's inputs (M, d) of the tokens before it.
    """
    absolute, inputs = network.absolute_positions, []
    for index, layer in enumerate(network.layers):
        if absolute is not None and hasattr(absolute, "weight"):
            x = x + absolute.weight[index, : len(x)]
        elif absolute is not None and index == 0:
            x = x + torch.stack([sinusoid(number, x.size(1)) for number in range(len(x))])
        context = x if past is None else torch.cat([past[index], x])
        inputs.append(context)
        rest = seen, encoder(layer.self_attn, clamp_len), network.layers[0].self_attn.biases
        norms = layer.self_attn_layer_norm, layer.final_layer_norm
        first, second = ((norm.weight, norm.bias) for norm in norms)
        if layer.normalize_before:
            y = layer_norm(context, *first)
            x = x + attention(layer.self_attn, y[len(y) - len(x) :], y, *rest)
            x = x + feed_forward(layer.feed_forward, layer_norm(x, *second))
        else:
            x = layer_norm(x + attention(layer.self_attn, x, context, *rest), *first)
            x = layer_norm(x + feed_forward(layer.feed_forward, x), *second)
    norm = network.layer_norm
    return (x if norm is None else layer_norm(x, norm.weight, norm.bias)), inputs


def network(decoder, tokens, seen, clamp_len=None):
    """Return scores (T, V) of a whole stream at once: tokens (T,), without context before them."""
    y, _ = run_segment(decoder.network, embed(decoder, tokens), None, seen, clamp_len)
    return output(decoder, y)
