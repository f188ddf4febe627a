"""All-attention layer and network, token by token (Sukhbaatar et al. 2019, sections 3 to 5)."""

import math

import torch


def softmax(scores, masks=1.0, epsilon=0.0):
    """Return weights exp(s)·m / Σ exp(s)·m for scores (C,) with masks (C,).

    With epsilon, a·m / (Σ a·m + ε), where a = exp(s) / Σ exp(s), as in the published code.
    """
    exponentials = torch.exp(scores)
    masked = exponentials * masks
    return masked / (masked.sum() + epsilon * exponentials.sum())


def soft_mask(z, ramp):
    """Return m_z by distance; the nearest key has distance 1, so x = 0 (section 4.3)."""
    return lambda distances: torch.clamp((ramp + z - (distances - 1)) / ramp, 0, 1)


def attend(q, k, v, encode, seen, m_k=None, m_v=None, mask=None, joint=True, epsilon=0.0):
    """Compute one head of equations 12 and 13 over one stream, one query at a time.

    q (T, d_h); k, v (M + T, d_h), the last T of them the queries' own tokens; encode: distance ->
    d_h; seen: distance -> whether a key is visible; m_k, m_v (N, d_h): persistent keys and values;
    mask: distances (C,) -> m (C,); joint: one softmax over context and persistent vectors, or one
    over each (section 5.3); epsilon: for the softmax with masks. Returns (T, d_h).
    """
    m_k, m_v = (q[:0], q[:0]) if m_k is None else (m_k, m_v)
    before = k.size(0) - q.size(0)
    scale = math.sqrt(q.size(1))
    reach = [distance for distance in range(k.size(0)) if seen(distance)]
    positions = torch.stack([*map(encode, reach)]) if reach else q[:0]
    rows = []
    for t in range(q.size(0)):
        distances = [distance for distance in reach if distance <= before + t]
        keys = [before + t - distance for distance in distances]
        # the nearest key comes first, as in `positions`
        scores = (k[keys] @ q[t] + positions[: len(keys)] @ q[t]) / scale
        masks = torch.ones_like(scores) if mask is None else mask(q.new_tensor(distances))
        persistent = m_k @ q[t] / scale
        if joint:
            scores = torch.cat([scores, persistent])
            masks = torch.cat([masks, masks.new_ones(len(m_k))])
            rows.append(softmax(scores, masks, epsilon) @ torch.cat([v[keys], m_v]))
        else:
            attended = softmax(scores, masks, epsilon) @ v[keys]
            rows.append(attended + softmax(persistent) @ m_v)
    return torch.stack(rows)


def vectors(persistent, head):
    """Return √d_h·m_k and √N·m_v of a head (section 5.1)."""
    _, count, width = persistent.keys.shape
    return math.sqrt(width) * persistent.keys[head], math.sqrt(count) * persistent.values[head]


def multi_head(layer, x, context, u, span):
    """Compute equation 14's sublayer for one stream: x (T, d), the end of context (M + T, d)."""
    heads = []
    count = x.size(1) // layer.head_dim
    see_context = count // 2 if layer.variant == "head-split" else count
    for h in range(count):
        rows = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        m_k = m_v = None
        if layer.persistent is not None:
            if layer.variant in ("all", "attn-split"):
                m_k, m_v = vectors(layer.persistent, h)
            elif layer.variant == "head-split" and h >= see_context:
                m_k, m_v = vectors(layer.persistent, h - see_context)
        seen = context if h < see_context else context[:0]
        mask, epsilon = None, 0.0
        if layer.span is not None and h < see_context:
            mask = soft_mask(layer.span.value[h] * layer.span.max_span, layer.span.ramp)
            epsilon = layer.span.epsilon

        def visible(distance):
            return layer.window.nearest <= distance <= span

        projections = (layer.q_proj, x), (layer.k_proj, seen), (layer.v_proj, seen)
        projected = [y @ projection.weight[rows].T for projection, y in projections]
        joint = layer.variant == "all"
        heads.append(attend(*projected, u, visible, m_k, m_v, mask, joint, epsilon))
    attended = torch.cat(heads, dim=1)
    if layer.persistent is not None and layer.variant == "single-head":
        nothing = x[:0]
        q, both = x @ layer.q_proj.weight.T, vectors(layer.persistent, 0)
        attended = attended + attend(q, nothing, nothing, u, bool, *both)
    return attended @ layer.out_proj.weight.T


def softmax_feed_forward(layer, x):
    """Compute equation 9, U softmax(V x), with V and U from reparameterised persistent vectors."""
    # V_i = m_k, since the keys' scale √d and the queries' 1/√d cancel
    keys = layer.persistent.keys[0]
    values = math.sqrt(len(keys)) * layer.persistent.values[0]
    return torch.stack([softmax(keys @ x_t) @ values for x_t in x])


def layer_norm(x, weight, bias, eps=1e-5):
    """Normalise vectors x (…, d) by their mean and standard deviation."""
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def feed_forward(layer, x):
    """Compute equation 5, or equation 9 for ff-attn."""
    if hasattr(layer, "persistent"):
        return softmax_feed_forward(layer, x)
    inner = torch.clamp(x @ layer.fc1.weight.T + layer.fc1.bias, min=0)
    return inner @ layer.fc2.weight.T + layer.fc2.bias


def embed(decoder, tokens):
    """Return embeddings (T, d) of tokens (T,)."""
    return decoder.embed_scale * torch.stack([decoder.embed_tokens.weight[t] for t in tokens])


def output(decoder, x):
    """Return scores (T, V) for the last layer's output x (T, d)."""
    scores = x @ decoder.output_projection.weight.T
    bias = decoder.output_projection.bias
    return scores if bias is None else scores + bias


def run_segment(network, x, past=None, span=None):
    """Return y (T, d) and each layer's inputs, for a segment x (T, d) of one stream.

    ``past`` has each layer's inputs (M, d) of the tokens before it.
    """
    positions, inputs = network.positions, []

    def u(distance):
        return positions.weight[min(distance, positions.farthest) - 1]

    for index, layer in enumerate(network.layers):
        context = x if past is None else torch.cat([past[index], x])
        inputs.append(context)
        farthest = layer.self_attn.window.farthest if span is None else span
        attended = multi_head(layer.self_attn, x, context, u, farthest)
        norm = layer.self_attn_layer_norm
        x = layer_norm(x + attended, norm.weight, norm.bias)
        if layer.feed_forward is not None:
            norm = layer.final_layer_norm
            x = layer_norm(x + feed_forward(layer.feed_forward, x), norm.weight, norm.bias)
    return x, inputs


def network(decoder, tokens, span):
    """Return scores (T, V) of a whole stream at once: tokens (T,), without context before them."""
    y, _ = run_segment(decoder.network, embed(decoder, tokens), None, span)
    return output(decoder, y)
