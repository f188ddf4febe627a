"""Product-key memory, token by token and key by key, in float64 (Lample et al. 2019, section 3).

The output gate comes from Memory Layers at Scale (Berges et al. 2024).
"""

import torch


def best_pairs(first, second, k):
    """Return slots i·n + j of the k largest of all n² sums first[i] + second[j], best first.

    Equal sums are ordered by the better first sub-score, then the lower i, then the better second
    sub-score, then the lower j. Sums have the tensors' precision.
    """
    n = len(first)
    ones, others = first.tolist(), second.tolist()
    sums = [(first[i] + second).tolist() for i in range(n)]

    def rank(slot):
        i, j = divmod(slot, n)
        return -sums[i][j], -ones[i], i, -others[j], j

    return sorted(range(n * n), key=rank)[:k]


def best_keys(scores, k):
    """Return the numbers of the k largest scores, best first; ties go to the lower number."""
    listed = scores.tolist()
    return sorted(range(len(listed)), key=lambda number: (-listed[number], number))[:k]


def linear(layer, vector):
    """Compute W·x + b, one output at a time."""
    outputs = [row @ vector for row in layer.weight.double()]
    if layer.bias is not None:
        biases = layer.bias.double()
        outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
    return torch.stack(outputs)


def batch_norm(norm, vectors, training):
    """Normalise each feature of a list of vectors, over the vectors or by running statistics."""
    if not vectors:
        return []
    features = []
    for f in range(len(vectors[0])):
        column = [vector[f] for vector in vectors]
        mean, variance = norm.running_mean[f].double(), norm.running_var[f].double()
        if training:
            mean = sum(column) / len(column)
            variance = sum((value - mean) ** 2 for value in column) / len(column)
        weight, bias = norm.weight[f].double(), norm.bias[f].double()
        deviation = torch.sqrt(variance + norm.eps)
        features.append([(value - mean) / deviation * weight + bias for value in column])
    return [torch.stack(list(row)) for row in zip(*features, strict=True)]


def queries(network, tokens, training):
    """Return H queries (d_q,) for each of the tokens, a list of vectors (d,) (section 3.1)."""
    vectors = []
    linear_layers = [layer for layer in network.layers if hasattr(layer, "weight")]
    for token in tokens:
        vector = token.double()
        for number, layer in enumerate(linear_layers):
            vector = linear(layer, torch.clamp(vector, min=0) if number else vector)
        vectors.append(vector)
    if network.batch_norm is not None:
        vectors = batch_norm(network.batch_norm, vectors, training)
    by_head = []
    for vector in vectors:
        width = len(vector) // network.heads
        by_head.append([vector[h * width : (h + 1) * width] for h in range(network.heads)])
    return by_head


def select(keys, head, query, k):
    """Return slots and scores (k,) of the best of all K keys, product or flat (equation 1)."""
    if hasattr(keys, "keys"):
        scores = torch.stack([key.double() @ query for key in keys.keys[head]])
        slots = best_keys(scores, k)
        return slots, torch.stack([scores[slot] for slot in slots])
    half = len(query) // 2
    # a key concatenates a sub-key of each set, so its score is the sum of their scores
    first = torch.stack([key.double() @ query[:half] for key in keys.subkeys[head, 0]])
    second = torch.stack([key.double() @ query[half:] for key in keys.subkeys[head, 1]])
    slots = best_pairs(first, second, k)
    n = len(first)
    return slots, torch.stack([first[slot // n] + second[slot % n] for slot in slots])


def gated(gate, token, vector):
    """Compute y ⊙ SiLU(x W₁), number by number; SiLU(a) = a / (1 + e^-a)."""
    opened = [a / (1 + torch.exp(-a)) for a in linear(gate, token.double())]
    return torch.stack([y * g for y, g in zip(vector, opened, strict=True)])


def read_memory(memory, token, heads):
    """Return what a token (d,) reads with H queries, ``heads`` (equations 1 to 3, section 3.3)."""
    table, output = memory.values.weight, memory.output
    total = torch.zeros(table.size(1), dtype=torch.float64)
    for head, query in enumerate(heads):
        slots, scores = select(memory.keys, head, query, memory.knn)
        exponentials = torch.exp(scores - scores.max())
        weights = exponentials / exponentials.sum()
        for slot, weight in zip(slots, weights, strict=True):
            total = total + weight * table[slot].double()
    if output.gate is not None:
        total = gated(output.gate, token, total)
    return total if output.projection is None else linear(output.projection, total)


def product_key_memory(memory, x, padding=None):
    """Return the output (N, d) without dropout for tokens x (N, d); padding is a list of bool."""
    padding = [False] * len(x) if padding is None else padding
    tokens = [vector for vector, pad in zip(x, padding, strict=True) if not pad]
    vectors = queries(memory.query, tokens, memory.training)
    outputs = [read_memory(memory, *both) for both in zip(tokens, vectors, strict=True)]
    rest = iter(outputs)
    nothing = torch.zeros(x.size(1), dtype=torch.float64)
    return torch.stack([nothing if pad else next(rest) for pad in padding])
