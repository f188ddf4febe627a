"""Transformer-XL layer and network, one pair (i, j) at a time (Dai et al. 2019, section 3.3)."""

import math

import torch

from tests.reference.all_attention import layer_norm


def sinusoid(place, width):
    """R at one place: d / 2 sines, then d / 2 cosines."""
    frequencies = [10_000 ** (-2 * n / width) for n in range(width // 2)]
    return torch.tensor(
        [math.sin(place * f) for f in frequencies] + [math.cos(place * f) for f in frequencies],
        dtype=torch.float64,
    )


def attention(layer, x, context, seen, encode):
    """The sublayer for one stream: x (T, d), context (M + T, d), both ending alike.

    ``seen(distance)`` says whether a key is visible, ``encode(head, distance)`` is the position
    key, or None where there is none. Terms a to d of the score are summed one by one.
    """
    before = context.size(0) - x.size(0)
    outputs = []
    for head in range(layer.num_heads):
        rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        q = x @ layer.q_proj.weight[rows].T
        k = context @ layer.k_proj.weight[rows].T
        v = context @ layer.v_proj.weight[rows].T
        of_head = []
        for i in range(x.size(0)):
            scores, read = [], []
            for j in range(context.size(0)):
                distance = before + i - j
                if distance < 0 or not seen(distance):
                    continue
                score = q[i] @ k[j]
                if layer.biases is not None:
                    score = score + layer.biases.u[head] @ k[j]
                position = encode(head, distance)
                if position is not None:
                    score = score + q[i] @ position
                    if layer.biases is not None:
                        score = score + layer.biases.v[head] @ position
                scores.append(score / math.sqrt(layer.head_dim))
                read.append(v[j])
            exponentials = [torch.exp(s) for s in scores]
            total = sum(exponentials)
            of_head.append(sum(e / total * r for e, r in zip(exponentials, read, strict=True)))
        outputs.append(torch.stack(of_head))
    return torch.cat(outputs, dim=1) @ layer.out_proj.weight.T


def encoder(layer, clamp_len=None):
    """The ``encode`` of a layer's attention, from its distance table."""
    table = layer.position_projection
    if table is None:
        return lambda head, distance: None

    def encode(head, distance):
        if clamp_len is not None:
            distance = min(distance, clamp_len)
        if hasattr(table, "proj"):
            width = table.proj.weight.size(1)
            rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            return table.proj.weight[rows] @ sinusoid(distance, width)
        return table.weight[head, min(distance, table.farthest)]

    return encode


def network(decoder, tokens, seen, clamp_len=None):
    """Scores (T, V) of a whole stream read at once: tokens (T,), nothing before them."""
    x = decoder.embed_scale * torch.stack([decoder.embed_tokens.weight[t] for t in tokens])
    width = x.size(1)
    for index, layer in enumerate(decoder.layers):
        absolute = decoder.absolute_positions
        if absolute is not None and hasattr(absolute, "weight"):
            x = x + absolute.weight[index, : len(tokens)]
        elif absolute is not None and index == 0:
            x = x + torch.stack([sinusoid(place, width) for place in range(len(tokens))])
        encode = encoder(layer.self_attn, clamp_len)
        norm = layer.self_attn_layer_norm
        feed_forward, other = layer.feed_forward, layer.final_layer_norm

        def inner(y, f=feed_forward):
            return torch.clamp(y @ f.fc1.weight.T + f.fc1.bias, min=0) @ f.fc2.weight.T + f.fc2.bias

        if layer.normalize_before:
            y = layer_norm(x, norm.weight, norm.bias)
            x = x + attention(layer.self_attn, y, y, seen, encode)
            x = x + inner(layer_norm(x, other.weight, other.bias))
        else:
            attended = attention(layer.self_attn, x, x, seen, encode)
            x = layer_norm(x + attended, norm.weight, norm.bias)
            x = layer_norm(x + inner(x), other.weight, other.bias)
    if decoder.layer_norm is not None:
        x = layer_norm(x, decoder.layer_norm.weight, decoder.layer_norm.bias)
    scores = x @ decoder.output_projection.weight.T
    bias = decoder.output_projection.bias
    return scores if bias is None else scores + bias
