"""All-attention layer and network, token by token (Sukhbaatar et al. 2019, sections 3 to 5)."""

import math

import torch


def softmax(scores, masks, epsilon=0.0):
    """Weights exp(s)·m / Σ exp(s)·m of lists of scores and of mask values.

    With epsilon w·m / (Σ w·m + ε) of w = exp(s) / Σ exp(s), as the published code has it.
    """
    exponentials = [torch.exp(s) for s in scores]
    masked = [e * m for e, m in zip(exponentials, masks, strict=True)]
    total = sum(masked)
    if epsilon:
        total = total + epsilon * sum(exponentials)
    return [e / total for e in masked]


def mean(weights, values):
    """Σ w·v."""
    return sum(w * value for w, value in zip(weights, values, strict=True))


def soft_mask(z, ramp):
    """m_z of the distance to a key, the nearest one at distance 1: x = 0 (section 4.3)."""
    return lambda distance: torch.clamp((ramp + z - (distance - 1)) / ramp, 0, 1)


def computed(span):
    """How far the published code computes scores: it drops 64 distances at a time."""
    widest = math.ceil(max(span.value.tolist()) * span.max_span) + span.ramp
    reach = span.max_span
    while reach - 64 >= widest:
        reach -= 64
    return reach


def attend(
    q, k, v, encode, seen, m_k=(), m_v=(), mask=None, joint=True, epsilon=0.0, position_q=None
):
    """One head of equations 12 and 13 over one stream, one query and one key at a time.

    q (T, d_h); k, v (M + T, d_h), the last T of them the queries' own tokens; encode: distance ->
    d_h, or None; seen: distance -> whether a key is visible; m_k, m_v: lists of persistent keys and
    values; mask: distance -> m; joint: one softmax over context and persistent vectors, or one over
    each (section 5.3); epsilon: see softmax, of what has a mask; position_q: of scores by distance,
    if not q. Returns (T, d_h).
    """
    position_q = q if position_q is None else position_q
    before = k.size(0) - q.size(0)
    scale = math.sqrt(q.size(1))
    rows = []
    for t in range(q.size(0)):
        scores, masks, read = [], [], []
        for c in range(k.size(0)):
            distance = before + t - c
            if distance >= 0 and seen(distance):
                score, position = q[t] @ k[c], encode(distance)
                if position is not None:
                    score = score + position_q[t] @ position
                scores.append(score / scale)
                masks.append(1.0 if mask is None else mask(distance))
                read.append(v[c])
        persistent = [q[t] @ key / scale for key in m_k]
        row = torch.zeros_like(q[t])
        if joint and scores + persistent:
            weights = softmax(scores + persistent, masks + [1.0] * len(m_k), epsilon)
            row = row + mean(weights, read + list(m_v))
        if not joint and scores:
            row = row + mean(softmax(scores, masks, epsilon), read)
        if not joint and persistent:
            row = row + mean(softmax(persistent, [1.0] * len(m_k)), m_v)
        rows.append(row)
    return torch.stack(rows)


def vectors(persistent, head):
    """√d_h·m_k and √N·m_v of a head, as lists (section 5.1)."""
    _, count, width = persistent.keys.shape
    keys = [math.sqrt(width) * m for m in persistent.keys[head]]
    return keys, [math.sqrt(count) * m for m in persistent.values[head]]


def multi_head(layer, x, context, u, span):
    """Equation 14's sublayer for one stream: x (T, d), context (M + T, d), both ending alike."""
    heads = []
    see_context = layer.num_heads // 2 if layer.variant == "head-split" else layer.num_heads
    for h in range(layer.num_heads):
        rows = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        m_k, m_v = [], []
        if layer.persistent is not None:
            if layer.variant in ("all", "attn-split"):
                m_k, m_v = vectors(layer.persistent, h)
            elif layer.variant == "head-split" and h >= see_context:
                m_k, m_v = vectors(layer.persistent, h - see_context)
        seen = context if h < see_context else context[:0]
        mask, farthest, epsilon = None, span, 0.0
        if layer.span is not None and h < see_context:
            mask = soft_mask(layer.span.value[h] * layer.span.max_span, layer.span.ramp)
            epsilon = layer.span.epsilon
            farthest = min(span, computed(layer.span)) if epsilon else span

        def visible(distance, farthest=farthest):
            return layer.window.nearest <= distance <= farthest

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
    """Equation 9: U softmax(V x), V and U reparameterised as persistent keys and values."""
    count = layer.persistent.keys.size(1)
    rows = []
    for t in range(x.size(0)):
        # V_i = m_k, and its scale √d over the queries' √d is 1
        scores = [x[t] @ m for m in layer.persistent.keys[0]]
        values = [math.sqrt(count) * m for m in layer.persistent.values[0]]
        rows.append(mean(softmax(scores, [1.0] * count), values))
    return torch.stack(rows)


def layer_norm(x, weight, bias, eps=1e-5):
    """Normalise vectors x (…, d) by their mean and standard deviation."""
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def feed_forward(layer, x):
    """Equation 5, or equation 9 for ff-attn."""
    if hasattr(layer, "persistent"):
        return softmax_feed_forward(layer, x)
    inner = torch.clamp(x @ layer.fc1.weight.T + layer.fc1.bias, min=0)
    return inner @ layer.fc2.weight.T + layer.fc2.bias


def embed(decoder, tokens):
    """Embeddings (T, d) of tokens (T,)."""
    return decoder.embed_scale * torch.stack([decoder.embed_tokens.weight[t] for t in tokens])


def output(decoder, x):
    """Scores (T, V) of what the last layer puts out, (T, d)."""
    scores = x @ decoder.output_projection.weight.T
    bias = decoder.output_projection.bias
    return scores if bias is None else scores + bias


def network(decoder, tokens, span):
    """Scores (T, V) of a whole stream at once: tokens (T,), nothing before them."""
    x = embed(decoder, tokens)

    def u(distance):
        return decoder.positions.weight[min(distance, decoder.positions.farthest) - 1]

    for layer in decoder.layers:
        attended = multi_head(layer.self_attn, x, x, u, span)
        norm = layer.self_attn_layer_norm
        x = layer_norm(x + attended, norm.weight, norm.bias)
        if layer.feed_forward is not None:
            norm = layer.final_layer_norm
            x = layer_norm(x + feed_forward(layer.feed_forward, x), norm.weight, norm.bias)
    return output(decoder, x)
