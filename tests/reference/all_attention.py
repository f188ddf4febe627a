"""All-attention layer and network, token by token (Sukhbaatar et al. 2019, sections 3 and 4)."""

import math

import torch


def attend(q, k, v, u, m_k, m_v, span, include_self=False):
    """One head of equations 12 and 13 over one stream, one query and one key at a time.

    q (T, d_h); k, v (M + T, d_h), the last T of them the queries' own tokens; u: distance -> d_h;
    m_k, m_v: lists of persistent keys and values. Returns (T, d_h).
    """
    head_dim = q.size(1)
    before = k.size(0) - q.size(0)
    rows = []
    for t in range(q.size(0)):
        scores, read = [], []
        for c in range(k.size(0)):
            distance = before + t - c
            if (1 - include_self) <= distance <= span:
                scores.append(q[t] @ (k[c] + u(distance)) / math.sqrt(head_dim))
                read.append(v[c])
        for key, value in zip(m_k, m_v, strict=True):
            scores.append(q[t] @ key / math.sqrt(head_dim))
            read.append(value)
        if not scores:
            rows.append(torch.zeros_like(q[t]))
            continue
        exponentials = [torch.exp(s) for s in scores]
        total = sum(exponentials)
        rows.append(sum(e / total * value for e, value in zip(exponentials, read, strict=True)))
    return torch.stack(rows)


def multi_head(layer, x, context, u, span):
    """Equation 14's sublayer for one stream: x (T, d), context (M + T, d), both ending alike."""
    heads = []
    for h in range(layer.num_heads):
        rows = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        m_k, m_v = [], []
        if layer.persistent is not None:
            count = layer.persistent.keys.size(1)
            m_k = [math.sqrt(layer.head_dim) * m for m in layer.persistent.keys[h]]
            m_v = [math.sqrt(count) * m for m in layer.persistent.values[h]]
        heads.append(
            attend(
                x @ layer.q_proj.weight[rows].T,
                context @ layer.k_proj.weight[rows].T,
                context @ layer.v_proj.weight[rows].T,
                u,
                m_k,
                m_v,
                span,
                include_self=layer.window.nearest == 0,
            )
        )
    return torch.cat(heads, dim=1) @ layer.out_proj.weight.T


def layer_norm(x, weight, bias, eps=1e-5):
    """Normalise each row of x (T, d) by its mean and standard deviation."""
    mean = x.mean(dim=1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def network(decoder, tokens, span):
    """Scores (T, V) of a whole stream at once: tokens (T,), nothing before them."""
    x = decoder.embed_scale * torch.stack([decoder.embed_tokens.weight[t] for t in tokens])
    farthest = decoder.positions.farthest
    weight = decoder.positions.weight

    def u(distance):
        return weight[min(distance, farthest) - 1]

    for layer in decoder.layers:
        attended = multi_head(layer.self_attn, x, x, u, span)
        norm = layer.self_attn_layer_norm
        x = layer_norm(x + attended, norm.weight, norm.bias)
        if layer.feed_forward is not None:
            f = layer.feed_forward
            inner = torch.clamp(x @ f.fc1.weight.T + f.fc1.bias, min=0)
            norm = layer.final_layer_norm
            x = layer_norm(x + inner @ f.fc2.weight.T + f.fc2.bias, norm.weight, norm.bias)
    scores = x @ decoder.output_projection.weight.T
    bias = decoder.output_projection.bias
    return scores if bias is None else scores + bias
