"""Transformer-XL layer and network, one query and key at a time (Dai et al. 2019, section 3)."""

import math

import torch


def sinusoid(number, width):
    """Return R of one number: d / 2 sines, then d / 2 cosines."""
    frequencies = [10_000 ** (-2 * n / width) for n in range(width // 2)]
    return torch.tensor(
        [math.sin(number * f) for f in frequencies] + [math.cos(number * f) for f in frequencies],
        dtype=torch.float64,
    )


def attention(layer, x, context, seen, encode, shared=None):
    """Compute the attention of section 3.3 for one stream: x (T, d), the end of context (M + T, d).

    ``seen(distance)``: whether a key is visible; ``encode(head, distance)``: W_kR R of a distance;
    ``shared``: u and v of layers without their own.
    """
    width, biases, before = layer.head_dim, layer.biases or shared, len(context) - len(x)
    heads = []
    for head in range(x.size(1) // width):
        rows = slice(head * width, (head + 1) * width)
        projections = (layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context)
        q, k, v = (y @ projection.weight[rows].T for projection, y in projections)
        u, v_bias = (0, 0) if biases is None else (biases.u[head], biases.v[head])
        r = [encode(head, distance) for distance in range(len(context))]
        outputs = []
        for i, query in enumerate(q, before):
            visible = [j for j in range(i + 1) if seen(i - j)]
            # terms a and c, then b and d
            scores = [(query + u) @ k[j] + (query + v_bias) @ r[i - j] for j in visible]
            weights = torch.stack(scores).div(math.sqrt(width)).exp()
            outputs.append(weights @ v[visible] / weights.sum())
        heads.append(torch.stack(outputs))
    return torch.cat(heads, dim=1) @ layer.out_proj.weight.T


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


def layer_norm(norm, x):
    """Scale and shift vectors x (T, d) with mean 0 and variance 1."""
    centered = x - x.mean(dim=1, keepdim=True)
    variance = centered.pow(2).mean(dim=1, keepdim=True)
    return norm.weight * centered / (variance + norm.eps).sqrt() + norm.bias


def feed_forward(layer, x):
    """Compute the positionwise feed-forward network, W_2 relu(W_1 x + b_1) + b_2."""
    inner = (x @ layer.fc1.weight.T + layer.fc1.bias).clamp(min=0)
    return inner @ layer.fc2.weight.T + layer.fc2.bias


def run_segment(
    network,
    x,
    past=None,
    seen=lambda distance: True,
    clamp_len=None,
    pre_norm=False,
    last_norm=None,
):
    """Return y (T, d) and each layer's inputs, for a segment x (T, d) of one stream.

    ``past`` has each layer's inputs (M, d) of the tokens before it. With ``pre_norm`` norms precede
    the sublayers, and ``last_norm`` follows the last one.
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
        first, second = layer.self_attn_layer_norm, layer.final_layer_norm
        if pre_norm:
            y = layer_norm(first, context)
            x = x + attention(layer.self_attn, y[len(y) - len(x) :], y, *rest)
            x = x + feed_forward(layer.feed_forward, layer_norm(second, x))
        else:
            x = layer_norm(first, x + attention(layer.self_attn, x, context, *rest))
            x = layer_norm(second, x + feed_forward(layer.feed_forward, x))
    return (x if last_norm is None else layer_norm(last_norm, x)), inputs


def network(decoder, tokens, seen, clamp_len=None, pre_norm=False, last_norm=None):
    """Return scores (T, V) of a whole stream at once: tokens (T,), without context before them."""
    embeddings = torch.stack([decoder.embed_tokens.weight[t] for t in tokens])
    x, norms = decoder.embed_scale * embeddings, (pre_norm, last_norm)
    y, _ = run_segment(decoder.network, x, None, seen, clamp_len, *norms)
    scores, bias = y @ decoder.output_projection.weight.T, decoder.output_projection.bias
    return scores if bias is None else scores + bias
