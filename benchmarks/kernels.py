"""Compare the fast attention and product-key search with plain implementations.

Shapes: H heads, B streams, T queries, S keys, d_h head width, N tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import BF16, EVALUATION, TRAINING, Case, Model, Setting, Work
from fairseq_plugins.modules import ProductKeyMemory, Window
from fairseq_plugins.segment_language_model.attention import plain_attention
from fairseq_plugins.segment_language_model.attention_blocks import hidden_by_window, rel_shift
from fairseq_plugins.segment_language_model.attention_kernel import window_attention

HEADS, WIDTH = 8, 64


def dense_bias_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rel_keys: Tensor,
    window: Window,
    position_query: Tensor,
) -> tuple[Tensor, None]:
    """Compute ``plain_attention`` by scaled_dot_product_attention with a bias for each score."""
    # (H, B, T, S + 1) -> (H, B, T, S)
    bias = rel_shift(position_query @ rel_keys.unsqueeze(1).mT, keys.size(2))
    lengths = keys.size(2) - query.size(2), query.size(2), keys.size(2)
    hidden = hidden_by_window(*lengths, window, query)
    bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0), None


def attention_case(streams: int, queries: int, keys: int, compiled: bool = False) -> Case:
    """Return a case of relative attention, forward and backward, of B streams, T queries, S keys.

    ``compiled`` adds the plain attention with torch.compile, which takes minutes.
    """

    def build(attention: Callable[..., tuple[Tensor, Any]], setting: Setting) -> Work:
        sizes = [(streams, queries), (streams, keys), (streams, keys), (keys + 1,)]
        sizes += [(streams, queries), (streams, queries)]
        drawn = [torch.randn(HEADS, *size, WIDTH) for size in sizes]
        # queries are divided by √d_h
        drawn[0] /= WIDTH**0.5
        drawn[4] /= WIDTH**0.5
        dtype = torch.bfloat16 if setting.dtype == BF16 else torch.float32
        *leaves, grad = (x.to(setting.device, dtype) for x in drawn)
        for leaf in leaves:
            leaf.requires_grad_()
        query, key, value, rel_keys, position_query = leaves
        window = Window(0, keys - queries)

        def turn() -> Tensor:
            with setting.precision():
                attended, _ = attention(
                    query, key, value, rel_keys, window, position_query=position_query
                )
            return torch.autograd.grad(attended, leaves, grad.to(attended.dtype))[0]

        return Work(turn, turn)

    models = {
        "fast": Model(partial(build, window_attention)),
        "plain": Model(partial(build, plain_attention), same=True),
        "a bias for each score": Model(partial(build, dense_bias_attention), same=True),
    }
    if compiled:
        models["plain, compiled"] = Model(partial(build, torch.compile(plain_attention)), same=True)
    name = f"attention, {HEADS} heads, {queries} queries, {keys} keys"
    return Case("kernels", name, TRAINING, streams * queries, models)


def search_case(slots: int, tokens: int) -> Case:
    """Return a case of the search in a memory, query network included, without gradients."""

    def build(kernel: str, setting: Setting) -> Work:
        memory = ProductKeyMemory(512, slots, heads=4, knn=32, value_dim=1, kernel=kernel)
        memory = setting.prepare(memory)
        x = torch.randn(tokens, 512).to(memory.values.weight)

        def turn() -> Tensor:
            with setting.precision(training=False):
                return memory.keys(memory.query(x), memory.knn)[0]

        return Work(turn, turn)

    models = {
        "fast": Model(partial(build, "fast")),
        "plain": Model(partial(build, "plain"), same=True),
    }
    name = f"search among {slots:,} slots, 4 heads"
    # of nearly equal scores at the last rank, either may be found
    return Case("kernels", name, EVALUATION, tokens, models, tolerance=1e-5, min_agreement=0.99)


def keys_case(slots: int, tokens: int) -> Case:
    """Return a case of product keys against flat keys, query network included, without gradients.

    Flat keys are searched with faiss where it is installed, and with ``matmul`` and ``topk``.
    """

    def build(keys: str, kernel: str, setting: Setting) -> Work:
        memory = ProductKeyMemory(
            512, slots, heads=4, knn=32, value_dim=1, keys=keys, kernel=kernel
        )
        memory = setting.prepare(memory)
        x = torch.randn(tokens, 512).to(memory.values.weight)

        def turn() -> Tensor:
            with setting.precision(training=False):
                return memory.keys(memory.query(x), memory.knn)[0]

        return Work(turn, turn)

    models = {
        "product keys": Model(partial(build, "product", "fast")),
        "flat keys": Model(partial(build, "flat", "fast")),
        "flat keys, topk": Model(partial(build, "flat", "plain")),
    }
    return Case("kernels", f"keys of {slots:,} slots, 4 heads", EVALUATION, tokens, models)
