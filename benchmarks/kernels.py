"""Compare the fast attention and product-key search with plain implementations.

Shapes: H heads, B streams, T queries, S keys, d_h head width, N tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import BF16, EVALUATION, TRAINING, Case, Model, Setting, Work
from fairseq_plugins.modules import ProductKeyMemory, Window
from fairseq_plugins.segment_language_model.attention import KERNELS

HEADS, WIDTH = 8, 64


def attention_case(streams: int, queries: int, keys: int) -> Case:
    """Return a case of relative attention, forward and backward: B streams, T queries, S keys."""

    def build(attention: Callable[..., Tensor], setting: Setting) -> Work:
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
                attended = attention(
                    query, key, value, rel_keys, window, position_query=position_query
                )
            return torch.autograd.grad(attended, leaves, grad.to(attended.dtype))[0]

        return Work(turn, turn)

    models = {
        name: Model(partial(build, attend), same=name != "fast") for name, attend in KERNELS.items()
    }
    name = f"attention, {HEADS} heads, {queries} queries, {keys} keys"
    return Case("kernels", name, TRAINING, streams * queries, models)


def build_search(slots: int, tokens: int, keys: str, kernel: str, setting: Setting) -> Work:
    """Return the search in a memory, query network included, without gradients."""
    memory = ProductKeyMemory(512, slots, heads=4, knn=32, value_dim=1, keys=keys, kernel=kernel)
    memory = setting.prepare(memory)
    x = torch.randn(tokens, 512).to(memory.values.weight)

    def turn() -> Tensor:
        with setting.precision(training=False):
            return memory.keys(memory.query(x), memory.knn)[0]

    return Work(turn, turn)


def search_case(slots: int, tokens: int) -> Case:
    """Return a case of the search with our kernels against the paper's equations."""
    build = partial(build_search, slots, tokens, "product")
    models = {
        "fast": Model(partial(build, "fast")),
        "plain": Model(partial(build, "plain"), same=True),
    }
    name = f"search among {slots:,} slots, 4 heads"
    # of nearly equal scores at the last rank, either may be selected
    return Case("kernels", name, EVALUATION, tokens, models, tolerance=1e-5, min_agreement=0.99)


def keys_case(slots: int, tokens: int) -> Case:
    """Return a case of product keys against flat keys."""
    build = partial(build_search, slots, tokens)
    models = {
        "product keys": Model(partial(build, "product", "fast")),
        "flat keys": Model(partial(build, "flat", "fast")),
    }
    return Case("kernels", f"keys of {slots:,} slots, 4 heads", EVALUATION, tokens, models)
