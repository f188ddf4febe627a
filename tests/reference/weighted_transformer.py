"""The Weighted Transformer from its equations, one branch and one sentence at a time.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), equations 1 and 4 to 7.
"""

import torch


def attention(queries, keys, values, visible):
    """Compute the attention of one head and sentence; ``visible`` says which keys count."""
    out = []
    for query, sees in zip(queries, visible, strict=True):
        scores = keys @ query / keys.size(1) ** 0.5
        out.append(scores.masked_fill(~sees, float("-inf")).softmax(0) @ values)
    return torch.stack(out)


def branch_weights(weights):
    """Return κ or α of M branches as applied, a list: the ``top_k`` largest, times their sum."""
    values = getattr(weights, weights.name)
    if weights.softmax:
        values = values.exp() / values.exp().sum()
    by_size = sorted(range(len(values)), key=lambda i: -float(values[i]))
    used = by_size[: weights.top_k]
    return [weights.total * values[i] if i in used else 0 * values[i] for i in range(len(values))]


def branch_head(i, heads, query, key, visible):
    """Compute equation 5 for branch i, from 0, of one sentence, (T, h); ``heads`` has the weights.

    ``query`` is (T, d), ``key``, projected to keys and values, (S, d); ``visible`` (T, S) says
    which queries see which keys.
    """
    rows = torch.arange(heads.q_proj.out_features).chunk(heads.num_heads)[i]
    projections = (heads.q_proj, query), (heads.k_proj, key), (heads.v_proj, key)
    projected = [x @ linear.weight[rows].T + linear.bias[rows] for linear, x in projections]
    return attention(*projected, visible)


def projected(i, head, weight, bias, branches, total):
    """Compute b_i = head_i W^{O_i} + b^O/S, with the output projection's weights: (T, d)."""
    columns = torch.arange(weight.size(1)).chunk(branches)[i]
    return head @ weight[:, columns].T + bias / total


def feed_forward(i, z, fc1, fc2, branches, total):
    """Compute F_i(z), equation 4 with the i-th slice of the inner vector: (T, d)."""
    rows = torch.arange(len(fc1.bias)).chunk(branches)[i]
    inner = (z @ fc1.weight[rows].T + fc1.bias[rows]).clamp(min=0)
    return inner @ fc2.weight[:, rows].T + fc2.bias / total


def branched_attention(module, query, key, visible):
    """Compute equations 5 to 7 for one sentence with an attention's weights: (T, d).

    Its output projection is a BranchedFeedForward.
    """
    fc1, fc2 = module.out_proj.fc1, module.out_proj.fc2
    kappa, alpha = branch_weights(fc1.weights), branch_weights(fc2.weights)
    rest = len(kappa), fc1.weights.total
    result = torch.zeros_like(query)
    for i in range(len(kappa)):
        head = branch_head(i, module, query, key, visible)
        z = kappa[i] * projected(i, head, fc1.out_weight, fc1.out_bias, *rest)
        result = result + alpha[i] * feed_forward(i, z, fc1, fc2, *rest)
    return result


def weighted_attention(module, query, key, visible):
    """Compute Σ_i κ_i b_i of an attention whose projection is a WeightedLinear: (T, d)."""
    out_proj = module.out_proj
    kappa = branch_weights(out_proj.weights)
    rest = out_proj.weight, out_proj.bias, len(kappa), out_proj.weights.total
    heads = [branch_head(i, module, query, key, visible) for i in range(len(kappa))]
    return sum(kappa[i] * projected(i, head, *rest) for i, head in enumerate(heads))


def plain_attention(module, query, key, visible):
    """Compute equation 3 of an attention without branches: (T, d)."""
    heads = [branch_head(i, module, query, key, visible) for i in range(module.num_heads)]
    return torch.cat(heads, 1) @ module.out_proj.weight.T + module.out_proj.bias


ATTENTIONS = {
    "Linear": plain_attention,
    "WeightedLinear": weighted_attention,
    "BranchedFeedForward": branched_attention,
}


def weighted_feed_forward(layer, x):
    """Compute Σ_i α_i F_i(x) of a layer whose second map is a WeightedLinear: (T, d)."""
    alpha = branch_weights(layer.fc2.weights)
    rest = layer.fc1, layer.fc2, len(alpha), layer.fc2.weights.total
    return sum(alpha[i] * feed_forward(i, x, *rest) for i in range(len(alpha)))


def layer_output(layer, x, visible, source=None, source_visible=None):
    """Compute a layer of either variant for one sentence, (T, d).

    A decoder layer has the encoder's output ``source`` (S, d), and which of it (T, S) queries see.
    """

    def sublayer(x, norm, function):
        if layer.pre_norm:
            return x + function(layer_norm(x, norm))
        return layer_norm(x + function(x), norm)

    def attend(module, query, key, visible):
        return ATTENTIONS[type(module.out_proj).__name__](module, query, key, visible)

    norm = layer.self_attn_layer_norm
    x = sublayer(x, norm, lambda query: attend(layer.self_attn, query, query, visible))
    if source is not None:
        norm, attention = layer.encoder_attn_layer_norm, layer.encoder_attn
        x = sublayer(x, norm, lambda query: attend(attention, query, source, source_visible))
    if layer.fc2 is not None:
        x = sublayer(x, layer.final_layer_norm, lambda h: weighted_feed_forward(layer, h))
    return x


def layer_norm(x, norm):
    """Normalise each token of (T, d) to mean 0 and variance 1, then scale and shift it."""
    centered = x - x.mean(1, keepdim=True)
    deviation = (centered.square().mean(1, keepdim=True) + norm.eps).sqrt()
    return centered / deviation * norm.weight + norm.bias
