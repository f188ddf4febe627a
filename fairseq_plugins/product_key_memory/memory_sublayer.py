"""A memory in the place of a position-wise map, which is called with its input alone.

Lample et al. 2019 (arXiv:1907.05242), section 3.3: a memory stands where a transformer's
feed-forward sublayer is, and what it reads is added to its input.

Shapes: d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory


class MemorySublayer(nn.Module):
    """Calls a memory with the padding that the layer around it has set.

    Args:
        memory: what is called.
    """

    def __init__(self, memory: ProductKeyMemory) -> None:
        super().__init__()
        self.memory = memory
        self._num_updates = 0

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Map (…, d) to (…, d); ``padding_mask`` (…) is true for padding."""
        return self.memory(x, padding_mask)

    def set_num_updates(self, num_updates: int) -> None:
        """Take note of the number of updates so far; fairseq calls it before each batch.

        Raises:
            ValueError: an update was made, and the gradient of the memory's values, which only
                ``adam_with_memory`` knows of, was not used.
        """
        values = self.memory.values
        unused = not values.requires_grad and values.grad is not None
        if unused and num_updates > self._num_updates:
            raise ValueError(
                "an update was made without the values of a product-key memory: --optimizer "
                "adam_with_memory has to see the model's parameters one by one; give "
                "--fp16-no-flatten-grads with --fp16, and no optimizer around it"
            )
        self._num_updates = num_updates
