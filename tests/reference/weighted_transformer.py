"""The Weighted Transformer from its equations, one branch and one sentence after the other, slowly.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), equations 1 and 4 to 7.
"""

import itertools

import torch


def attention(queries, keys, values, visible):
    """Scaled dot-product attention of one head and sentence; ``visible`` says which keys count."""
    out = []
    for query, sees in zip(queries, visible, strict=True):
        scores = torch.stack([query @ key for key in keys]) / keys.size(1) ** 0.5
        weights = scores.masked_fill(~sees, float("-inf")).softmax(0)
        out.append(sum(w * value for w, value in zip(weights, values, strict=True)))
    return torch.stack(out)


def branched_attention(module, query, key, visible):
    """Equations 5 to 7 for one sentence: (T, d).

    Args:
        module: a BranchedAttention, whose weights are used.
        query: (T, d).
        key: (S, d), of keys and values.
        visible: (T, S), whether a query sees a key.
    """
    heads, network = module.heads, module.feed_forward
    kappa, alpha = network.weights()
    branches = len(kappa)
    rows = torch.arange(heads.embed_dim).chunk(branches)
    inner_rows = torch.arange(len(network.fc1.bias)).chunk(branches)
    total = torch.zeros_like(query)
    for i in range(branches):
        of_head = [
            x @ linear.weight[rows[i]].T + linear.bias[rows[i]]
            for x, linear in zip(
                (query, key, key), (heads.q_proj, heads.k_proj, heads.v_proj), strict=True
            )
        ]
        head = attention(*of_head, visible)
        scaled = kappa[i] * (head @ network.out_proj.weight[:, rows[i]].T + network.out_proj.bias)
        inner = scaled @ network.fc1.weight[inner_rows[i]].T + network.fc1.bias[inner_rows[i]]
        out = inner.clamp(min=0) @ network.fc2.weight[:, inner_rows[i]].T + network.fc2.bias
        total = total + alpha[i] * out
    return total


def nearest_on_simplex(x):
    """The nearest vector of no negative numbers with sum 1, by trying every set of positive ones.

    With a given set the nearest is found by taking the same from each of its numbers.
    """
    best, distance = None, float("inf")
    for size in range(1, len(x) + 1):
        for chosen in itertools.combinations(range(len(x)), size):
            kept = x[list(chosen)]
            y = torch.zeros_like(x)
            y[list(chosen)] = kept - (kept.sum() - 1) / size
            if (y >= 0).all() and (x - y).square().sum() < distance:
                best, distance = y, (x - y).square().sum()
    return best
