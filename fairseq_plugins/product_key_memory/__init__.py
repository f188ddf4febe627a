"""Product-key memory (Lample et al. 2019, arXiv:1907.05242): large key/value memories as layers.

Begin with :mod:`.memory`, the layer, and :mod:`.search`, the keys.
"""

from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ, refuse_without_fairseq
from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform

if HAS_FAIRSEQ:
    from fairseq_plugins.product_key_memory.model import MemoryLanguageModel, MemoryTransformer
    from fairseq_plugins.product_key_memory.optimizer import AdamWithMemory
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = [
    "AdamWithMemory",
    "MemoryLanguageModel",
    "MemorySublayer",
    "MemoryTransformer",
    "MemoryUsage",
    "ProductKeyMemory",
    "kl_from_uniform",
]
