"""The fast ways of attention and of a search among product keys beside plain ones.

Shapes: H heads, B streams, T queries, S keys, d_h head width, N tokens.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import BF16, EVALUATION, TRAINING, Case, Entry, Work
from fairseq_plugins.modules import ProductKeyMemory, Window
from fairseq_plugins.segment_language_model.attention import plain_attention
from fairseq_plugins.segment_language_model.attention_blocks import hidden_by_window, rel_shift
from fairseq_plugins.segment_language_model.attention_kernel import window_attention

FAST, PLAIN, DENSE_BIAS, COMPILED = "fast", "plain", "a bias for each score", "plain, compiled"


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


@functools.cache
def _attention(model: str) -> Callable[..., tuple[Tensor, Any]]:
    if model == COMPILED:
        return torch.compile(plain_attention)
    return {FAST: window_attention, PLAIN: plain_attention, DENSE_BIAS: dense_bias_attention}[model]


class KernelCase(Case):
    """A kernel, whose entries share nothing but the random numbers they begin with."""

    paper = "kernels"

    @abstractmethod
    def _work(self, entry: Entry, device: torch.device) -> Work:
        """Return what an entry does."""

    def build(
        self, entries: Sequence[Entry], device: torch.device, published: Mapping[str, Any]
    ) -> list[Work]:
        """Return what the entries do."""
        return [self._work(entry, device) for entry in entries]


class AttentionCase(KernelCase):
    """Relative attention, a forward and a backward pass.

    Args:
        streams: B.
        queries: T.
        keys: S.
        compiled: whether torch.compile takes part, which takes minutes.
    """

    models = (FAST, PLAIN, DENSE_BIAS, COMPILED)
    same = (PLAIN, DENSE_BIAS, COMPILED)
    heads, width = 8, 64

    def __init__(self, streams: int, queries: int, keys: int, compiled: bool = False) -> None:
        name = f"attention, {self.heads} heads, {queries} queries, {keys} keys"
        super().__init__(name, TRAINING, streams * queries)
        self.streams, self.queries, self.keys, self.compiled = streams, queries, keys, compiled

    def present(self) -> list[str]:
        """All kernels, torch.compile's on request."""
        return [model for model in self.models if self.compiled or model != COMPILED]

    def _work(self, entry: Entry, device: torch.device) -> Work:
        torch.manual_seed(1)
        streams, queries, keys = self.streams, self.queries, self.keys
        sizes = [(streams, queries), (streams, keys), (streams, keys), (keys + 1,)]
        sizes += [(streams, queries), (streams, queries)]
        drawn = [torch.randn(self.heads, *size, self.width) for size in sizes]
        # queries are divided by √d_h
        drawn[0] /= self.width**0.5
        drawn[4] /= self.width**0.5
        dtype = torch.bfloat16 if entry.dtype == BF16 else torch.float32
        *leaves, grad = (x.to(device, dtype) for x in drawn)
        for leaf in leaves:
            leaf.requires_grad_()
        query, key, value, rel_keys, position_query = leaves
        window, attention = Window(0, keys - queries), _attention(entry.model)

        def turn() -> Tensor:
            with entry.precision(device):
                attended, _ = attention(
                    query, key, value, rel_keys, window, position_query=position_query
                )
            return torch.autograd.grad(attended, leaves, grad.to(attended.dtype))[0]

        return Work(turn, turn)


class SearchCase(KernelCase):
    """A search for slots, from the tokens on, without gradients.

    Args:
        slots: of the memory.
        tokens: N.
    """

    models = (FAST, PLAIN)
    same = (PLAIN,)
    # of two all but equal scores either may be the last
    agreeing = 0.99
    tolerance = 1e-5

    def __init__(self, slots: int, tokens: int) -> None:
        super().__init__(f"search among {slots:,} slots, 4 heads", EVALUATION, tokens)
        self.slots = slots

    def _work(self, entry: Entry, device: torch.device) -> Work:
        torch.manual_seed(1)
        search = "torch" if entry.model == FAST else entry.model
        memory = ProductKeyMemory(512, self.slots, heads=4, knn=32, value_dim=1, search=search)
        memory = entry.prepare(memory, device)
        x = torch.randn(self.tokens, 512).to(memory.values)

        def turn() -> Tensor:
            with entry.precision(device, training=False):
                return memory.keys(memory.query_network(x), memory.knn)[0]

        return Work(turn, turn)
