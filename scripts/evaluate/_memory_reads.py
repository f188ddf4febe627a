"""What each head of a product-key memory reads, and how much two heads have in common.

Lample et al. 2019 (arXiv:1907.05242), sections 3.3 ("for the same input we observe very little
overlap between the keys selected by two different heads") and 4.2.

Shapes: N tokens, H heads, k slots read by a head, K slots.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage

# Shares of all reads of which the slots that carry them are counted.
SHARES = (0.5, 0.9)
# At most so many slots are kept of the curve from the most read to the least read one.
_POINTS = 200
_PLACE = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


class MemoryReads(MemoryUsage):
    """The weights with which the slots of one memory were read, and the slots that heads share.

    Args:
        slots: K.
        heads: H.

    Attributes:
        counted: of the next reads, only those of the tokens that are true here, (N,); None for all.
    """

    def __init__(self, slots: int, heads: int) -> None:
        super().__init__(slots, heads, by_head=True)
        self.counted: Tensor | None = None
        self.knn = 0
        # slots that head i and head j both read for the same token, added up: (H, H)
        self._shared = torch.zeros(heads, heads, dtype=torch.long)

    def record(self, slots: Tensor, weights: Tensor) -> None:
        """Add the reads of ``slots`` with ``weights``, both (N, H, k)."""
        if self.counted is not None:
            slots, weights = slots[self.counted], weights[self.counted]
        super().record(slots, weights)
        self.knn = slots.size(-1)
        self._shared = self._shared.to(slots.device)
        for one, other in combinations(range(self.heads), 2):
            # a head reads a slot once at most: what is there twice is of both
            both = torch.cat([slots[:, one], slots[:, other]], dim=-1).sort(dim=-1).values
            shared = (both[:, 1:] == both[:, :-1]).sum()
            self._shared[one, other] += shared
            self._shared[other, one] += shared

    def clear(self) -> None:
        """Forget all reads."""
        super().clear()
        self._shared.zero_()

    def overlap_of_tokens(self) -> Tensor:
        """Return which share of the k slots that a token reads with head i it reads with j: (H, H).

        It is the mean over the tokens, and the same for j and i.
        """
        shares = self._shared.double() / (self.tokens * self.knn)
        return shares.fill_diagonal_(1)

    def overlap_of_slots(self) -> Tensor:
        """Return which share of the slots that head i reads at all head j reads too: (H, H)."""
        used = (self.reads > 0).double()
        return used @ used.t() / used.sum(1, keepdim=True)


@contextmanager
def record_usage(model: nn.Module) -> Iterator[dict[str, MemoryReads]]:
    """Record what the memories of ``model`` read in the block: by name, as validation logs them.

    The names are ``memory6`` for layer 6 of a language model, ``encoder_memory3`` or
    ``decoder_memory3`` where there is an encoder. Raises ValueError for a model without memories.
    """
    memories = {
        _name(model, path): module
        for path, module in model.named_modules()
        if isinstance(module, ProductKeyMemory)
    }
    if not memories:
        raise ValueError(
            f"{type(model).__name__} has no product-key memory to record: take a model that was "
            "trained with --memory-layers, --encoder-memory-layers or --decoder-memory-layers"
        )
    recorded = {
        name: MemoryReads(len(memory.values), memory.heads) for name, memory in memories.items()
    }
    with ExitStack() as stack:
        for name, memory in memories.items():
            # memory.usage belongs to validation, which takes it away after each batch
            stack.enter_context(memory.keys.register_forward_hook(_recorder(recorded[name])))
        yield recorded


def _name(model: nn.Module, path: str) -> str:
    place = _PLACE.search(path)
    if place is None:
        return path
    part = f"{place[1]}_" if hasattr(model, "encoder") else ""
    return f"{part}memory{int(place[2]) + 1}"


def _recorder(reads: MemoryReads) -> Callable[..., None]:
    def record(_: nn.Module, inputs: Any, found: tuple[Tensor, Tensor]) -> None:
        scores, slots = found
        reads.record(slots, scores.detach().softmax(-1))

    return record


def slots_that_carry(reads: Tensor, share: float) -> int:
    """Return how many of the most read slots have ``share`` of all reads, given z' (K,)."""
    carried = reads.sort(descending=True).values.cumsum(0)
    # sums that should be equal differ in their last digits
    return int((carried < share * carried[-1] * (1 - 1e-9)).sum()) + 1


def curve(reads: Tensor) -> dict[str, list]:
    """Return some of the slots that were read, most read first: ranks from 1 and weights.

    A weight is z_i · K: 1 for a slot that is read as often as if all were read alike.
    """
    read = reads[reads > 0].sort(descending=True).values
    ranks = np.unique(np.geomspace(1, len(read), _POINTS).round().astype(int))
    weights = read[torch.from_numpy(ranks - 1).to(read.device)] * len(reads) / reads.sum()
    return {"rank": ranks.tolist(), "weight": weights.tolist()}


def describe(recorded: MemoryReads) -> dict[str, Any]:
    """Return all figures of a memory: shares are fractions of 1, the divergence is in nats."""
    reads = recorded.total()
    return {
        "slots": len(reads),
        "heads": recorded.heads,
        "knn": recorded.knn,
        "tokens": recorded.tokens,
        "usage": usage(reads),
        "kl": kl_from_uniform(reads),
        "usage_of_heads": [usage(of_head) for of_head in recorded.reads],
        "slots_with_share": {str(share): slots_that_carry(reads, share) for share in SHARES},
        "overlap_of_tokens": recorded.overlap_of_tokens().tolist(),
        "overlap_of_slots": recorded.overlap_of_slots().tolist(),
        "curve": curve(reads),
    }
