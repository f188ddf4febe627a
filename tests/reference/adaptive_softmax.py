"""Adaptive softmax, token by token (Grave et al. 2017, section 4; Baevski and Auli 2018)."""

import torch


def log_probability(softmax, x, symbol):
    """Return log p(symbol | x) for x (d,), from the weights of fairseq's tied AdaptiveSoftmax."""
    weights = softmax.head.word_proj.weight, softmax.head.class_proj.weight
    head = torch.cat([weight @ x for weight in weights]).log_softmax(0)
    first = softmax.cutoff[0]
    if symbol < first:
        return head[symbol]
    for i, (begin, end) in enumerate(zip(softmax.cutoff, softmax.cutoff[1:], strict=False)):
        if begin <= symbol < end:
            projection, embeddings = softmax.tail[i][0], softmax.tail[i][2]
            within = embeddings.weight @ (projection.weight.T @ x)
            return head[first + i] + within.log_softmax(0)[symbol - begin]
    raise AssertionError(f"{symbol} is beyond the last cluster")
