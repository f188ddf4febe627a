"""Product-key memory: large key-value memory layers with an exact, cheap search.

Lample et al. 2019 (arXiv:1907.05242). The layer by itself: :class:`.ProductKeyMemory`.
"""

from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.model import MemoryLanguageModel, MemoryTransformer
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemory

__all__ = [
    "AdamWithMemory",
    "MemoryLanguageModel",
    "MemorySublayer",
    "MemoryTransformer",
    "ProductKeyMemory",
]
